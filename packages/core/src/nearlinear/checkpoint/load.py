"""Load a checkpoint into a model and an optimizer of any layout; each rank reads its shards."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Set
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn

from .. import storage
from ..distributed.consensus import all_gather_json, raise_on_all_ranks
from ..errors import CheckpointDamaged, CheckpointError, NearlinearError, join_faults
from ..fsdp.model_state import model_state
from ..storage import StoragePath
from ..storage.threads import map_concurrent
from . import async_writer, index, reader, state
from .index_schema import Index, shard_key
from .shards import TensorShard, local_tensor_shards
from .state import StateTensor

log = logging.getLogger(__name__)

CONCURRENT_FILES = 2
"""Files read at the same time, each hashed while its tensors are copied."""
HASHED_SHARE = 0.1
"""A rank that reads a larger share of a file also hashes the file."""


def load(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    loader: Any = None,
    scheduler: Any = None,
    **others: Any,
) -> int:
    """Load the state in ``folder`` in place; return the step after which it was saved.

    Example::

        step = nl.load("checkpoints/step-100", model, optimizer)

    The layout may differ from the one that saved. Random generators are restored if the number of
    ranks is the same. Raises CheckpointError on all ranks if one rank cannot load, before any value
    is changed wherever the index shows the error, and its subclass CheckpointDamaged if files are
    missing or changed.

    A collective call.

    Args:
        folder: A checkpoint, as passed to `save`.
        model: The sharded model.
        optimizer: The optimizer, if its state is to be loaded.
        loader: Data loader with a ``load_state_dict()``.
        scheduler: Learning-rate scheduler with a ``load_state_dict()``.
        others: Objects passed to `save` under the same names, with a ``load_state_dict()``.
    """
    async_writer.finish()
    remote, loaded = _remote_names(model), [0, ""]
    with raise_on_all_ranks():
        others |= {"loader": loader, "scheduler": scheduler}
        found = _load(storage.as_path(folder), model, optimizer, others, remote)
        loaded = [found.step, found.content]
    of_ranks = all_gather_json(loaded)
    for rank, other in enumerate(of_ranks):
        if other != of_ranks[0]:
            raise CheckpointDamaged(
                f"ranks 0 and {rank} have read different checkpoints in {folder}: give a folder "
                "that all nodes share, or copy one checkpoint to all nodes"
            )
    return loaded[0]


def read_optimizer_state(folder: StoragePath, model: nn.Module) -> dict[str, Any]:
    """Return the state of the optimizer in a checkpoint, for a script without that optimizer yet.

    A collective call. Raises CheckpointError on all ranks.

    Returns:
        ``{"state": {parameter name: {key: tensor}}, "param_groups": [...]}`` with tensors divided
        as the parameters of ``model``, which is sharded, are.
    """
    async_writer.finish()
    found: dict[str, Any] = {}
    with raise_on_all_ranks():
        saved = index.read(folder)
        parameters = {name: p for p, name in state.updated_names(model).items()}
        placeholder = torch.optim.SGD(parameters.values())
        state.allocate_optimizer_state(placeholder, model, saved.tensors)
        tensors = dict(state.optimizer_tensors(placeholder, model))
        _read_tensors(folder, saved, tensors)
        found["state"] = {
            name: dict(placeholder.state[parameter])
            for name, parameter in parameters.items()
            if parameter in placeholder.state
        }
        found["param_groups"] = _stored_value(folder, saved, "optimizer")["groups"]
    return found


def _remote_names(model: nn.Module) -> set[str]:
    """Return the names of parameters and buffers that only other pipeline stages hold."""
    if state.job_runtime(model).mesh.pipeline == 1:
        return set()
    local = list(state.model_tensors(model))
    return {name for names in all_gather_json(local) for name in names} - set(local)


def _load(
    folder: StoragePath,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    others: Mapping,
    remote: Set[str],
) -> Index:
    now, found = state.job_runtime(model), index.read(folder)
    if fault := index.find_missing_file(folder, found):
        raise CheckpointDamaged(
            f"checkpoint {folder} is incomplete: {fault}; resume from the previous checkpoint"
        )
    wanted = dict(state.prefixed_model_tensors(model))
    _check_tensors(folder, wanted, found, state.MODEL, remote)
    if optimizer is not None:
        saved = _stored_value(folder, found, "optimizer")
        state.restore_optimizer_settings(optimizer, model, saved, remote)
        state.allocate_optimizer_state(optimizer, model, found.tensors)
        optimizer_state = dict(state.optimizer_tensors(optimizer, model))
        _check_tensors(folder, optimizer_state, found, state.OPTIMIZER, remote)
        wanted |= optimizer_state
    for name, part in others.items():
        if part is not None:
            _restore(folder, name, part, _stored_value(folder, found, name))
    scaler = model_state(model).loss_scaler
    if scaler is not None and "loss_scaler" in found.values:  # absent: saved in another precision
        _restore(folder, "loss_scaler", scaler, found.values["loss_scaler"])
    random = state.random_state(now.rank, now.device)
    same_ranks = found.world == now.mesh.world and random.keys() <= found.tensors.keys()
    if same_ranks:
        for name, each in random.items():
            saved = found.tensors[name]
            if (saved.dtype, saved.shape) != ("uint8", each.shape):
                raise CheckpointError(
                    f"{folder} has {name} as {saved.dtype} of shape {list(saved.shape)}, which "
                    "this version of torch cannot restore: load it with the version that saved it"
                )
        wanted |= random
    _read_tensors(folder, found, wanted)
    if same_ranks:
        state.restore_random_state(random, now.device)
    if now.rank == 0 and (missing := index.missing_protections(found)):
        log.warning("checkpoint %s is not fully protected: %s", folder, missing)
    return found


def _restore(folder: StoragePath, name: str, part: Any, saved: Any) -> None:
    """Call ``load_state_dict`` of an object. Raises CheckpointError."""
    try:
        part.load_state_dict(saved)
    except NearlinearError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{folder} has a state of {name} that cannot be restored ({error!r}): use an object "
            f"of the kind that was saved, or load the checkpoint without {name}"
        ) from error


def _stored_value(folder: StoragePath, found: Index, name: str):
    if name not in found.values:
        raise CheckpointError(
            f"{folder} was saved without {name}: load it without {name}, or use a checkpoint that "
            "has it"
        )
    return found.values[name]


def _check_tensors(
    folder: StoragePath,
    wanted: Mapping[str, StateTensor],
    found: Index,
    group: str,
    remote: Set[str],
) -> None:
    """Raise CheckpointError unless names and shapes of ``group`` match the checkpoint's."""
    saved = {
        name: entry
        for name, entry in found.tensors.items()
        if name.startswith(f"{group}/") and _parameter_name(name) not in remote
    }
    faults = [f"has no {name}" for name in wanted.keys() - saved.keys()]
    faults += [f"has {name}, which this run does not have" for name in saved.keys() - wanted.keys()]
    for name in wanted.keys() & saved.keys():
        here, there = wanted[name].shape, saved[name].shape
        if here != there:
            faults.append(f"has {name} of shape {list(there)} instead of {list(here)}")
    if faults:
        raise CheckpointError(
            f"{folder} is of another model or optimizer: it {join_faults(faults)}; "
            "use the config that saved it, or another folder"
        )


def _parameter_name(name: str) -> str:
    """Return ``P`` for ``model/P`` and for ``optimizer/P/exp_avg``."""
    group, _, rest = name.partition("/")
    return rest.rpartition("/")[0] if group == state.OPTIMIZER else rest


Copy = tuple[TensorShard, TensorShard, TensorShard, torch.Tensor]
"""Saved shard, local shard, their intersection, and the memory of the local shard."""


def _read_tensors(folder: StoragePath, found: Index, wanted: Mapping[str, StateTensor]) -> None:
    """Copy the shards that this rank holds into ``wanted``.

    Many ranks read a small part of a file. Only ranks that read a large part hash the file, and
    one rank per file does in any case; `raise_on_all_ranks` shares the result.
    """
    needed: dict[str, dict[str, list[Copy]]] = {}
    for name, each in wanted.items():
        local = local_tensor_shards(each.tensor, each.splits)
        for file, saved_shards in found.tensors[name].pieces.items():
            for number, saved in enumerate(saved_shards):
                for shard, values in local.items():
                    common = saved.intersect(shard)
                    if common is not None:
                        copies = needed.setdefault(file, {})
                        key = shard_key(name, number)
                        copies.setdefault(key, []).append((saved, shard, common, values))

    hashed = {
        file
        for file, copies in needed.items()
        if _bytes_read(copies) > HASHED_SHARE * found.files[file].bytes
    }
    hashed.update(
        sorted(found.files)[dist.get_rank() :: dist.get_world_size()]
    )  # on behalf of all ranks

    def read(file: str) -> None:
        copies = needed.get(file, {})
        if file in hashed:
            _read_and_hash(folder / file, found, copies)
        else:
            _read_shards(folder / file, found, copies)

    for _ in map_concurrent(read, sorted(needed.keys() | hashed), CONCURRENT_FILES):
        pass


def _read_shards(path: StoragePath, found: Index, needed: Mapping[str, list[Copy]]) -> None:
    """Copy from some shards of a file, by their keys. Raises CheckpointError."""
    try:
        with reader.open_tensors(path) as values, torch.no_grad():
            for fault in index.header_faults(path.name, values, found, needed):
                raise SafetensorError(fault)
            for key, copies in needed.items():
                for copy in copies:
                    _copy(values, key, copy)
    except (OSError, SafetensorError) as error:
        index.check_content(path, found.files[path.name])  # raises the specific error on a change
        raise CheckpointDamaged(
            f"{path} cannot be read ({error}): resume from the previous checkpoint"
        ) from None


def _read_and_hash(path: StoragePath, found: Index, needed: Mapping[str, list[Copy]]) -> None:
    """Copy from some shards of a file, and check its header and the hash of the whole file."""
    fault = None
    try:
        hashing = reader.HashingReader(path)
    except OSError as error:
        raise index.unreadable(path, error) from None
    try:
        with hashing.tensors() as values, torch.no_grad():
            for difference in index.header_faults(path.name, values, found):
                raise SafetensorError(difference)
            for key in (key for key in values.keys() if key in needed):  # noqa: SIM118 - no dict
                if not _read_directly(values, key, needed[key]):
                    for copy in needed[key]:
                        _copy(values, key, copy)
    except SafetensorError as error:
        fault = error
    except OSError as error:
        raise index.unreadable(path, error) from None
    index.check_content(path, found.files[path.name], hashing.finish)  # the specific error first
    if fault is not None:
        raise CheckpointDamaged(
            f"{path} cannot be read ({fault}): resume from the previous checkpoint"
        )


def _bytes_read(copies: Mapping[str, list[Copy]]) -> int:
    return sum(
        values[common.slices_in(shard)].nbytes
        for of_key in copies.values()
        for _, shard, common, values in of_key
    )


def _read_directly(values: reader.SequentialTensors, key: str, copies: list[Copy]) -> bool:
    """Read a saved shard straight to its only destination. Return False if there are several."""
    (saved, shard, common, target), *others = copies
    if others or common != saved:
        return False
    return values.read_into(key, target[saved.slices_in(shard)])


def _copy(values, key: str, copy: Copy) -> None:
    """Copy the intersection of a saved and a local shard; ``values``: an opened file."""
    saved, shard, common, target = copy
    if common == saved:
        block = values.get_tensor(key)
    else:
        block = values.get_slice(key)[common.slices_in(saved)]
    target[common.slices_in(shard)].copy_(block)
