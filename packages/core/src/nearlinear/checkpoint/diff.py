"""Compare two checkpoints tensor by tensor, one whole tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .reader import CheckpointReader


@dataclass(frozen=True)
class TensorDifference:
    """Difference of one tensor between two checkpoints."""

    name: str
    reason: str
    """Difference other than values, as in "has shapes [2] and [3]", or ""."""
    largest: float = math.inf
    """Largest absolute difference of two values."""
    relative: float = math.inf
    """Norm of the difference, divided by the norm of the first tensor."""

    def __str__(self) -> str:
        if self.reason:
            return f"{self.name}: {self.reason}"
        return f"{self.name}: differs by at most {self.largest:.3g}, {self.relative:.3g} relative"


def compare_checkpoints(
    one,
    other,
    atol: float = 0.0,
    rtol: float = 0.0,
    only: str = "",
    on_progress: Callable[[int, int], object] = lambda compared, total: None,
) -> list[TensorDifference]:
    """Return the tensors that differ by more than ``atol + rtol * abs(value)``, largest first.

    Args:
        one: A checkpoint of any layout. ``rtol`` refers to its values.
        other: The checkpoint to compare with.
        atol: Absolute tolerance.
        rtol: Relative tolerance.
        only: Prefix of the names of the tensors to compare.
        on_progress: Called after each tensor with the number compared and the total.

    Raises:
        CheckpointError: One of the checkpoints cannot be read.
    """
    first, second = CheckpointReader(one), CheckpointReader(other)
    ours, theirs = first.index.tensors, second.index.tensors
    found = []
    names = sorted(name for name in ours.keys() | theirs.keys() if name.startswith(only))
    for at, name in enumerate(names):
        if name not in ours or name not in theirs:
            found.append(TensorDifference(name, f"only in {one if name in ours else other}"))
        elif ours[name].shape != theirs[name].shape:
            shapes = f"{list(ours[name].shape)} and {list(theirs[name].shape)}"
            found.append(TensorDifference(name, f"has shapes {shapes}"))
        else:
            found += _compare_values(name, first.tensor(name), second.tensor(name), atol, rtol)
        on_progress(at + 1, len(names))
    return sorted(found, key=lambda each: (-each.relative, each.name))


def _compare_values(
    name: str, a: torch.Tensor, b: torch.Tensor, atol: float, rtol: float
) -> list[TensorDifference]:
    if a.dtype == b.dtype and torch.equal(a, b):
        return []
    if a.dtype != b.dtype and not (a.is_floating_point() and b.is_floating_point()):
        return [TensorDifference(name, f"is {a.dtype} and {b.dtype}".replace("torch.", ""))]
    a, b = a.double(), b.double()
    distance = (a - b).abs()
    same = (distance <= atol + rtol * a.abs()) | (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return []
    norm = a.norm().item()
    relative = distance.norm().item() / norm if norm else math.inf
    return [TensorDifference(name, "", distance.max().item(), relative)]
