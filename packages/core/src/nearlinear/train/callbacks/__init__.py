"""Callbacks of the trainer's step: the hooks, and the state of a step that they see.

To add a callback, write one class and pass an instance to the trainer::

    class GradientNoise(Callback):
        def on_gradients_ready(self, step):
            self.norms.append(step.grad_norm)

        def on_step_end(self, step, metrics):
            metrics["grad_noise"] = statistics.pstdev(self.norms)

    Trainer(config, callbacks=[GradientNoise()]).fit()

Hooks run on every rank, in the order of `Trainer.callbacks`. They observe a step and may skip its
update; they do not change the loss or the gradients. A hook must not call a collective, unless all
ranks call it alike: numbers of one rank reach the others through `Callback.rank_metrics`, which
the trainer sends in the all-reduce of the loss.
"""

from __future__ import annotations

import contextlib
import math
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..trainer import Trainer


NO_TARGETS = "none of its sequences has a target"
"""Reason to skip a step."""


@dataclass
class TrainStep:
    """State of an optimizer step in progress, as callbacks see it."""

    number: int
    """Number of the step, from 1."""
    updates: int
    """Updates of the model before this step: earlier steps that were not skipped."""
    logged: bool
    """True if the metrics of this step are logged."""
    loss: float = math.nan
    """Mean loss over all targets of all ranks in nats, known from `on_gradients_ready` on."""
    grad_norm: float = math.nan
    """Norm of all gradients before clipping, known from `on_gradients_ready` on."""
    overflow: bool = False
    """True if float16 gradients overflowed, so that all ranks dropped them."""
    skip_reason: str = ""
    """Reason to skip the update. Set by a callback in `on_gradients_ready`, alike on all ranks."""
    by_rank: dict[str, list[float]] = field(default_factory=dict)
    """For every name of `Callback.rank_metrics`, the numbers of all ranks."""


class Callback:
    """Hooks of a training step, in the order in which the trainer calls them.

    Every hook does nothing by default.
    """

    def on_setup(self, trainer: Trainer) -> None:
        """Attach to ``trainer``, whose model, optimizer and loader are ready."""

    def on_step_begin(self, step: TrainStep) -> None:
        """Called before the batch is loaded."""

    def on_data_loaded(self, step: TrainStep) -> None:
        """Called after the micro-batches of the step are loaded, before the first one runs."""

    def on_micro_batch(self, step: TrainStep, index: int) -> None:
        """Called before the forward pass of micro-batch ``index``, counted from 1."""

    def on_backward_end(self, step: TrainStep) -> None:
        """Called after the last backward pass, before gradients are clipped."""

    def rank_metrics(self, step: TrainStep) -> dict[str, float]:
        """Return numbers of this rank to gather from all ranks into ``step.by_rank``.

        Every rank must return the same names in the same order. Names that begin with _ are not
        logged.
        """
        return {}

    def on_gradients_ready(self, step: TrainStep) -> None:
        """Called with the loss and the gradient norm, equal on all ranks, before the update.

        To skip the update, set ``step.skip_reason``.
        """

    def update_context(self, step: TrainStep) -> AbstractContextManager[Any]:
        """Return a context that the trainer enters around the optimizer's update."""
        return contextlib.nullcontext()

    def on_step_end(self, step: TrainStep, metrics: dict[str, Any]) -> None:
        """Add metrics of the step to ``metrics``."""

    def on_checkpoint(self, number: int) -> None:
        """Called before a checkpoint of step ``number`` is written, on all ranks.

        An error prevents the checkpoint. The hook may call collectives.
        """

    def on_rewind(self, number: int) -> None:
        """Called after the run went back to the state after step ``number``, to repeat steps."""
