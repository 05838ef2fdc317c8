"""Whole tensors of models and optimizers in any layout, and their way back to shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...checkpoint.hf import export
from ...checkpoint.shards import TensorShard, local_tensor_shards
from ...checkpoint.state import StateTensor, model_tensors
from ...distributed.consensus import all_gather_json
from ...errors import CheckpointError, join_faults
from ...fsdp.model_state import local_tensor, model_state, runtime_of
from ...pipeline_parallel.runtime import pipeline_runtime


def gather_tensors(
    tensors: dict[str, StateTensor], model: nn.Module, to_all: bool
) -> dict[str, torch.Tensor]:
    """Return the whole ``tensors`` of all ranks in host memory. A collective call.

    Args:
        tensors: This rank's parts, by name.
        model: The model that the tensors belong to.
        to_all: False: only rank 0 returns them.
    """
    now = runtime_of(model)
    receivers = range(now.mesh.world) if to_all else [0]
    gathered = export.gather_tensors(tensors, None, receivers, now)
    return {name: values.cpu() for name, values in gathered}


def gather_state(model: nn.Module, to_all: bool) -> dict[str, torch.Tensor]:
    """Return the state dict of the whole ``model``, with all names of tied parameters."""
    whole = gather_tensors(model_tensors(model), model, to_all)
    tied: list[tuple[str, str]] = []
    names: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied.append((names.setdefault(parameter, name), name))
    if model_state(model).pipeline is not None:  # no stage has both
        tied += [(tie.name, tie.copy_name) for tie in pipeline_runtime(model).tied]
    for name, other in tied:
        if name in whole:
            whole.setdefault(other, whole[name])
    return whole


@torch.no_grad()
def load_state(model: nn.Module, state: Mapping[str, torch.Tensor], strict: bool) -> None:
    """Copy whole tensors, or this rank's shards, into the sharded ``model``.

    Raises:
        CheckpointError: A name or shape is not the model's.
    """
    copy_tensors(model_tensors(model), state, strict, _known_names(model))


def _known_names(model: nn.Module) -> set[str]:
    """Return all names in state dicts of the whole model."""
    own = [*model.state_dict(), *(n for n, _ in model.named_parameters(remove_duplicate=False))]
    return {name for names in all_gather_json(sorted(set(own))) for name in names}


@torch.no_grad()
def copy_tensors(
    tensors: Mapping[str, StateTensor],
    values: Mapping[str, Any],
    strict: bool,
    known: set[str],
) -> None:
    """Copy whole ``values`` or shards of this rank into ``tensors``. Raises CheckpointError."""
    faults = [f"has no {name}" for name in tensors.keys() - values.keys()]
    faults += [f"has {name}, which this model does not have" for name in values.keys() - known]
    faults = faults if strict else []
    for name in tensors.keys() & values.keys():
        each, given = tensors[name], values[name]
        local = local_tensor(each.tensor)
        if tuple(given.shape) != each.shape and given.shape != local.shape:
            faults.append(f"has {name} of shape {list(given.shape)} instead of {list(each.shape)}")
    if faults:
        raise CheckpointError(f"the state is of another model: it {join_faults(faults)}")
    for name in tensors.keys() & values.keys():
        each, given = tensors[name], values[name]
        if tuple(given.shape) == each.shape:
            for shard, memory in local_tensor_shards(each.tensor, each.splits).items():
                memory.copy_(given[shard.slices_in(TensorShard.full(each.shape))])
        else:
            local_tensor(each.tensor).copy_(given)
