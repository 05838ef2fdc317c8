"""Peak memory of one GPU by category, and the tracker that finds the peak of a step."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Any

GIB = 2**30

CATEGORIES = {
    "parameters": "parameters, this rank's shard",
    "optimizer": "optimizer states",
    "gradients": "gradients, accumulated or reduced",
    "gathered": "gathered parameters",
    "communication": "all-gather and reduce-scatter buffers",
    "handed": "hidden states between stages",
    "kept": "saved activations",
    "working": "temporary activations and gradients",
    "logits": "logits and loss",
    "update": "temporaries of the optimizer update",
}
"""Categories of a peak, in display order. ``working`` holds the temporaries of a block, forward and
in recomputation, and its gradients until they are reduced."""

RESERVE = "reserve: context, communicators, fragments"

PERSISTENT = ("parameters", "optimizer")
"""Categories that remain between two steps."""

RUNTIME = int(0.8 * GIB)
"""Bytes for the CUDA context, kernels and communicator buffers: typical of A100 and H100 with two
or three NCCL communicators, not measured per model."""
FRAGMENTATION = 0.04
"""Share of the peak lost to fragmentation of the caching allocator. Memory that is freed where
later tensors do not fit is counted apart: gradients, between which the first step allocates the
optimizer states, and the 16-bit logits before the loss. `nearlinear plan --validate` compares the
sum with published peaks of reserved memory."""

CategoryBytes = dict[str, int]


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of one rank at its peak, in bytes."""

    parts: CategoryBytes
    """Bytes by category at the peak, see `CATEGORIES`."""
    persistent: int
    """Exact bytes between two steps: parameters and optimizer states."""
    moment: str
    """Description of the moment of the peak."""
    reserve: int = 0
    """Bytes outside tensors: CUDA context, communicators, fragmentation."""
    pipeline_rank: int | None = None
    """Pipeline rank with this peak; None without a pipeline."""
    rough: str = ""
    """Reason for an error above a few percent; empty if there is none."""

    @property
    def peak(self) -> int:
        """Peak bytes of tensors, as counted by ``torch.cuda.max_memory_allocated``."""
        return sum(self.parts.values())

    @property
    def total(self) -> int:
        """Bytes required on a GPU."""
        return self.peak + self.reserve

    @property
    def reserved(self) -> int:
        """Peak bytes held by the allocator, as in ``torch.cuda.max_memory_reserved``."""
        return self.total - RUNTIME

    def as_dict(self) -> dict[str, Any]:
        """Return all numbers by name."""
        return dataclasses.asdict(self) | {"peak": self.peak, "total": self.total}

    def __str__(self) -> str:
        width = max(map(len, (*CATEGORIES.values(), RESERVE)))
        lines = [f"{'peak memory of one GPU':{width}}      GiB"]
        lines += [
            _row(name, self.parts[part], width)
            for part, name in CATEGORIES.items()
            if self.parts.get(part)
        ]
        lines.append(_row("total of tensors", self.peak, width))
        if self.reserve:
            lines.append(_row(RESERVE, self.reserve, width))
            lines.append(_row("required", self.total, width))
        lines.append(_row("of which between steps", self.persistent, width))
        whose = "" if self.pipeline_rank is None else f" of pipeline rank {self.pipeline_rank}"
        lines.append(f"the peak{whose} is {self.moment}")
        return "\n".join([*lines, *([f"rough: {self.rough}"] if self.rough else [])])


def reserve_bytes(peak: int, unusable: int) -> int:
    """Return the bytes to leave free beside ``peak`` bytes of tensors on a GPU.

    ``unusable``: bytes that were freed before the peak where no other tensor fits.
    """
    return RUNTIME + unusable + int(FRAGMENTATION * (peak + unusable))


def _row(name: str, size: int, width: int) -> str:
    return f"{name:{width}} {size / GIB:8.3f}"


class PeakTracker:
    """Tracks allocated bytes by category along a step, and records the peak."""

    def __init__(self):
        self.now: Counter[str] = Counter()
        self.moment = ""
        """Description of the current moment."""
        self.peak: int = 0
        self.at_peak: CategoryBytes = {}
        self.moment_of_peak: str = ""
        self.fragment_at_peak: int = 0

    def add(self, category: str, size: int) -> None:
        """Allocate ``size`` bytes, or free them if negative."""
        self.now[category] += size
        if size > 0:
            self.observe()

    def update(self, sizes: CategoryBytes, sign: int = 1) -> None:
        """Allocate or free ``sizes`` without checking for a peak."""
        for category, size in sizes.items():
            self.now[category] += sign * size

    def observe(self, fragment: int = 0, **temporary: int) -> None:
        """Check for a peak, with ``temporary`` bytes by category that exist only now.

        ``fragment``: bytes that are free, but of no use.
        """
        total = sum(self.now.values()) + sum(temporary.values())
        if total > self.peak:
            self.peak, self.moment_of_peak = total, self.moment
            self.at_peak, self.fragment_at_peak = dict(self.now), fragment
            for category, size in temporary.items():
                self.at_peak[category] = self.at_peak.get(category, 0) + size

    def estimate(self, persistent: int) -> MemoryEstimate:
        """Return the recorded peak, at the end of a step."""
        parts = dict.fromkeys(CATEGORIES, 0) | self.at_peak
        freed = max(0, self.now["gradients"] - parts["gradients"])
        reserve = reserve_bytes(self.peak, self.fragment_at_peak + freed)
        return MemoryEstimate(parts, persistent, self.moment_of_peak, reserve)
