"""Losses of a batch's micro-batches: weighted by their targets, and made known to every rank.

What fails while the last stage makes a loss of its output, which is the user's code, is kept until
the schedule is through, so that no rank waits for another; then all of them raise it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ... import _torch
from ...errors import NearlinearError


class Losses:
    """The losses of one batch whose micro-batches have ``counts`` targets."""

    def __init__(self, model: nn.Module, counts: list[float]):
        self.engine = model._nearlinear_pipeline
        self.step = getattr(model, "_nearlinear_step", None)
        self.counts, self.total = counts, sum(counts)
        self.value = torch.zeros((), dtype=torch.float64, device=self.engine.now.device)
        self.error: Exception | None = None

    def of(self, make: Callable) -> Callable:
        """For `Engine.run`: weigh what ``make(micro-batch, output)`` returns."""

        def consume(i: int, output) -> torch.Tensor:
            try:
                loss = make(i, output)
            except Exception as error:
                self.error = self.error or error
                return _nothing(output)
            return self._weigh(i, loss)

        return consume

    def _weigh(self, i: int, loss: torch.Tensor) -> torch.Tensor:
        """The part of micro-batch ``i`` in the batch's loss, times the batch's in the step's."""
        share = self.counts[i] / self.total if self.total else 0.0
        if share:  # the mean over no target is not a number
            self.value += loss.detach().double() * share
        return loss * (share * (1.0 if self.step is None else self.step.weight))

    def settle(self) -> torch.Tensor:
        """The batch's loss on every pipeline rank, or the error. A collective call of them."""
        if self.step is not None:
            self.step.came_back()
        failed = torch.zeros_like(self.value)
        if self.error is not None:
            failed.fill_(1.0)
        told = torch.stack([self.value, failed])
        self.engine.tell(told)
        value, failed = told.tolist()
        if self.error is not None:
            raise self.error
        if failed:
            raise NearlinearError(
                f"the last stage of the pipeline failed: see rank {self.engine.source}"
            )
        return torch.tensor(value, dtype=torch.float32, device=told.device)


def _nothing(output) -> torch.Tensor:
    """A zero that hangs on ``output``, for backward passes that others wait for."""
    found = (tensor for tensor in _torch.tensors_in(output) if tensor.requires_grad)
    return sum((tensor.sum() * 0 for tensor in found), torch.zeros(()))
