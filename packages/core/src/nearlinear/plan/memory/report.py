"""What the memory of one GPU goes to at the worst moment of a step, as data and as a table."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

GIB = 2**30

NAMES = {
    "parameters": "parameters, this rank's shard",
    "optimizer": "optimizer states",
    "gradients": "gradients, added up or reduced",
    "gathered": "gathered parameters",
    "communication": "buffers of gathers and reductions",
    "handed": "hidden states between stages",
    "kept": "activations kept for the backward pass",
    "working": "activations and gradients at work",
    "logits": "logits and loss",
    "update": "temporaries of the update",
}
"""The categories of a peak, in order. ``working`` is what a block needs while it computes, forwards
and again, and its gradients until they are reduced."""

RESERVE = "reserve: context, communicators, fragments"

PERSISTENT = ("parameters", "optimizer")
"""what is there between two steps"""

RUNTIME = int(0.8 * GIB)
"""bytes that CUDA's context, kernels and the communicators' own buffers take beside tensors: usual
on A100 and H100 with two or three NCCL communicators, not measured for a model"""
FRAGMENTS = 0.04
"""share of a peak that the caching allocator holds in pieces too small for anything asked for"""


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of one rank at its peak, in bytes."""

    parts: dict[str, int]
    """by category, see `NAMES`: what is there at the peak, so that they add up to it"""
    persistent: int
    """there between two steps: parameters and optimizer states, to the byte"""
    moment: str
    """when the peak is, in words"""
    reserve: int = 0
    """beside tensors: CUDA's context, communicators, fragments of the allocator"""
    pipeline_rank: int | None = None
    """whose memory this is, in a pipeline; None: there is none"""
    rough: str = ""
    """why the closed form is not within a few parts of a hundred; empty: it is"""

    @property
    def peak(self) -> int:
        """Bytes of tensors at the worst moment: what ``torch.cuda.max_memory_allocated`` counts."""
        return sum(self.parts.values())

    @property
    def total(self) -> int:
        """What a GPU must have for it."""
        return self.peak + self.reserve

    def as_dict(self) -> dict:
        """For JSON."""
        return dataclasses.asdict(self) | {"peak": self.peak, "total": self.total}

    def __str__(self) -> str:
        width = max(map(len, (*NAMES.values(), RESERVE)))
        lines = [f"{'memory of one GPU at its peak':{width}}      GiB"]
        lines += [
            _row(name, self.parts[part], width)
            for part, name in NAMES.items()
            if self.parts.get(part)
        ]
        lines.append(_row("together", self.peak, width))
        if self.reserve:
            lines.append(_row(RESERVE, self.reserve, width))
            lines.append(_row("needed", self.total, width))
        lines.append(_row("of which between steps", self.persistent, width))
        whose = "" if self.pipeline_rank is None else f" of pipeline rank {self.pipeline_rank}"
        lines.append(f"the peak{whose} is {self.moment}")
        return "\n".join([*lines, *([f"rough: {self.rough}"] if self.rough else [])])


def reserve(peak: int) -> int:
    """Bytes to leave free beside tensors that take ``peak`` on a GPU."""
    return RUNTIME + int(FRAGMENTS * peak)


def _row(name: str, size: int, width: int) -> str:
    return f"{name:{width}} {size / GIB:8.3f}"
