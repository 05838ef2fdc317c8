"""SMP v1's optimizer: a PyTorch optimizer over the parameters of the `DistributedModel`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ...checkpoint.index_schema import OPTIMIZER, TensorEntry
from ...checkpoint.state import (
    StateTensor,
    allocate_optimizer_state,
    merge_optimizer_settings,
    optimizer_settings,
    optimizer_tensors,
    restore_optimizer_settings,
)
from ...distributed.consensus import all_gather_json
from ...errors import ConfigError, NearlinearError
from ...fsdp.clip_grad import clip_grad_norm_
from ...fsdp.loss_scaler import LossScaler
from ...fsdp.model_state import local_tensor, model_state
from ...fsdp.optimizer_state import shard_optimizer
from .gather import copy_tensors, gather_tensors
from .session import session

_LOSS_ARGUMENTS = (
    "init_scale",
    "scale_factor",
    "scale_window",
    "min_scale",
    "delayed_shift",
    "consecutive_hysteresis",
)
_NEVER = 2**62


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps the script's optimizer, whose parameters become the sharded ones at the first step.

    ::

        optimizer = smp.DistributedOptimizer(
            torch.optim.AdamW(model.parameters()), dynamic_loss_scale=True
        )

    Under sharded data parallelism `step` clips gradients to ``sdp_gradient_clipping``. With
    ``fp16`` gradients are scaled; a step whose gradients overflow changes nothing, see `overflow`.

    Args:
        optimizer: The optimizer, over parameters of the model.
        static_loss_scale: Constant loss scale in float16.
        dynamic_loss_scale: Adapt the scale instead.
        dynamic_loss_args: ``init_scale`` (2**32), ``scale_factor`` (2), ``scale_window`` (1000),
            ``min_scale`` (1), ``delayed_shift`` (1), ``consecutive_hysteresis`` (False); also as
            arguments of their own.

    Raises:
        ConfigError: An argument does not exist.
    """

    # torch.optim.Optimizer.__init__ is not called: the wrapped optimizer has all state. The base
    # class is for schedulers of the learning rate, which check it.
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        static_loss_scale: float | None = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        **arguments: Any,
    ):
        found = session()
        self.optimizer = optimizer
        given = dict(dynamic_loss_args or {}) | arguments
        if unknown := sorted(given.keys() - set(_LOSS_ARGUMENTS)):
            raise ConfigError(
                f"smp.DistributedOptimizer has no argument {unknown[0]!r}. Those of the dynamic "
                f"loss scale are {', '.join(_LOSS_ARGUMENTS)}."
            )
        if dynamic_loss_scale:
            self._loss_scale = given
        else:
            scale = static_loss_scale or 1.0
            self._loss_scale = {
                "init_scale": scale, "min_scale": scale, "scale_window": _NEVER
            }  # fmt: skip
        self._names: list[list[str]] | None = None
        found.optimizer = self
        if found.partitioned:
            self._attach(found.require_model().module)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Parameter groups of the wrapped optimizer."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """State of the wrapped optimizer."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Defaults of the wrapped optimizer."""
        return self.optimizer.defaults

    @property
    def fp16_groups(self) -> list[list[torch.Tensor]]:
        """Parameters of every group."""
        return [list(group["params"]) for group in self.param_groups]

    @property
    def overflow(self) -> bool:
        """True if the last step had gradients beyond float16, and changed nothing."""
        scaler = self._scaler()
        return scaler is not None and scaler.overflow

    @property
    def loss_scale(self) -> float:
        """Current loss scale; 1 without ``fp16``."""
        scaler = self._scaler()
        return 1.0 if scaler is None else scaler.loss_scale

    def step(self, closure: Callable | None = None) -> Any:
        """Update the parameters."""
        if not session().partitioned:
            raise NearlinearError(
                "optimizer.step() before the first call of a function under @smp.step"
            )
        return self.optimizer.step() if closure is None else self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def clip_master_grads(self, max_norm: float) -> float:
        """Scale the float32 gradients so that their L2 norm is at most ``max_norm``; return it."""
        return clip_grad_norm_(session().require_model().module, max_norm)

    def state_dict(self, gather_to_rank0: bool = False) -> dict[str, Any]:
        """Return the state of the whole model. A collective call.

        ``state`` contains tensors by the names of the parameter and of the state.

        Args:
            gather_to_rank0: Other ranks return an empty state.
        """
        model = self._partitioned_model()
        tensors = _state_tensors(self.optimizer, model)
        whole = gather_tensors(tensors, model, not gather_to_rank0)
        shapes = {name: list(tensor.shape) for name, tensor in whole.items()}
        settings = all_gather_json(optimizer_settings(self.optimizer, model))
        return self._described(whole, shapes, merge_optimizer_settings(settings))

    def local_state_dict(self, gather_if_shard: bool = False) -> dict[str, Any]:
        """Return this rank's shards of the state, for `save`.

        Args:
            gather_if_shard: Return whole tensors instead, as `state_dict` does.
        """
        if gather_if_shard:
            return self.state_dict()
        model = self._partitioned_model()
        tensors = _state_tensors(self.optimizer, model)
        local = {name: local_tensor(each.tensor) for name, each in tensors.items()}
        shapes = {name: list(each.shape) for name, each in tensors.items()}
        return self._described(local, shapes, optimizer_settings(self.optimizer, model))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a result of `state_dict` or `local_state_dict`; before the first step, then.

        Raises:
            CheckpointError: The state is of another model or optimizer.
        """
        state = dict(state_dict)
        session().do_when_partitioned(lambda: self._load(state))

    def _load(self, state: dict[str, Any]) -> None:
        model = self._partitioned_model()
        remote = {name for names in all_gather_json(_names(model)) for name in names}
        settings = {"kind": state["kind"], "groups": state["param_groups"]}
        restore_optimizer_settings(self.optimizer, model, settings, remote - set(_names(model)))
        tensors = {
            f"{name}/{key}": each
            for name, of_parameter in state["state"].items()
            for key, each in of_parameter.items()
        }
        entries = {
            f"{OPTIMIZER}/{name}": TensorEntry(
                str(each.dtype).removeprefix("torch."), tuple(state["shapes"][name]), {}
            )
            for name, each in tensors.items()
        }
        allocate_optimizer_state(self.optimizer, model, entries)
        copy_tensors(_state_tensors(self.optimizer, model), tensors, False, set())
        if (scaler := self._scaler()) is not None and "loss_scaler" in state:
            scaler.load_state_dict(state["loss_scaler"])

    def _described(
        self, tensors: dict[str, torch.Tensor], shapes: dict[str, list[int]], settings: dict
    ) -> dict[str, Any]:
        state: dict[str, Any] = {"state": {}, "shapes": shapes, "kind": settings["kind"]}
        state["param_groups"] = settings["groups"]
        for name, tensor in tensors.items():
            parameter, _, key = name.rpartition("/")
            state["state"].setdefault(parameter, {})[key] = tensor
        if (scaler := self._scaler()) is not None:
            state["loss_scaler"] = scaler.state_dict()
        return state

    def name_parameters(self, names: Mapping[torch.Tensor, str]) -> None:
        """Remember the names of the parameters before the model replaces them."""
        if self.optimizer.state:
            raise ConfigError("the optimizer has stepped before the model was partitioned")
        self._names = []
        for group in self.optimizer.param_groups:
            unknown = sum(parameter not in names for parameter in group["params"])
            if unknown:
                raise ConfigError(
                    f"smp.DistributedOptimizer: {unknown} parameters do not belong to the model "
                    "given to smp.DistributedModel. Build the optimizer from its parameters()."
                )
            self._names.append([names[parameter] for parameter in group["params"]])

    def use_parameters(self, module: nn.Module) -> None:
        """Replace the parameters by those of the sharded ``module`` with the same names."""
        held = dict(module.named_parameters(remove_duplicate=False))
        for group, names in zip(self.optimizer.param_groups, self._names or [], strict=True):
            group["params"] = [held[name] for name in names if name in held]
        self._attach(module)

    def _attach(self, module: nn.Module) -> None:
        session().set_loss_scale(self._loss_scale)
        shard_optimizer(self.optimizer, module)

    def _partitioned_model(self) -> nn.Module:
        found = session()
        found.partition()
        return found.require_model().module

    def _scaler(self) -> LossScaler | None:
        model = session().model
        return None if model is None else model_state(model.module).loss_scaler

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)


def _state_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, StateTensor]:
    """Return the state of ``optimizer`` on this rank by names of parameter and state."""
    found = optimizer_tensors(optimizer, model)
    return {name.removeprefix(f"{OPTIMIZER}/"): each for name, each in found}


def _names(model: nn.Module) -> list[str]:
    return sorted({name for name, _ in model.named_parameters()})
