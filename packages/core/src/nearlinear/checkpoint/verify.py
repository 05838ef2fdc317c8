"""Verify a checkpoint: sizes and SHA-256 of all files, and the tensors in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from safetensors import SafetensorError

from .. import storage
from ..errors import CheckpointError
from ..storage import StoragePath
from . import index
from .index import FileEntry, Index
from .reader import open_tensors
from .safetensors_file import DTYPES

_TORCH_NAMES = {word: str(dtype).removeprefix("torch.") for dtype, word in DTYPES.items()}


def find_faults(
    folder, on_progress: Callable[[int], object] = lambda bytes_read: None
) -> Iterator[str]:
    """Yield a message for every fault of the checkpoint in ``folder``, as faults are found.

    Args:
        folder: The checkpoint.
        on_progress: Called with the size of each file after it was read.

    Raises:
        StorageUnreachable: The storage cannot be read, so that the checkpoint may be intact.
    """
    folder = storage.as_path(folder)
    try:
        found = index.read(folder)
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
        yield from _tensor_faults(path, found)
    except (OSError, SafetensorError) as error:
        yield f"{path} is not a complete safetensors file ({error})"


def _tensor_faults(path: StoragePath, found: Index) -> Iterator[str]:
    """Yield a message for every difference between the tensors of a file and the index."""
    expected = {
        index.shard_key(name, number): (tensor.dtype, list(shard.shape))
        for name, tensor in found.tensors.items()
        for number, shard in enumerate(tensor.pieces.get(path.name, ()))
    }
    with open_tensors(path) as values:
        present = set(values.keys())
        for key in sorted(expected.keys() - present):
            yield f"{path} has no {key}, which is in the index"
        for key in sorted(present - expected.keys()):
            yield f"{path} has {key}, which is not in the index"
        for key in sorted(present & expected.keys()):
            part = values.get_slice(key)
            dtype = _TORCH_NAMES.get(part.get_dtype(), part.get_dtype())
            if (dtype, list(part.get_shape())) != expected[key]:
                wanted = "{} {}".format(*expected[key])
                yield f"{path} has {key} as {dtype} {part.get_shape()} instead of {wanted}"
