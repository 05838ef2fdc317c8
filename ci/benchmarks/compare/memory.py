"""Memory of a training step: peak of the allocated tensors of rank 0.

Systems share processes, so that resident memory cannot be divided among them. The peak of a system
is the size of its tensors between two steps plus the largest growth of torch's allocations within a
step, according to the profiler. Freed buffers in the pools of a communication library are not
included.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


def live_tensor_bytes() -> int:
    """Return the bytes of the storages of all tensors that Python code can reach."""
    gc.collect()
    storages: dict[int, int] = {}
    for each in gc.get_objects():
        if isinstance(each, torch.Tensor) and type(each) in (torch.Tensor, torch.nn.Parameter):
            _add_storage(each, storages)
        if isinstance(each, torch.Tensor) and getattr(each, "_local_tensor", None) is not None:
            _add_storage(each._local_tensor, storages)
    return sum(storages.values())


def _add_storage(tensor: torch.Tensor, storages: dict[int, int]) -> None:
    if tensor.layout == torch.strided and tensor.device.type == "cpu":
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()


def peak_growth(step: Callable[[], Result]) -> tuple[Result, int]:
    """Run ``step`` and return its result and the largest growth of allocated bytes within it."""
    with torch.profiler.profile(profile_memory=True) as profile:
        result = step()
    events = profile.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    changes = [(each.start_ns(), each.nbytes()) for each in events if each.name() == "[memory]"]
    now = most = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        now += change
        most = max(most, now)
    return result, most
