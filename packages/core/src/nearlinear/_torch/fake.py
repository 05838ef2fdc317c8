"""Tensors without memory, for the planner's dry run."""

import contextlib

import torch
from torch._subclasses import fake_tensor


def fake_tensors():
    """A mode in which tensors have shapes and no memory; real ones may stand beside them.
    2.13.0."""
    return fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(tensor) -> bool:
    """Whether ``tensor`` has no memory. 2.13.0."""
    return isinstance(tensor, fake_tensor.FakeTensor)


def unset_fake():
    """Inside, operators that come to `fake_tensors` run for real. 2.13.0."""
    return fake_tensor.unset_fake_temporarily()


def forget_layouts() -> None:
    """Drop what DTensors remember of meshes: they take one of the same ranks for another's of an
    earlier job, whose groups are gone. 2.13.0."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


@contextlib.contextmanager
def watching_resizes(see):
    """Call ``see`` with the number (`storage_of`) of every storage that Python code resizes, and
    its new bytes, before. 2.13.0."""
    original = torch.UntypedStorage.resize_

    def resize_(storage, size):
        see(storage._cdata, size)
        return original(storage, size)

    torch.UntypedStorage.resize_ = resize_
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original
