"""Storages, initialization and blocks of tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch.distributed.tensor import DTensor


def storage_of(tensor: torch.Tensor) -> int:
    """Return an identifier of the storage of ``tensor``.

    It is unique while the storage, or a `WeakStorage` of it, is alive, and survives resizing.
    2.8.0, 2.13.0.
    """
    return tensor.untyped_storage()._cdata


def local_block(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape and the offset of a DTensor's block on this rank. 2.8.0, 2.13.0."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )


@contextlib.contextmanager
def instead_of_truncated_normal(function: Callable) -> Iterator[None]:
    """Replace ``torch.nn.init.trunc_normal_``, under any name it was imported by, by ``function``.

    ``function`` receives the original as its first argument. 2.8.0, 2.13.0.
    """
    original = torch.nn.init._no_grad_trunc_normal_

    def instead(*args, **kwargs):
        return function(original, *args, **kwargs)

    torch.nn.init._no_grad_trunc_normal_ = instead
    try:
        yield
    finally:
        torch.nn.init._no_grad_trunc_normal_ = original
