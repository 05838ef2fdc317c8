"""Dynamic loss scaling for float16, whose small gradients would otherwise become zero.

Source: Micikevicius et al., ICLR 2018, section 3.2. The update rule and its names are those of SMP,
DeepSpeed and Megatron-LM (``DynamicLossScaler``). A sharded model has one `LossScaler`. Inside
`accumulate` gradients flow back multiplied by the scale, which is removed when the step is done. If
one gradient is not finite on any rank, all ranks drop theirs, and the optimizer changes neither
parameters nor its state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .. import _torch
from ..config.parallel import ParallelConfig
from ..errors import ConfigError, NearlinearError
from .model_state import local_tensor, model_state, optimizer_parameter

_MAX_OVERFLOWS_AT_MINIMUM = 2  # in a row; a single one may be a bad batch


class LossScaler:
    """The loss scale of a model, equal on every rank.

    After ``delayed_shift`` overflows the scale is divided by ``scale_factor``. After
    ``scale_window`` steps without an overflow it is multiplied by it.
    """

    def __init__(self, config: ParallelConfig):
        self.config: ParallelConfig = config
        self.loss_scale: float = config.init_scale
        """Current scale."""
        self.overflow: bool = False
        """True if the last step was dropped. A learning rate scheduler should not step either."""
        self.skipped: int = 0
        """Number of dropped steps."""
        self._shifts_left = config.delayed_shift
        self._good_steps = 0
        self._at_minimum = 0  # overflows in a row

    def update(self, overflow: bool) -> None:
        """Adapt the scale after a step. Raises NearlinearError if it cannot shrink further."""
        config, self.overflow = self.config, overflow
        if overflow:
            self.skipped += 1
            self._good_steps = 0
            self._shrink()
            return
        self._good_steps += 1
        self._at_minimum = 0
        grows = self._good_steps % config.scale_window == 0
        if grows:
            self.loss_scale *= config.scale_factor
        if grows or config.consecutive_hysteresis:
            self._shifts_left = config.delayed_shift

    def _shrink(self) -> None:
        config = self.config
        if self.loss_scale <= config.min_scale:
            self._at_minimum += 1
            if self._at_minimum >= _MAX_OVERFLOWS_AT_MINIMUM:
                raise NearlinearError(
                    f"float16 gradients overflow at loss_scale = {self.loss_scale:g}, which is "
                    "min_scale: the model itself exceeds the range of float16; use bf16 = true, or "
                    "lower the learning rate or min_scale"
                )
        elif self._shifts_left > 1:
            self._shifts_left -= 1
        else:
            self.loss_scale = max(self.loss_scale / config.scale_factor, config.min_scale)

    def state_dict(self) -> dict[str, float]:
        """Return the state in values that JSON can hold."""
        return {
            "loss_scale": self.loss_scale,
            "skipped": self.skipped,
            "shifts_left": self._shifts_left,
            "good_steps": self._good_steps,
            "at_minimum": self._at_minimum,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of `state_dict`."""
        self.loss_scale, self.skipped = state["loss_scale"], state["skipped"]
        self._shifts_left, self._good_steps = state["shifts_left"], state["good_steps"]
        self._at_minimum = state["at_minimum"]

    @torch.no_grad()
    def unscale(self, model: nn.Module) -> bool:
        """Unscale the gradients of a step, or drop them on overflow. Collective over all ranks.

        A norm that exceeds float32 counts as an overflow, too. `update` follows if the step counts.

        Returns:
            True if they overflow.
        """
        gradients = _gradients(model)
        if gradients:
            torch._foreach_mul_(gradients, 1 / self.loss_scale)
        norm = torch.nn.utils.get_total_norm(gradients)
        runtime = model_state(model).runtime
        assert runtime is not None
        overflows = (~norm.isfinite()).to(runtime.device, torch.float32)
        runtime.all_reduce(overflows)
        overflow = overflows.item() > 0
        if overflow:
            model.zero_grad(set_to_none=True)
        return overflow


def loss_scaler(model: nn.Module) -> LossScaler:
    """Return the `LossScaler` of a model sharded in float16. Raises ConfigError for any other.

    Example::

        print(nl.loss_scaler(model).loss_scale)
    """
    scaler = model_state(model).loss_scaler
    if scaler is None:
        raise ConfigError(
            'the model has no loss scale: shard it with fp16 = true, or nl.shard(precision="fp16")'
        )
    return scaler


def install_loss_scaler(model: nn.Module, config: ParallelConfig) -> None:
    """Give the sharded ``model`` a loss scaler with the settings of ``config``."""
    model_state(model).loss_scaler = LossScaler(config)
    model.register_forward_hook(_require_step_in_backward)


def require_step(model: nn.Module) -> None:
    """Raise NearlinearError if gradients of a float16 model would flow back unscaled."""
    state = model_state(model)
    if state.loss_scaler is not None and state.accumulation is None:
        raise NearlinearError(
            "float16 gradients are scaled inside nl.accumulate only: write `for batch in "
            "nl.accumulate(model, [batch]):` around forward and backward"
        )


def widen_output(output: Any) -> Any:
    """Convert float16 outputs to float32, so that gradients are scaled before they are rounded.

    An output that contains its loss already is returned unchanged.
    """
    if any(tensor.dim() == 0 for tensor in _differentiable(output)):
        return output
    half = torch.float16
    return _torch.map_tensors(lambda t: t.float() if t.dtype == half else t, output)


def _require_step_in_backward(model: nn.Module, args, output) -> None:
    """Forward hook: refuse a backward pass outside of `accumulate`."""
    if torch.is_grad_enabled() and model_state(model).accumulation is None:
        for tensor in _differentiable(output):
            tensor.register_hook(lambda gradient: require_step(model))


def _differentiable(output: Any) -> list[torch.Tensor]:
    return [tensor for tensor in _torch.tensors_in(output) if tensor.requires_grad]


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    updated = map(optimizer_parameter, model.parameters())
    return [local_tensor(p.grad) for p in updated if p.grad is not None]
