"""How two checkpoints differ, tensor by tensor; each is read whole, one at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .whole import Whole


@dataclass(frozen=True)
class Difference:
    """What is not the same of one tensor."""

    name: str
    what: str
    """in words, where it is not about values"""
    largest: float = math.inf
    """absolute difference of two values"""
    relative: float = math.inf
    """norm of the difference, over that of the first tensor"""

    def __str__(self) -> str:
        if self.what:
            return f"{self.name}: {self.what}"
        return f"{self.name}: differs by at most {self.largest:.3g}, {self.relative:.3g} relative"


def differences(
    one,
    other,
    atol: float = 0.0,
    rtol: float = 0.0,
    only: str = "",
    read: Callable[[int, int], None] = lambda at, of: None,
) -> list[Difference]:
    """What differs by more than ``atol`` + ``rtol`` x the value in ``one``: most different first.

    ``only``: of tensors whose names begin so. ``read`` is called with how many tensors of how many
    were compared. Raises CheckpointError.
    """
    first, second = Whole(one), Whole(other)
    there, here = first.index.tensors, second.index.tensors
    found = []
    names = sorted(name for name in there.keys() | here.keys() if name.startswith(only))
    for at, name in enumerate(names):
        if name not in here or name not in there:
            found.append(Difference(name, f"only in {one if name in there else other}"))
        elif there[name].shape != here[name].shape:
            shapes = f"{list(there[name].shape)} and {list(here[name].shape)}"
            found.append(Difference(name, f"has shapes {shapes}"))
        else:
            found += _of_values(name, first.tensor(name), second.tensor(name), atol, rtol)
        read(at + 1, len(names))
    return sorted(found, key=lambda each: (-each.relative, each.name))


def _of_values(name: str, a: torch.Tensor, b: torch.Tensor, atol, rtol) -> list[Difference]:
    if a.dtype == b.dtype and torch.equal(a, b):
        return []
    if a.dtype != b.dtype and not (a.is_floating_point() and b.is_floating_point()):
        return [Difference(name, f"is {a.dtype} and {b.dtype}".replace("torch.", ""))]
    a, b = a.double(), b.double()
    apart = (a - b).abs()
    same = (apart <= atol + rtol * a.abs()) | (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return []
    norm = a.norm().item()
    relative = apart.norm().item() / norm if norm else math.inf
    return [Difference(name, "", apart.max().item(), relative)]
