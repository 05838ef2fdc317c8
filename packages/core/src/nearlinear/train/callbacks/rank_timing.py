"""Measure the time each rank spends on its own, which its step time does not show.

All ranks wait for the slowest, so step times are equal. Timed are spans without a collective
inside: loading the batch, and forward and backward of each block between the all-gather of its
parameters and the reduce-scatter of its gradients. Embeddings, head, clipping, the optimizer and
slow links are not covered; every rank of a process group waits alike for a slow link.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

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
