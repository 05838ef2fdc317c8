"""Write a checkpoint: every shard of every tensor once, and then the index.

The plan of a save assigns shards to ranks, and all ranks agree on it. A plan is valid as long as
the state's tensors keep their memory, from the first step of the optimizer on; their values may
change. The checkpoints of a run lie in one folder, where `save_and_prune` deletes old ones.
"""

from __future__ import annotations

import functools
import json
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .. import storage
from ..distributed.consensus import all_gather_json
from ..errors import CheckpointError
from ..fsdp.model_state import model_state
from ..storage import StoragePath, StorageUnreachable
from . import async_writer, index, metadata, state
from .async_writer import PendingSave, RankWriter, file_name
from .index_schema import FileEntry, Index, TensorEntry, content_hash, describe, shard_key
from .shards import TensorShard, assign_writers, local_tensor_shards
from .state import StateTensor

ShardMemory = dict[str, dict[TensorShard, torch.Tensor]]
"""Shards of this rank with their memory, by tensor name."""


RESERVED = {metadata.KEY, "optimizer", "loss_scaler"}


def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    loader: Any = None,
    scheduler: Any = None,
    *,
    step: int = 0,
    wait: bool = False,
    overlap: bool = False,
    **others: Any,
) -> PendingSave:
    """Write the state needed to resume training after ``step`` into ``folder``.

    Example::

        pending = nl.save("checkpoints/step-100", model, optimizer, step=100)
        ...
        pending.wait()

    Returns once the state is copied to host memory. Files are written while training continues;
    call ``.wait()`` on the result to block until the checkpoint is complete. The next save, `load`,
    and leaving the job wait for it as well. The folder becomes a checkpoint when its index is
    written. A save that fails on any rank leaves no checkpoint, and raises CheckpointError on all
    ranks from the first call that waits for it.

    A collective call, between steps.

    Args:
        folder: A folder shared by all nodes, a local folder per node that is collected later, or
            an address as in ``s3://bucket/prefix``.
        model: The model, of any layout.
        optimizer: The optimizer of the model's parameters.
        loader: Data loader with a ``state_dict()``.
        scheduler: Learning-rate scheduler with a ``state_dict()``.
        step: Step number stored in the index.
        wait: Return only when the checkpoint is complete.
        overlap: Continue the copy during the next forward and backward pass; ``optimizer.step()``
            waits for it. Only valid if nothing else changes parameters or optimizer state.
        others: Objects with a JSON-serializable ``state_dict()``, equal on all ranks, each saved
            under its name.
    """
    others |= {"loader": loader, "scheduler": scheduler}
    started = start_save(storage.as_path(folder), step, model, optimizer, others, overlap=overlap)
    if wait:
        started.wait()
    return started


def start_save(
    folder: StoragePath,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    others: dict,
    on_complete: Callable[[], None] = lambda: None,
    overlap: bool = False,
) -> PendingSave:
    """Start `save`; call ``on_complete`` on the first rank of every node once it is complete."""
    async_writer.finish()
    if taken := others.keys() & RESERVED:
        raise CheckpointError(
            f"{min(taken)} = ... is a name that checkpoints use themselves ("
            f"{', '.join(sorted(RESERVED))}): pass this object under another name"
        )
    values = collect_values(model, others)
    plan = make_save_plan(model, optimizer)
    return plan.start(folder, step, values, on_complete, changed_by=optimizer if overlap else None)


def delete_checkpoint(folder: StoragePath) -> None:
    """Delete a checkpoint, its index first: a partly deleted folder never looks complete."""
    (folder / index.NAME).remove()
    folder.rmtree()


def local_memory(tensors: dict[str, StateTensor]) -> ShardMemory:
    """Return the shards of ``tensors`` on this rank, and their memory."""
    return {name: local_tensor_shards(each.tensor, each.splits) for name, each in tensors.items()}


def describe_shards(tensors: dict[str, StateTensor], memory: ShardMemory) -> dict:
    """Return a JSON-serializable description of `local_memory`: dtypes, shapes, and shards."""
    return {
        name: {
            "dtype": str(each.tensor.dtype).removeprefix("torch."),
            "shape": each.shape,
            "blocks": [(p.offset, p.shape, values.nbytes) for p, values in memory[name].items()],
        }
        for name, each in tensors.items()
    }


def iterate_shards(described: dict) -> Iterator[tuple[str, TensorShard, int]]:
    """Yield name, shard, and bytes of each shard in the result of `describe_shards`."""
    for name, entry in described.items():
        for offset, shape, size in entry["blocks"]:
            yield name, TensorShard(tuple(offset), tuple(shape)), size


@dataclass(frozen=True)
class SavePlan:
    """Shards that each rank writes. Using a plan needs no collective."""

    writer: RankWriter
    name: str
    """Unique name of the plan, equal on all ranks."""
    described: Sequence[dict]
    """Result of `describe_shards` of each rank."""
    assigned: Sequence[dict[str, list[TensorShard]]]
    """Shards that each rank writes, by tensor name."""
    memory: dict[str, torch.Tensor]
    """Memory of the shards that this rank writes, by key in its file."""
    deferrable: frozenset[str]
    """Keys of the shards that a forward and backward pass does not change."""
    values: dict
    """State of model and optimizer other than tensors."""

    def start(
        self,
        folder: StoragePath,
        step: int,
        values: dict,
        on_complete: Callable[[], None],
        replaced: Mapping[str, torch.Tensor] | None = None,
        changed_by: torch.optim.Optimizer | None = None,
    ) -> PendingSave:
        """Start writing the current state on every rank.

        Args:
            folder: Folder of the checkpoint.
            step: Step number stored in the index.
            values: Values to store in addition to those of the plan.
            on_complete: Called on the first rank of every node once the checkpoint is complete.
            replaced: Tensors to write instead of entries of ``memory``, by key.
            changed_by: Optimizer whose step waits for deferred copies. Without it, all copies are
                complete when this returns.
        """
        world = len(self.described)
        memory = {key: (replaced or {}).get(key, tensor) for key, tensor in self.memory.items()}

        def make_content() -> str:
            described = describe(step, world, self.tensors, self.values | values)
            return content_hash(described)

        def make_index(files: list[FileEntry | None]) -> Index:
            present = {file_name(rank, world): file for rank, file in enumerate(files) if file}
            return Index(step, world, self.tensors, present, self.values | values)

        return async_writer.start(
            self.writer,
            folder,
            f"{self.name}/{step}",
            memory,
            make_content,
            make_index,
            on_complete,
            changed_by,
            self.deferrable if changed_by is not None else frozenset(),
        )

    @functools.cached_property
    def tensors(self) -> dict[str, TensorEntry]:
        """Tensors of the index, equal on every rank."""
        found: dict[str, TensorEntry] = {}
        for rank, written in enumerate(self.assigned):
            for name, shards in written.items():
                entry = self.described[rank][name]
                tensor = TensorEntry(entry["dtype"], tuple(entry["shape"]), {})
                file = file_name(rank, len(self.described))
                found.setdefault(name, tensor).pieces[file] = shards
        return found


def make_save_plan(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> SavePlan:
    """Plan saves of the state in its current memory. A collective call."""
    now = state.job_runtime(model)
    tensors = dict(state.prefixed_model_tensors(model))
    values: dict = {metadata.KEY: metadata.describe_run(model)}
    settings = None
    if optimizer is not None:
        tensors |= state.optimizer_tensors(optimizer, model)
        settings = values["optimizer"] = state.optimizer_settings(optimizer, model)
    tensors |= state.random_state(now.rank, now.device)
    local = local_memory(tensors)
    staged = now.mesh.pipeline > 1
    own = [uuid.uuid4().hex, describe_shards(tensors, local), settings if staged else None]
    names, described, stage_settings = zip(*all_gather_json(own), strict=True)
    if settings is not None and staged:
        values["optimizer"] = state.merge_optimizer_settings(list(stage_settings))
    assigned = [
        _group_by_name(shards)
        for shards in assign_writers([list(iterate_shards(each)) for each in described])
    ]
    parameters = {f"{state.MODEL}/{name}" for name in state.parameter_names(model).values()}
    memory, deferrable = {}, set()
    for name, shards in assigned[now.rank].items():
        for number, shard in enumerate(shards):
            key = shard_key(name, number)
            memory[key] = local[name][shard]
            if name in parameters or name.startswith(f"{state.OPTIMIZER}/"):
                deferrable.add(key)
    writer = async_writer.of_this_rank()
    return SavePlan(writer, names[0], described, assigned, memory, frozenset(deferrable), values)


def collect_values(model: nn.Module, others: Mapping) -> dict:
    """Return the ``state_dict()`` of ``others`` and of the loss scaler. Raises CheckpointError."""
    parts = {**others, "loss_scaler": model_state(model).loss_scaler}
    return {
        name: _to_json(name, part.state_dict()) for name, part in parts.items() if part is not None
    }


def _to_json(name: str, values: dict) -> dict:
    """Return a copy of ``values`` as JSON represents it. Raises CheckpointError."""
    try:
        return json.loads(json.dumps(values))
    except TypeError as error:
        raise CheckpointError(
            f"{name}.state_dict() is not JSON-serializable: {error}; return numbers, strings, "
            "lists and dicts only"
        ) from None


def _group_by_name(assigned: set[tuple[str, TensorShard]]) -> dict[str, list[TensorShard]]:
    found: dict[str, list[TensorShard]] = {}
    for name, shard in sorted(assigned):
        found.setdefault(name, []).append(shard)
    return found


LATEST = "latest"
_NAME = re.compile(r"step-(\d+)")


def step_folder(folder, step: int):
    """Return the folder of the checkpoint after ``step``: a path of the type of ``folder``."""
    return folder / f"step-{step:08d}"


def steps(folder) -> list[int]:
    """Return the steps with a complete checkpoint in ``folder``, judged by file names and sizes."""
    folders = _step_folders(storage.as_path(folder))
    return sorted(step for step, place in folders.items() if _is_complete(place))


def _step_folders(folder: StoragePath) -> dict[int, StoragePath]:
    """Return the folder of every step, complete or not."""
    named = {place: _NAME.fullmatch(place.name) for place in folder.subfolders()}
    return {int(match[1]): place for place, match in named.items() if match}


def _is_complete(place: StoragePath) -> bool:
    try:
        return not index.find_missing_file(place, index.read(place, signed=False))
    except StorageUnreachable:  # unknown: resuming from an older checkpoint would lose steps
        raise
    except CheckpointError:
        return False


def indexed_steps(folder: StoragePath) -> list[int]:
    """Return the steps whose folder has an index, intact or not."""
    folders = _step_folders(folder)
    return sorted(step for step, place in folders.items() if index.NAME in place.file_sizes())


def save_and_prune(
    folder, newest: int, step: int, model: nn.Module, optimizer=None, *, overlap=False, **others
) -> PendingSave:
    """Save the state after ``step`` in ``folder``, and keep the ``newest`` checkpoints there."""
    folder = storage.as_path(folder)

    def on_complete() -> None:
        write_latest(folder, step)
        for path in _superseded(folder, newest, step):
            delete_checkpoint(path)

    return start_save(
        step_folder(folder, step), step, model, optimizer, others, on_complete, overlap
    )


def write_latest(folder: StoragePath, step: int) -> None:
    """Write the name of the newest checkpoint to the file ``latest``, for people and scripts."""
    (folder / LATEST).put(f"{step_folder(folder, step).name}\n".encode())


def _superseded(folder: StoragePath, newest: int, step: int) -> list[StoragePath]:
    """Return checkpoints older than the ``newest`` ones, and unfinished ones before ``step``."""
    present = {known: place for known, place in _step_folders(folder).items() if known <= step}
    spared = sorted(known for known, place in present.items() if _is_complete(place))[-newest:]
    return [place for known, place in present.items() if known < step and known not in spared]
