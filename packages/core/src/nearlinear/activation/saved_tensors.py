"""Tell activations among the tensors that autograd saves from parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from .. import _torch
from ..errors import NearlinearError


def parameter_storages(modules: Iterable[nn.Module]) -> set[int]:
    """Return the storages of the parameters and buffers in their present, gathered state."""
    modules = list(modules)
    parameters = (p for module in modules for p in module.parameters())
    buffers = (b for module in modules for b in module.buffers())
    return {_torch.storage_of(t) for t in (*parameters, *buffers) if _is_plain(t)}


def _is_plain(tensor: torch.Tensor) -> bool:
    """Exclude tensor subclasses such as DTensor, whose storage differs; include fake tensors."""
    return type(tensor) in (torch.Tensor, nn.Parameter) or _torch.is_fake(tensor)


def is_activation(tensor: torch.Tensor, storages: set[int]) -> bool:
    """Return whether ``tensor`` is neither a parameter or buffer nor a view of one.

    ``storages``: see `parameter_storages`. Parameters of inner units, which are gathered later, are
    recognized by the base of the view.
    """
    if not _is_plain(tensor) or tensor.layout is not torch.strided:
        return False
    if isinstance(tensor, nn.Parameter):
        return False
    return not isinstance(tensor._base, nn.Parameter) and _torch.storage_of(tensor) not in storages


@dataclass(frozen=True, eq=False)
class KeptTensor:
    """A saved tensor that stays on the device; detached, or its graph would keep itself alive."""

    tensor: torch.Tensor
    version: int

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> KeptTensor:
        """Record ``tensor`` and its version."""
        return cls(tensor.detach(), tensor._version)

    @property
    def changed(self) -> bool:
        """True after an in-place change, which autograd does not check with saved-tensor hooks."""
        return self.tensor._version != self.version

    def take(self) -> torch.Tensor:
        """Return the tensor. Raises NearlinearError if it was changed in place."""
        if self.changed:
            raise changed_in_place()
        return self.tensor


def changed_in_place() -> NearlinearError:
    return NearlinearError(
        "a tensor that the backward pass needs was changed in place after it was saved. Replace "
        "the in-place operation by one that returns a new tensor."
    )
