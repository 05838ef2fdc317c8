"""Write a checkpoint: every block of every tensor once, whoever holds it, and then the index."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from .. import runtime
from ..errors import CheckpointError
from ..parallel import loss_scale
from . import index, state
from .agree import everyone
from .index import Index
from .pieces import Piece, blocks, writers


def save(folder, model, optimizer=None, loader=None, scheduler=None, *, step: int = 0) -> Path:
    """Write all that training needs to go on after ``step`` into ``folder``; its path.

    ``folder`` must be one that all nodes see, or parts that something brings together. It is a
    checkpoint from the moment its index is there; a save that fails, on whatever rank, leaves none
    and raises CheckpointError on all. A collective call, between steps.
    """
    now, folder = runtime.current(), Path(folder)
    tensors = dict(state.of_model(model))
    values: dict = {}
    if optimizer is not None:
        tensors |= state.of_optimizer(optimizer, model)
        mine = state.settings(optimizer, model)
        stages = now.mesh.pipeline > 1
        values["optimizer"] = state.joined(everyone(mine)) if stages else mine
    parts = (("loader", loader), ("scheduler", scheduler), ("loss_scaler", loss_scale.of(model)))
    for name, part in parts:
        if part is not None:
            values[name] = part.state_dict()
    tensors |= state.random_state(now.rank, now.device)
    here = {name: blocks(part.tensor, part.cuts) for name, part in tensors.items()}
    told = everyone(
        {
            name: {"dtype": str(part.tensor.dtype).removeprefix("torch."), "shape": part.shape,
                   "blocks": [(p.offset, p.shape, v.nbytes) for p, v in here[name].items()]}
            for name, part in tensors.items()
        }
    )  # fmt: skip
    chosen = writers([list(_held(rank)) for rank in told])
    parts = [_by_name(blocks_of_rank) for blocks_of_rank in chosen]
    files = _write(
        folder,
        {
            index.key(name, number): here[name][piece]
            for name, pieces in parts[now.rank].items()
            for number, piece in enumerate(pieces)
        },
    )
    found = _index(step, told, parts, files, values)
    _finish(folder, found)
    return folder


def file_of(rank: int, world: int) -> str:
    """Where a rank's blocks are."""
    return f"rank-{rank:05d}-of-{world:05d}.safetensors"


def _write(folder: Path, mine: dict[str, torch.Tensor]) -> list[index.File | None]:
    """Write this rank's file; what each rank's looks like, None for those that write none."""
    now = runtime.current()
    answer: dict = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / index.NAME).unlink(missing_ok=True)  # of an earlier save of this step
        if mine:
            found = _write_file(folder / file_of(now.rank, now.mesh.world), mine)
            answer = {"bytes": found.bytes, "sha256": found.sha256}
    except OSError as error:
        answer = {"failed": f"rank {now.rank} cannot write {folder}: {error.strerror or error}"}
    except Exception as error:  # safetensors raises its own
        answer = {"failed": f"rank {now.rank} cannot write {folder}: {error}"}
    answers = everyone(answer)
    failed = [answer["failed"] for answer in answers if "failed" in answer]
    if failed:
        raise CheckpointError(
            f"{failed[0]}; checkpoints that were there before are as they were: make room or mend "
            "the permissions, or choose another folder"
        )
    return [index.File(**answer) if answer else None for answer in answers]


def _write_file(path: Path, mine: dict[str, torch.Tensor]) -> index.File:
    """The file at ``path``, on the disk when this returns."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        save_file({key: block.cpu().contiguous() for key, block in mine.items()}, partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        found = index.digest(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return found


def _held(told: dict) -> Iterator[tuple[str, Piece, int]]:
    """What a rank has told of its blocks."""
    for name, entry in told.items():
        for offset, shape, size in entry["blocks"]:
            yield name, Piece(tuple(offset), tuple(shape)), size


def _by_name(chosen: set[tuple[str, Piece]]) -> dict[str, list[Piece]]:
    found: dict[str, list[Piece]] = {}
    for name, piece in sorted(chosen):
        found.setdefault(name, []).append(piece)
    return found


def _index(step: int, told: list[dict], chosen: list[dict], files: list, values: dict) -> Index:
    """The same on every rank. ``chosen``: the blocks each rank has written, by name."""
    world, tensors = len(told), {}
    for rank, written in enumerate(chosen):
        for name, pieces in written.items():
            entry = told[rank][name]
            tensor = index.Tensor(entry["dtype"], tuple(entry["shape"]), {})
            tensors.setdefault(name, tensor).pieces[file_of(rank, world)] = pieces
    there = {file_of(rank, world): file for rank, file in enumerate(files) if file}
    return Index(step, world, tensors, there, values)


def _finish(folder: Path, found: Index) -> None:
    """Put the index in place, once on every node: nodes may see folders of their own."""
    failed = ""
    if runtime.first_of_node():
        try:
            index.settle(folder)
            found.write(folder)
        except OSError as error:
            failed = f"{folder / index.NAME} cannot be written: {error.strerror}"
    failures = [why for why in everyone(failed) if why]
    if failures:
        raise CheckpointError(f"{failures[0]}; the checkpoints before it are as they were")


def remove(folder: Path) -> None:
    """Delete a checkpoint: its index first, so that nothing half deleted looks whole."""
    (folder / index.NAME).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
