"""Tell the watchdog which operation this rank performs, so that it can name the rank that hangs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from ...distributed.watchdog import Watchdog
from . import Callback, TrainStep
from .rank_timing import find_hidden_states

FIRST_STEP_PATIENCE = 4.0
"""Multiple of ``train.rank_timeout`` allowed for operations of the first step, which compiles."""


class WatchdogCallback(Callback):
    """Report the operations of a step, and the blocks of the model, to the watchdog."""

    def __init__(
        self, watch: Watchdog, model: nn.Module, blocks: Iterable[nn.Module], first_step: int
    ):
        """
        Args:
            watch: The watchdog of the run.
            model: The sharded model.
            blocks: Blocks of ``model`` on this rank.
            first_step: Number of the first step that this process runs.
        """
        self.watch, self.first_step = watch, first_step
        report_blocks(model, blocks, watch.operation.advance)

    def on_step_begin(self, step: TrainStep) -> None:
        self._begin(step, "loading a batch")

    def on_data_loaded(self, step: TrainStep) -> None:
        self._begin(step, "micro-batch 1")

    def on_micro_batch(self, step: TrainStep, index: int) -> None:
        if index > 1:
            self._begin(step, f"micro-batch {index}")

    def on_backward_end(self, step: TrainStep) -> None:
        self._begin(step, "the gradient norm")

    def update_context(self, step: TrainStep) -> AbstractContextManager[Any]:
        return self.watch.changing(f"step {step.number}, the optimizer's update")

    def _begin(self, step: TrainStep, operation: str) -> None:
        patience = FIRST_STEP_PATIENCE if step.number == self.first_step else 1.0
        self.watch.at(f"step {step.number}, {operation}", patience)


def report_blocks(
    model: nn.Module, blocks: Iterable[nn.Module], report: Callable[[str], None]
) -> None:
    """Call ``report("forward of h.3")`` before the parameters of each block are gathered.

    The same happens before its backward pass. These hooks run before FSDP2's, which gather.
    """
    names = {module: name for name, module in model.named_modules()}
    for block in blocks:
        _report_block(block, names.get(block, "a block"), report)


def _report_block(block: nn.Module, name: str, report: Callable[[str], None]) -> None:
    forward, backward = f"forward of {name}", f"backward of {name}"

    def before_forward(module: nn.Module, args: Any) -> None:
        report(forward)

    def after_forward(module: nn.Module, args: Any, output: Any) -> None:
        hidden = find_hidden_states(output)
        if hidden is not None:
            hidden.register_hook(lambda gradient: report(backward))

    block.register_forward_pre_hook(before_forward, prepend=True)
    block.register_forward_hook(after_forward, prepend=True)
