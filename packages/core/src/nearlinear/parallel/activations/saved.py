"""Which of the tensors that autograd saves are activations, and which are there anyway."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from ... import _torch
from ...errors import NearlinearError


def held_by(modules: Iterable[nn.Module]) -> set[int]:
    """The storages of parameters and buffers, as they are gathered now."""
    modules = list(modules)
    parameters = (p for module in modules for p in module.parameters())
    buffers = (b for module in modules for b in module.buffers())
    return {_torch.storage_of(t) for t in (*parameters, *buffers) if _is_plain(t)}


def _is_plain(tensor: torch.Tensor) -> bool:
    """Subclasses (DTensor) have memory of their own kinds; fake tensors stand for plain ones."""
    return type(tensor) in (torch.Tensor, nn.Parameter) or _torch.is_fake(tensor)


def is_activation(tensor: torch.Tensor, held: set[int]) -> bool:
    """Whether ``tensor`` is neither a parameter nor a buffer (``held``), nor a view of one.

    Gathered parameters are told by what they are a view of: units inside a block gather later.
    """
    if not _is_plain(tensor) or tensor.layout is not torch.strided:
        return False
    if isinstance(tensor, nn.Parameter):
        return False
    return not isinstance(tensor._base, nn.Parameter) and _torch.storage_of(tensor) not in held


@dataclass(frozen=True, eq=False)
class Stays:
    """A saved tensor that does not move; without its graph, which would keep itself alive."""

    tensor: torch.Tensor
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Stays:
        return cls(tensor.detach(), tensor._version)

    @property
    def changed(self) -> bool:
        """In place, since it was saved; where there are hooks autograd leaves that to them."""
        return self.tensor._version != self.version

    def take(self) -> torch.Tensor:
        """The tensor. Raises NearlinearError if it was changed."""
        if self.changed:
            raise changed_in_place()
        return self.tensor


def changed_in_place() -> NearlinearError:
    return NearlinearError(
        "a tensor that the backward pass needs was changed in place after it was saved: replace "
        "the operation by one that makes a new tensor"
    )
