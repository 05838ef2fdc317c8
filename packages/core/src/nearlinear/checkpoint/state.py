"""State of a run: its tensors by name, and JSON-serializable values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import nn

from ..distributed.runtime import Runtime
from ..errors import CheckpointError
from ..fsdp.model_state import (
    DimSplit,
    full_shape,
    optimizer_parameter,
    parameter_state,
    runtime_of,
)
from .index_schema import MODEL, OPTIMIZER, RANDOM, TensorEntry
from .shards import TensorShard, local_tensor_shards

_BASE_LAYER = ".base_layer."  # inserted by peft
_WRAPPER = "_checkpoint_wrapped_module."  # inserted into names by activation checkpointing


def job_runtime(model: nn.Module) -> Runtime:
    """Return the runtime of ``model``. Raises CheckpointError if not all ranks take part in it."""
    runtime = runtime_of(model)
    if runtime.mesh.world != dist.get_world_size():
        raise CheckpointError(
            f"the model is sharded over {runtime.mesh.world} of {dist.get_world_size()} ranks: "
            "nl.save and nl.load need a mesh of all ranks; use torch.distributed.checkpoint with "
            "the mesh's process groups"
        )
    return runtime


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return the name of every parameter; the first name of tied parameters."""
    return {parameter: _plain(name, model) for name, parameter in model.named_parameters()}


def updated_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return the names of the tensors that an optimizer updates: parameters, or their slices."""
    names = parameter_names(model)
    return {optimizer_parameter(parameter): name for parameter, name in names.items()}


def strip_wrappers(name: str) -> str:
    """Return a parameter's name without the parts inserted by wrappers."""
    return name.replace(_WRAPPER, "")


def _plain(name: str, model: nn.Module) -> str:
    """Return a name without the parts inserted by wrappers and by adapters of ``model``."""
    name = strip_wrappers(name)
    return name.replace(_BASE_LAYER, ".") if hasattr(model, "peft_config") else name


@dataclass(frozen=True)
class StateTensor:
    """The part of a tensor that this rank holds."""

    tensor: torch.Tensor
    splits: tuple[DimSplit, ...] = ()
    """Tensor- and expert-parallel divisions applied before the tensor was sharded."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return full_shape(self.tensor, self.splits)


def local_shards(model: nn.Module) -> dict[str, list[TensorShard]]:
    """Return the shards of every parameter on this rank, by the parameter's name.

    Example::

        for name, shards in nl.local_shards(model).items():
            print(name, [shard.shape for shard in shards])
    """
    return {
        name: sorted(local_tensor_shards(parameter.data, parameter_state(parameter).splits))
        for parameter, name in parameter_names(model).items()
    }


def prefixed_model_tensors(model: nn.Module) -> Iterator[tuple[str, StateTensor]]:
    """Yield `model_tensors` with their names in a checkpoint."""
    return ((f"{MODEL}/{name}", each) for name, each in model_tensors(model).items())


def model_tensors(model: nn.Module) -> dict[str, StateTensor]:
    """Return the parameters of ``model``, each once, and its persistent buffers."""
    found = {
        name: StateTensor(parameter.data, parameter_state(parameter).splits)
        for parameter, name in parameter_names(model).items()
    }
    # The state dict contains all names of a tied parameter.
    known = {_plain(name, model) for name, _ in model.named_parameters(remove_duplicate=False)}
    persistent = {_plain(name, model) for name in model.state_dict()} - known
    for name, buffer in model.named_buffers():
        if _plain(name, model) in persistent:
            found[_plain(name, model)] = StateTensor(buffer)
    return found


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, model: nn.Module
) -> Iterator[tuple[str, StateTensor]]:
    """Yield the optimizer state of each parameter of ``model``, with names in a checkpoint.

    Raises CheckpointError for state that cannot be loaded in another layout.
    """
    if type(optimizer).__module__.startswith("torchao."):
        raise CheckpointError(
            f"the state of {type(optimizer).__name__} is quantized in blocks of its shards, and "
            "cannot be loaded in another layout: save the model without it, or train with "
            "torch.optim.AdamW"
        )
    names = updated_names(model)
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):
                raise CheckpointError(
                    f"{type(optimizer).__name__} keeps {key} as a {type(value).__name__}, and only "
                    "tensors can be saved: use an optimizer whose state consists of tensors"
                )
            splits = parameter_state(parameter).splits if value.shape == parameter.shape else ()
            if value.dim() and parameter_state(parameter).splits and not splits:
                raise CheckpointError(
                    f"{type(optimizer).__name__} keeps {key} of {_name(parameter, names)} in "
                    "another shape than the parameter's, which tensor or expert parallelism has "
                    "divided: save with tensor_parallel_degree = 1, or use AdamW"
                )
            yield f"{OPTIMIZER}/{_name(parameter, names)}/{key}", StateTensor(value, splits)


def optimizer_settings(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict:
    """Return the class and the parameter groups of an optimizer, JSON-serializable.

    Parameters are replaced by their names.
    """
    names = updated_names(model)
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        | {"params": [_name(parameter, names) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"kind": type(optimizer).__name__, "groups": groups}


def merge_optimizer_settings(settings: list[dict]) -> dict:
    """Merge the optimizer settings of several pipeline stages into those of the whole model."""
    first, *others = settings
    for other in others:
        for group, more in zip(first["groups"], other["groups"], strict=True):
            known = set(group["params"])
            group["params"] += [name for name in more["params"] if name not in known]
    return first


def allocate_optimizer_state(
    optimizer: torch.optim.Optimizer, model: nn.Module, saved: Mapping[str, TensorEntry]
) -> None:
    """Allocate the state tensors in ``saved``, the tensors of a checkpoint, in ``optimizer``.

    Their values are read later.
    """
    names = {name: parameter for parameter, name in updated_names(model).items()}
    present = {parameter: dict(values) for parameter, values in optimizer.state.items()}
    optimizer.state.clear()
    for full, entry in saved.items():
        group, _, rest = full.partition("/")
        if group != OPTIMIZER:
            continue
        name, _, key = rest.rpartition("/")
        if name not in names:
            continue  # `load` reports mismatches
        parameter, dtype = names[name], getattr(torch, entry.dtype)
        known = present.get(parameter, {}).get(key)
        if _is_reusable(known, parameter, entry.shape, dtype):
            value = known
        elif full_shape(parameter, parameter_state(parameter).splits) == entry.shape:
            value = torch.zeros_like(parameter.data, dtype=dtype)
        else:  # step counter: on the CPU unless the optimizer is fused
            device = parameter.device if _on_device(optimizer) else "cpu"
            value = torch.zeros(entry.shape, dtype=dtype, device=device)
        optimizer.state[parameter][key] = value


def _is_reusable(
    known, parameter: nn.Parameter, shape: tuple[int, ...], dtype: torch.dtype
) -> TypeGuard[torch.Tensor]:
    """Return True if ``known`` is a state tensor of ``parameter`` that fits a saved one."""
    if not isinstance(known, torch.Tensor) or known.dtype != dtype:
        return False
    splits = parameter_state(parameter).splits if known.shape == parameter.shape else ()
    return full_shape(known, splits) == shape


def restore_optimizer_settings(
    optimizer: torch.optim.Optimizer, model: nn.Module, saved: dict, remote: Set[str]
) -> None:
    """Restore learning rates and other settings of `optimizer_settings`. Raises CheckpointError.

    ``fused`` and ``foreach`` select an implementation and keep their current values.

    Args:
        optimizer: The optimizer to change.
        model: The model with its parameters.
        saved: Result of `optimizer_settings` at the time of the save.
        remote: Names of parameters that only other pipeline stages hold.
    """
    here = optimizer_settings(optimizer, model)
    if here["kind"] != saved["kind"]:
        raise CheckpointError(
            f"the checkpoint has the state of optimizer {saved['kind']}, and this run uses "
            f"{here['kind']}: use {saved['kind']}, or load the model without the optimizer"
        )
    mine = [set(group["params"]) for group in here["groups"]]
    theirs = [set(group["params"]) for group in saved["groups"]]
    if len(mine) != len(theirs) or any(
        a - b or b - a - remote for a, b in zip(mine, theirs, strict=True)
    ):
        raise CheckpointError(
            "the parameter groups of the optimizer differ from the saved ones: build the optimizer "
            "with the groups of the saved run"
        )
    for group, was in zip(optimizer.param_groups, saved["groups"], strict=True):
        group.update({key: _restore_type(group.get(key), value) for key, value in was.items()
                      if key not in ("params", "fused", "foreach")})  # fmt: skip


def random_state(rank: int, device: torch.device) -> dict[str, StateTensor]:
    """Return the states of this rank's random generators, by name."""
    found = {f"{RANDOM}/cpu/{rank}": StateTensor(torch.get_rng_state())}
    if device.type == "cuda":
        state = torch.cuda.get_rng_state(device)
        found[f"{RANDOM}/cuda/{rank}"] = StateTensor(state)
    return found


def restore_random_state(values: dict[str, StateTensor], device: torch.device) -> None:
    """Restore the generators of `random_state`."""
    for name, value in values.items():
        if name.split("/")[1] == "cuda":
            torch.cuda.set_rng_state(value.tensor.cpu(), device)
        else:
            torch.set_rng_state(value.tensor.cpu())


def _on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if step counters must be on the device."""
    return any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)


def _restore_type(current, value):
    """Convert ``value`` to a tuple if ``current`` is one: JSON has only lists."""
    return tuple(value) if isinstance(current, tuple) else value


def _name(parameter: Any, names: Mapping[Any, str]) -> str:
    if parameter not in names:
        raise CheckpointError(
            "the optimizer has a parameter that is not in the model: build it from parameters() of "
            "the sharded model"
        )
    return names[parameter]
