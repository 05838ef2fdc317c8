"""Tensors without memory, for the planner's dry run."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch._subclasses import fake_tensor


def fake_tensors() -> fake_tensor.FakeTensorMode:
    """Return a mode in which new tensors have no memory; real tensors may take part. 2.13.0."""
    return fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(tensor: object) -> bool:
    """Return whether ``tensor`` has no memory. 2.13.0."""
    return isinstance(tensor, fake_tensor.FakeTensor)


def unset_fake():
    """Return a context in which operators run for real inside `fake_tensors`. 2.13.0."""
    return fake_tensor.unset_fake_temporarily()


def forget_layouts() -> None:
    """Clear the sharding caches of DTensor, which confuse meshes of successive jobs. 2.13.0.

    A cached mesh over the same ranks keeps process groups that no longer exist.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


@contextlib.contextmanager
def watching_resizes(see: Callable[[int, int], None]) -> Iterator[None]:
    """Call ``see(storage, bytes)`` before Python code resizes a storage. 2.13.0.

    ``storage`` is the identifier that `storage_of` returns.
    """
    original = torch.UntypedStorage.resize_

    def resize_(storage, size):
        see(storage._cdata, size)
        return original(storage, size)

    torch.UntypedStorage.resize_ = resize_  # pyright: ignore[reportAttributeAccessIssue] parameter names
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original
