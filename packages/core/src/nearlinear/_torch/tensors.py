"""Trees of tensors, their memory, their blocks and their beginnings."""

import contextlib

import torch
from torch.utils import _pytree


def map_tensors(function, tree):
    """``tree`` (dicts, lists, model outputs) with every tensor replaced. 2.8.0, 2.13.0."""
    return _pytree.tree_map_only(torch.Tensor, function, tree)


def tensors_in(tree) -> list:
    """The tensors of ``tree``, in order. 2.8.0, 2.13.0."""
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def map_instances(kind, function, tree):
    """``tree`` with every instance of ``kind`` replaced. 2.8.0, 2.13.0."""
    return _pytree.tree_map_only(kind, function, tree)


def storage_of(tensor) -> int:
    """A number of the memory that ``tensor`` is a view of, its own as long as that is alive, or a
    `WeakStorage` of it, also when it is resized. 2.8.0, 2.13.0."""
    return tensor.untyped_storage()._cdata


def local_block(tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and offset of a DTensor's block on this rank. 2.8.0, 2.13.0."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )


@contextlib.contextmanager
def instead_of_truncated_normal(function):
    """Have ``torch.nn.init.trunc_normal_``, by whatever name it was imported, call ``function``.

    That gets the original as its first argument. 2.8.0, 2.13.0.
    """
    original = torch.nn.init._no_grad_trunc_normal_

    def instead(*args, **kwargs):
        return function(original, *args, **kwargs)

    torch.nn.init._no_grad_trunc_normal_ = instead
    try:
        yield
    finally:
        torch.nn.init._no_grad_trunc_normal_ = original
