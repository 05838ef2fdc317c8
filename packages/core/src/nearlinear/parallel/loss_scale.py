"""Dynamic loss scaling: float16 without gradients that vanish.

Source: Micikevicius et al., ICLR 2018, section 3.2; the rule by which the scale moves, and its
names, are those of SMP, DeepSpeed and Megatron-LM (``DynamicLossScaler``). A sharded model has one
`LossScaler`, which `accumulate` asks: gradients go back times the scale, and when the step is done
come off it again. If one of them is not finite, on any rank, all ranks drop theirs: the optimizer
finds none and changes nothing, neither parameters nor its states.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from .. import _torch, runtime
from ..config import Config
from ..errors import ConfigError, NearlinearError
from . import slices
from .layout import local

LAST_TRIES = 2  # overflows in a row at the least scale that end a run: one may be a bad batch


class LossScaler:
    """The loss scale of a model, and how it moves; the same on every rank.

    After ``delayed_shift`` overflows it is divided by ``scale_factor``, after ``scale_window``
    steps without one multiplied. ``overflow`` says whether the last step was dropped: a scheduler
    should then not step either. ``skipped`` counts such steps.
    """

    def __init__(self, config: Config):
        self.config = config
        self.loss_scale = config.init_scale
        self.overflow = False
        self.skipped = 0
        self._shifts_left = config.delayed_shift
        self._good_steps = 0
        self._at_minimum = 0  # overflows in a row

    def update(self, overflow: bool) -> None:
        """Move on after a step. Raises NearlinearError when the scale can fall no more."""
        config, self.overflow = self.config, overflow
        if overflow:
            self.skipped += 1
            self._good_steps = 0
            self._give_way()
            return
        self._good_steps += 1
        self._at_minimum = 0
        grows = self._good_steps % config.scale_window == 0
        if grows:
            self.loss_scale *= config.scale_factor
        if grows or config.consecutive_hysteresis:
            self._shifts_left = config.delayed_shift

    def _give_way(self) -> None:
        config = self.config
        if self.loss_scale <= config.min_scale:
            self._at_minimum += 1
            if self._at_minimum >= LAST_TRIES:
                raise NearlinearError(
                    f"float16 gradients overflow at loss_scale = {self.loss_scale:g}, which is "
                    "min_scale: the model itself leaves float16's range; use bf16 = true, or lower "
                    "the learning rate or min_scale"
                )
        elif self._shifts_left > 1:
            self._shifts_left -= 1
        else:
            self.loss_scale = max(self.loss_scale / config.scale_factor, config.min_scale)

    def state_dict(self) -> dict:
        """Where it stands, as JSON can carry it."""
        return {
            "loss_scale": self.loss_scale,
            "skipped": self.skipped,
            "shifts_left": self._shifts_left,
            "good_steps": self._good_steps,
            "at_minimum": self._at_minimum,
        }

    def load_state_dict(self, state: dict) -> None:
        """Go on where ``state`` stood."""
        self.loss_scale, self.skipped = state["loss_scale"], state["skipped"]
        self._shifts_left, self._good_steps = state["shifts_left"], state["good_steps"]
        self._at_minimum = state["at_minimum"]

    @torch.no_grad()
    def begin(self, model: nn.Module) -> None:
        """Before a step: what gradients there are already go by its scale, as those to come."""
        _multiply(_gradients(model), self.loss_scale)

    @torch.no_grad()
    def finish(self, model: nn.Module) -> None:
        """After a step: take the scale off, or drop the gradients. A collective call of all ranks.

        A norm beyond float32 counts as an overflow, too.
        """
        gradients = _gradients(model)
        _multiply(gradients, 1 / self.loss_scale)
        norm = torch.nn.utils.get_total_norm(gradients)
        overflows = (~norm.isfinite()).to(runtime.current().device, torch.float32)
        dist.all_reduce(overflows)
        overflow = overflows.item() > 0
        if overflow:
            model.zero_grad(set_to_none=True)
        self.update(overflow)


def loss_scaler(model: nn.Module) -> LossScaler:
    """The `LossScaler` of a model sharded in float16. Raises ConfigError for any other."""
    scaler = of(model)
    if scaler is None:
        raise ConfigError(
            'the model has no loss scale: shard it with fp16 = true, or nl.shard(precision="fp16")'
        )
    return scaler


def of(model: nn.Module) -> LossScaler | None:
    """None: the model does not compute in float16."""
    return getattr(model, "_nearlinear_loss_scaler", None)


def install(model: nn.Module, config: Config) -> None:
    """Give ``model``, which is sharded, a loss scale that begins as ``config`` says."""
    model._nearlinear_loss_scaler = LossScaler(config)
    model.register_forward_hook(_watch)


def require_step(model: nn.Module) -> None:
    """Raise NearlinearError where gradients would come back without the scale."""
    if of(model) is not None and getattr(model, "_nearlinear_step", None) is None:
        raise NearlinearError(
            "float16 gradients are scaled inside nl.accumulate only: write `for batch in "
            "nl.accumulate(model, [batch]):` around forward and backward"
        )


def widened(output):
    """``output`` of a float16 model for losses made of it: float32, so that gradients are scaled
    before they are rounded. One that has its loss already stays as it is."""
    if any(tensor.dim() == 0 for tensor in _differentiable(output)):
        return output
    half = torch.float16
    return _torch.map_tensors(lambda t: t.float() if t.dtype == half else t, output)


def _watch(model: nn.Module, args, output) -> None:
    """Forward hook: a backward pass outside `accumulate` is an error."""
    if torch.is_grad_enabled() and getattr(model, "_nearlinear_step", None) is None:
        for tensor in _differentiable(output):
            tensor.register_hook(lambda gradient: require_step(model))


def _differentiable(output) -> list[torch.Tensor]:
    return [tensor for tensor in _torch.tensors_in(output) if tensor.requires_grad]


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    updated = map(slices.of, model.parameters())
    return [local(p.grad) for p in updated if p.grad is not None]


def _multiply(gradients: list[torch.Tensor], factor: float) -> None:
    if gradients:
        torch._foreach_mul_(gradients, factor)
