"""Whether a checkpoint is what was written: every file's size and SHA-256, and what is in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from safetensors import SafetensorError

from .. import storage
from ..errors import CheckpointError
from ..storage import Place
from . import index
from .index import Index
from .reading import opened
from .stream import DTYPES

_TORCH = {word: str(dtype).removeprefix("torch.") for dtype, word in DTYPES.items()}


def faults(folder, read: Callable[[int], None] = lambda count: None) -> Iterator[str]:
    """Everything that is wrong with the checkpoint in ``folder``, in words, as it is found.

    ``read`` is called with the bytes of each file that was looked at. Raises Unreachable where
    nobody can tell.
    """
    folder = storage.at(folder)
    try:
        found = index.read(folder)
    except storage.Unreachable:
        raise
    except CheckpointError as error:
        yield str(error)
        return
    for name, file in found.files.items():
        yield from _of_file(folder / name, file, found)
        read(file.bytes)


def _of_file(path: Place, file: index.File, found: Index) -> Iterator[str]:
    try:
        size = path.size()
        if size != file.bytes:
            yield f"{path} has {size} bytes instead of {file.bytes}"
        elif index.digest(path) != file:
            yield f"{path} has changed since it was written: its SHA-256 is another"
    except FileNotFoundError:
        yield f"{path} is missing"
        return
    except OSError as error:
        yield f"{path} cannot be read ({error.strerror})"
        return
    try:
        yield from _of_content(path, found)
    except (OSError, SafetensorError) as error:
        yield f"{path} is no safetensors file, or not all of it ({error})"


def _of_content(path: Place, found: Index) -> Iterator[str]:
    """Where the tensors in a file are not those that the index speaks of."""
    expected = {
        index.key(name, number): (tensor.dtype, list(piece.shape))
        for name, tensor in found.tensors.items()
        for number, piece in enumerate(tensor.pieces.get(path.name, ()))
    }
    with opened(path) as values:
        there = set(values.keys())
        for key in sorted(expected.keys() - there):
            yield f"{path} has no {key}, which the index says it has"
        for key in sorted(there - expected.keys()):
            yield f"{path} has {key}, of which the index knows nothing"
        for key in sorted(there & expected.keys()):
            part = values.get_slice(key)
            dtype = _TORCH.get(part.get_dtype(), part.get_dtype())
            if (dtype, list(part.get_shape())) != expected[key]:
                said = "{} {}".format(*expected[key])
                yield f"{path} has {key} as {dtype} {part.get_shape()} instead of {said}"
