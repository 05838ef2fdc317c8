"""Verify a checkpoint, and compare two checkpoints.

Verification reads sizes and SHA-256 of all files, and the tensors in them. The comparison goes
tensor by tensor, one whole tensor at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from safetensors import SafetensorError

from .. import storage
from ..errors import CheckpointError
from ..storage import StoragePath
from . import index
from .index_schema import FileEntry, Index
from .reader import CheckpointReader, open_tensors


def find_faults(
    folder, on_progress: Callable[[int], object] = lambda bytes_read: None, signed: bool = True
) -> Iterator[str]:
    """Yield a message for every fault of the checkpoint in ``folder``, as faults are found.

    Args:
        folder: The checkpoint.
        on_progress: Called with the size of each file after it was read.
        signed: Require a signature if a key is set in the environment.

    Raises:
        StorageUnreachable: The storage cannot be read, so that the checkpoint may be intact.
    """
    folder = storage.as_path(folder)
    try:
        found = index.read(folder, signed)
    except storage.StorageUnreachable:
        raise
    except CheckpointError as error:
        yield str(error)
        return
    for name, file in found.files.items():
        yield from _file_faults(folder / name, file, found)
        on_progress(file.bytes)


def _file_faults(path: StoragePath, file: FileEntry, found: Index) -> Iterator[str]:
    try:
        size = path.size()
        if size != file.bytes:
            yield f"{path} has {size} bytes instead of {file.bytes}"
        elif index.hash_file(path) != file:
            yield f"{path} has changed since it was written: its SHA-256 is different"
    except FileNotFoundError:
        yield f"{path} is missing"
        return
    except OSError as error:
        yield f"{path} cannot be read ({error.strerror})"
        return
    try:
        with open_tensors(path) as values:
            for fault in index.header_faults(path.name, values, found):
                yield f"{path.parent / fault}"
    except (OSError, SafetensorError) as error:
        yield f"{path} is not a complete safetensors file ({error})"


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
