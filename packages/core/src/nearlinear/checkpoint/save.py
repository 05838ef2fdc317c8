"""Write a checkpoint: every block of every tensor once, whoever holds it, and then the index."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence

from .. import runtime
from ..errors import CheckpointError
from ..parallel import loss_scale
from . import about, holdings, index, saving, state, storage
from .agree import everyone
from .index import Index
from .pieces import Piece, writers
from .saving import Saving, file_of
from .storage import Place

RESERVED = {about.KEY, "optimizer", "loss_scaler"}


def save(
    folder,
    model,
    optimizer=None,
    loader=None,
    scheduler=None,
    *,
    step: int = 0,
    wait: bool = False,
    overlap: bool = False,
    **others,
) -> Saving:
    """Write all that training needs to go on after ``step`` into ``folder``.

    Returns once the state is copied to host memory; the files are written while training goes on,
    and ``.wait()`` on what is returned is when they are there. The next save, `load` and leaving
    the job wait for it. It is a checkpoint from the moment its index is there; a save that fails,
    on whatever rank, leaves none and raises CheckpointError on all, from whatever waits for it.

    ``wait``: return when it is there. ``overlap``: the copy goes on beside the next forward and
    backward pass, too, and ``optimizer.step()`` waits for it: for loops in which nothing else
    changes parameters or the optimizer's state. ``others``: what else has a ``state_dict()`` that
    JSON can carry, the same on all ranks, each saved under its name. ``folder`` must be one that
    all nodes see, or parts that something brings together, or ``s3://bucket/prefix``. A collective
    call, between steps.
    """
    others |= {"loader": loader, "scheduler": scheduler}
    started = begin(storage.at(folder), step, model, optimizer, others, overlap=overlap)
    if wait:
        started.wait()
    return started


def begin(
    folder: Place,
    step: int,
    model,
    optimizer,
    others: dict,
    after: Callable = lambda: None,
    overlap: bool = False,
) -> Saving:
    """`save`, with ``after()`` on the first rank of every node once the checkpoint is there."""
    saving.finish()  # the one before
    now = runtime.current()
    if taken := others.keys() & RESERVED:
        raise CheckpointError(f"{min(taken)} is a name of the checkpoint's own: choose another")
    tensors = dict(state.of_model(model))
    values: dict = {about.KEY: about.about(model)}
    if optimizer is not None:
        tensors |= state.of_optimizer(optimizer, model)
        mine = state.settings(optimizer, model)
        stages = now.mesh.pipeline > 1
        values["optimizer"] = state.joined(everyone(mine)) if stages else mine
    for name, part in (*others.items(), ("loss_scaler", loss_scale.of(model))):
        if part is not None:
            values[name] = _as_json(name, part.state_dict())
    tensors |= state.random_state(now.rank, now.device)
    here = holdings.blocks_of(tensors)
    mine = [uuid.uuid4().hex, holdings.told(tensors, here)]
    names, told = zip(*everyone(mine), strict=True)
    chosen = [_by_name(of_rank) for of_rank in writers([list(holdings.listed(e)) for e in told])]
    written = {
        index.key(name, number): here[name][piece]
        for name, pieces in chosen[now.rank].items()
        for number, piece in enumerate(pieces)
    }

    def made(files: list[index.File | None]) -> Index:
        return _index(step, told, chosen, files, values)

    later = _changed_by_steps(model, chosen[now.rank]) if overlap and optimizer is not None else ()
    return saving.start(folder, names[0], written, made, after, optimizer, later)


def _changed_by_steps(model, chosen: dict[str, list[Piece]]) -> set[str]:
    """The keys of what a forward and backward pass leave as it is."""
    steady = {f"{state.MODEL}/{name}" for name in state.parameter_names(model).values()}
    return {
        index.key(name, number)
        for name, pieces in chosen.items()
        if name in steady or name.startswith(f"{state.OPTIMIZER}/")
        for number in range(len(pieces))
    }


def _as_json(name: str, values: dict) -> dict:
    """``values`` as they are now, and as the index will have them. Raises CheckpointError."""
    try:
        return json.loads(json.dumps(values))
    except TypeError as error:
        raise CheckpointError(f"{name}.state_dict() has what JSON cannot carry: {error}") from None


def _by_name(chosen: set[tuple[str, Piece]]) -> dict[str, list[Piece]]:
    found: dict[str, list[Piece]] = {}
    for name, piece in sorted(chosen):
        found.setdefault(name, []).append(piece)
    return found


def _index(step: int, told: Sequence[dict], chosen: list[dict], files: list, values: dict) -> Index:
    """The same on every rank. ``chosen``: the blocks each rank has written, by name."""
    world, tensors = len(told), {}
    for rank, written in enumerate(chosen):
        for name, pieces in written.items():
            entry = told[rank][name]
            tensor = index.Tensor(entry["dtype"], tuple(entry["shape"]), {})
            tensors.setdefault(name, tensor).pieces[file_of(rank, world)] = pieces
    there = {file_of(rank, world): file for rank, file in enumerate(files) if file}
    return Index(step, world, tensors, there, values)


def remove(folder: Place) -> None:
    """Delete a checkpoint: its index first, so that nothing half deleted looks whole."""
    (folder / index.NAME).remove()
    folder.clear()
