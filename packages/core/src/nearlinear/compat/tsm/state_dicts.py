"""State dicts of FSDP1's types for a sharded model and its optimizer.

============================  ======================================================================
Type                          Contents
============================  ======================================================================
``SHARDED_STATE_DICT``        DTensors by the names of the module; the objects remember model and
                              optimizer, so that ``tsm``'s checkpoint functions can pass them to
                              `nl.save` and `nl.load`, which know tensor and expert parallelism
``FULL_STATE_DICT``           whole tensors, on rank 0 with ``rank0_only``; with
                              ``translate_on_save`` in the form that ``save_pretrained`` writes
``LOCAL_STATE_DICT``          this rank's tensors
============================  ======================================================================

`load_into_model` and `to_load` accept all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from torch.distributed.tensor import DTensor

from ...checkpoint import state
from ...checkpoint.hf import meta_model
from ...checkpoint.hf.export import gather_tensors
from ...checkpoint.hf.naming import HFTensor, hf_tensors, whole_tensor
from ...checkpoint.shards import local_tensor_shards
from ...errors import CheckpointError
from ...fsdp.model_state import local_tensor, parameter_state, runtime_of

DEFAULT_CONFIGS: dict[StateDictType, tuple[type, type]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
}


def settings_of(
    kind: StateDictType,
    model_config: StateDictConfig | None,
    optimizer_config: OptimStateDictConfig | None,
) -> StateDictSettings:
    """Return the settings of FSDP1's ``state_dict_type`` with their defaults."""
    of_model, of_optimizer = DEFAULT_CONFIGS[kind]
    return StateDictSettings(kind, model_config or of_model(), optimizer_config or of_optimizer())


class _LiveStateDict(dict[str, Any]):
    """State dict that remembers its source; copies and pickles are plain dicts."""

    def __reduce__(self):
        return dict, (dict(self),)


class ModelStateDict(_LiveStateDict):
    """Sharded or local state dict that remembers its model."""

    def __init__(self, values: Mapping[str, Any], model: nn.Module, local: bool):
        super().__init__(values)
        self.model, self.local = model, local


class OptimizerStateDict(_LiveStateDict):
    """Sharded state dict that remembers its model and its optimizer."""

    def __init__(
        self, values: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
    ):
        super().__init__(values)
        self.model, self.optimizer = model, optimizer


def of_model(model: nn.Module, settings: StateDictSettings) -> dict[str, Any]:
    """Return the state dict of ``model``. With FULL_STATE_DICT a collective call of all ranks."""
    kind, config = settings.state_dict_type, settings.state_dict_config
    if kind is StateDictType.FULL_STATE_DICT:
        translate = getattr(config, "translate_on_save", False)
        tensors = state.model_tensors(model)
        wanted = hf_tensors(meta_model.build_like(model)) if translate else _as_named(model)
        return dict(_gathered(model, tensors, wanted, config))
    values = {state.strip_wrappers(name): v for name, v in model.state_dict().items()}
    local = kind is StateDictType.LOCAL_STATE_DICT
    if local:
        values = {name: local_tensor(value) for name, value in values.items()}
    return ModelStateDict(values, model, local)


def _gathered(
    model: nn.Module,
    tensors: dict[str, state.StateTensor],
    wanted: Sequence[HFTensor] | None,
    config: Any,
) -> Iterator[tuple[str, torch.Tensor]]:
    now = runtime_of(model)
    receivers = [0] if getattr(config, "rank0_only", False) else range(now.mesh.world)
    for name, values in gather_tensors(tensors, wanted, receivers, now):
        yield name, values.cpu() if getattr(config, "offload_to_cpu", False) else values


def _as_named(model: nn.Module) -> list[HFTensor]:
    """Return the tensors of the state dict of ``model`` by the names of the module."""
    tensors = state.model_tensors(model)
    first: dict[int, str] = {}
    found = []
    for name, value in model.state_dict(keep_vars=True).items():
        plain = state.strip_wrappers(name)
        source = first.setdefault(id(value), plain)
        source = source if plain not in tensors else plain
        found.append(whole_tensor(plain, source, tensors[source].shape))
    return found


def load_into_model(model: nn.Module, values: Mapping[str, Any], strict: bool = True) -> Any:
    """Copy ``values`` into ``model``; return names as ``nn.Module.load_state_dict`` does.

    Args:
        model: The sharded model.
        values: A state dict of `of_model` of any type, on every rank.
        strict: Raise RuntimeError if names are missing or unexpected.
    """
    tensors = state.model_tensors(model)
    named = _as_named(model)
    if values.keys() - {each.name for each in named} and _is_transformers(model):
        named = hf_tensors(meta_model.build_like(model))
    given = {each.source for each in named if each.name in values}  # tied: one name is enough
    missing = [each.name for each in named if each.source not in given]
    unexpected = sorted(values.keys() - {each.name for each in named})
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"the state dict lacks {missing[:3]} and has {unexpected[:3]}, which are not in "
            f"{type(model).__name__}: load the state dict of this model, or pass strict=False"
        )
    with torch.no_grad():
        for each in named:
            if each.name in values:
                _assign(tensors[each.source], each, values[each.name])
    kind = type(nn.Module().load_state_dict({}))
    return kind(missing, unexpected)


def _is_transformers(model: nn.Module) -> bool:
    return meta_model.config_dict(model) is not None


def _assign(target: state.StateTensor, named: HFTensor, value: torch.Tensor) -> None:
    """Copy ``value``, a whole tensor or this rank's part of it, into the local shards."""
    own = local_tensor(target.tensor)
    if isinstance(value, DTensor) or tuple(value.shape) != named.shape:
        part = local_tensor(value)
        if part.shape != own.shape:
            raise CheckpointError(
                f"{named.name} has a part of shape {list(part.shape)}, and this rank has "
                f"{list(own.shape)}: load it through tsm's state_dict_loader, which changes layouts"
            )
        own.copy_(part)
        return
    for shard, memory in local_tensor_shards(target.tensor, target.splits).items():
        common = named.block.intersect(shard)
        if common is not None:
            slices = named.hf_slices(common)
            memory[common.slices_in(shard)].copy_(named.from_hf(value[slices], common))


def of_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, settings: StateDictSettings
) -> dict[str, Any]:
    """Return the state of ``optimizer`` by parameter names. Collective with FULL_STATE_DICT."""
    groups = state.optimizer_settings(optimizer, model)["groups"]
    tensors = dict(state.optimizer_tensors(optimizer, model))
    if settings.state_dict_type is StateDictType.FULL_STATE_DICT:
        config = settings.optim_state_dict_config
        of_names = _by_parameter(_gathered(model, tensors, None, config))
        if getattr(config, "rank0_only", False) and dist.get_rank() != 0:
            return {}
        return {"state": of_names, "param_groups": groups}
    of_names = _by_parameter((name, each.tensor) for name, each in tensors.items())
    return OptimizerStateDict({"state": of_names, "param_groups": groups}, model, optimizer)


def _by_parameter(tensors: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Group tensors named ``optimizer/PARAMETER/KEY`` by parameter and key."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, value in tensors:
        parameter, _, key = name.partition("/")[2].rpartition("/")
        found.setdefault(parameter, {})[key] = value
    return found


def to_load(
    model: nn.Module, optimizer: torch.optim.Optimizer, values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return ``values`` of `of_optimizer` in the form for ``optimizer.load_state_dict``."""
    names = state.updated_names(model)
    numbers: dict[str, int] = {}
    groups = []
    for group, saved in zip(optimizer.param_groups, values["param_groups"], strict=True):
        own = [names[parameter] for parameter in group["params"]]
        numbers |= {name: len(numbers) + i for i, name in enumerate(own)}
        kept = {key: value for key, value in saved.items() if key != "params"}
        groups.append(kept | {"params": [numbers[name] for name in own]})
    parameters = {name: parameter for parameter, name in names.items()}
    found = {
        numbers[name]: {
            key: _like(parameters[name], name, value) for key, value in of_parameter.items()
        }
        for name, of_parameter in values["state"].items()
    }
    return {"state": found, "param_groups": groups}


def _like(parameter: nn.Parameter, name: str, value: Any) -> Any:
    """Return this rank's part of ``value`` if it has the shape of the whole parameter."""
    splits = parameter_state(parameter).splits
    target = state.StateTensor(parameter.data, splits)
    whole = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    if not whole or value.dim() == 0 or tuple(value.shape) != tuple(target.shape):
        return value
    empty = state.StateTensor(torch.zeros_like(parameter.data, dtype=value.dtype), splits)
    with torch.no_grad():
        _assign(empty, whole_tensor(name, name, target.shape), value)
    return empty.tensor


def refreshed(values: OptimizerStateDict) -> None:
    """Replace the contents of ``values`` by the present state of its optimizer."""
    settings = settings_of(StateDictType.SHARDED_STATE_DICT, None, None)
    values.clear()
    values.update(of_optimizer(values.model, values.optimizer, settings))
