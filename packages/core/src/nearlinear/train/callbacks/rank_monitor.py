"""Monitor each rank: the time it spends on its own, and the operation it performs.

All ranks wait for the slowest, so step times are equal. `RankTiming` times spans without a
collective inside: loading the batch, and forward and backward of each block between the all-gather
of its parameters and the reduce-scatter of its gradients. Embeddings, head, clipping, the optimizer
and slow links are not covered. `WatchdogCallback` tells the watchdog which operation this rank
performs, so that it can name the rank that hangs.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ...distributed.watchdog import Watchdog
from . import Callback, TrainStep

RANK_METRICS = ("step_seconds", "load_seconds", "compute_seconds", "mem_gib_by_rank")
"""Per-rank metrics of a logged step: the whole step, its own parts of it, peak memory."""


class RankTiming(Callback):
    """Time the loading and the computation of this rank in logged steps."""

    def __init__(self, blocks: Iterable[nn.Module], device: torch.device):
        """
        Args:
            blocks: Blocks of the sharded model. FSDP2's hooks are registered first, so that
                gathering and reducing are outside of the measured spans.
            device: Device of this rank.
        """
        self._active = False
        self._device = device
        self._step_start = self._load_seconds = 0.0
        self._mark, self._seconds_between = _clock(device)
        self._spans: list[tuple[Any, Any]] = []  # (begin, end) marks
        self._open: tuple[str, Any] | None = None  # ("forward" or "backward", begin mark)
        for block in blocks:
            block.register_forward_pre_hook(self._before_forward, with_kwargs=True)
            block.register_forward_hook(self._after_forward)

    def on_step_begin(self, step: TrainStep) -> None:
        self._active, self._step_start = step.logged, time.perf_counter()

    def on_data_loaded(self, step: TrainStep) -> None:
        self._load_seconds = time.perf_counter() - self._step_start

    def rank_metrics(self, step: TrainStep) -> dict[str, float]:
        if not step.logged:
            return {}
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # marks are events, which may be pending
        compute_seconds = sum(self._seconds_between(*span) for span in self._spans)
        self._spans, self._open = [], None
        step_seconds = time.perf_counter() - self._step_start
        values = (step_seconds, self._load_seconds, compute_seconds, peak_memory(self._device))
        return dict(zip(RANK_METRICS, values, strict=True))

    def _before_forward(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        if not (self._active and torch.is_grad_enabled()) or self._open is not None:
            return  # an open span: recomputation inside a backward pass, which is being timed
        hidden = find_hidden_states([args, kwargs])
        if hidden is not None:
            hidden.register_hook(self._after_backward)
        self._begin("forward")

    def _after_forward(self, block: nn.Module, args: Any, output: Any) -> None:
        if self._end("forward"):
            hidden = find_hidden_states(output)
            if hidden is not None:
                hidden.register_hook(self._before_backward)

    def _before_backward(self, gradient: torch.Tensor) -> None:
        self._begin("backward")

    def _after_backward(self, gradient: torch.Tensor) -> None:
        self._end("backward")

    def _begin(self, phase: str) -> None:
        self._open = phase, self._mark()

    def _end(self, phase: str) -> bool:
        """Close the open span if it belongs to ``phase``; return True if it did."""
        if self._open is None or self._open[0] != phase:
            return False
        self._spans.append((self._open[1], self._mark()))
        self._open = None
        return True


def _clock(device: torch.device) -> tuple[Callable[[], Any], Callable[[Any, Any], float]]:
    """Return functions that mark a point in the work of ``device`` and time between two marks."""
    if device.type != "cuda":
        return time.perf_counter, lambda begin, end: end - begin

    def mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    return mark, lambda begin, end: begin.elapsed_time(end) / 1e3


def find_hidden_states(tree: Any) -> torch.Tensor | None:
    """Return the first tensor that requires a gradient in a block's arguments or results."""
    if isinstance(tree, torch.Tensor):
        return tree if tree.requires_grad else None
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, list | tuple):
        return None
    return next((found for item in tree if (found := find_hidden_states(item)) is not None), None)


def peak_memory(device: torch.device) -> float:
    """Return the peak memory of this rank in GiB: of its GPU, or of its process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


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
