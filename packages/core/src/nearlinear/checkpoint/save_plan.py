"""Plan of a save: the assignment of shards to ranks, agreed on by all ranks.

A plan is valid as long as the state's tensors keep their memory, from the first step of the
optimizer on; their values may change.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..distributed.consensus import all_gather_json
from ..errors import CheckpointError
from ..fsdp.model_state import model_state
from ..storage import StoragePath
from . import async_writer, index, metadata, state
from .async_writer import PendingSave, RankWriter, file_name
from .index import Index
from .state import StateTensor
from .tensor_shards import TensorShard, assign_writers, local_tensor_shards

ShardMemory = dict[str, dict[TensorShard, torch.Tensor]]
"""Shards of this rank with their memory, by tensor name."""


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
        memory = {key: (replaced or {}).get(key, tensor) for key, tensor in self.memory.items()}

        def make_index(files: list[index.FileEntry | None]) -> Index:
            return self._index(step, files, self.values | values)

        return async_writer.start(
            self.writer,
            folder,
            f"{self.name}/{step}",
            memory,
            make_index,
            on_complete,
            changed_by,
            self.deferrable if changed_by is not None else frozenset(),
        )

    def _index(self, step: int, files: list[index.FileEntry | None], values: dict) -> Index:
        """Return the index, equal on every rank."""
        world = len(self.described)
        tensors: dict[str, index.TensorEntry] = {}
        for rank, written in enumerate(self.assigned):
            for name, shards in written.items():
                entry = self.described[rank][name]
                tensor = index.TensorEntry(entry["dtype"], tuple(entry["shape"]), {})
                tensors.setdefault(name, tensor).pieces[file_name(rank, world)] = shards
        present = {file_name(rank, world): file for rank, file in enumerate(files) if file}
        return Index(step, world, tensors, present, values)


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
            key = index.shard_key(name, number)
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
