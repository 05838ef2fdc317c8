"""One safetensors file, written and hashed in one pass over memory that is not copied."""

from __future__ import annotations

import hashlib
import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from .index import File
from .stream import beginning, bytes_of, in_order

CHUNK = 16 * 2**20
"""bytes that are hashed while the next are written"""


def write(path: Path, tensors: dict[str, torch.Tensor]) -> File:
    """The file at ``path`` with ``tensors`` (contiguous, on the CPU), on the disk when this
    returns; what it looks like.

    It is there from one moment to the next. Raises OSError, and ValueError for a dtype that
    safetensors does not have.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb", buffering=0) as file, _Hashing() as hashing:
            for chunk in _chunks(tensors):
                hashing.add(chunk)
                while chunk:  # one call may write less
                    chunk = chunk[file.write(chunk) :]
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return hashing.found


def _chunks(tensors: dict[str, torch.Tensor]) -> Iterator[memoryview]:
    """The file, in pieces."""
    described = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    yield memoryview(beginning(described))
    for name in in_order(described):
        values = bytes_of(tensors[name])
        for at in range(0, len(values), CHUNK):
            yield values[at : at + CHUNK]


class _Hashing:
    """SHA-256 by a thread of its own, which holds Python's lock as little as writing does."""

    def __init__(self):
        self.digest, self.size = hashlib.sha256(), 0
        self._waiting: queue.SimpleQueue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._hash, name="checkpoint hash", daemon=True)

    @property
    def found(self) -> File:
        """What was added, once it is closed."""
        return File(self.size, self.digest.hexdigest())

    def add(self, chunk: memoryview) -> None:
        self.size += len(chunk)
        self._waiting.put(chunk)

    def __enter__(self) -> _Hashing:
        self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        self._waiting.put(None)
        self._thread.join()

    def _hash(self) -> None:
        while (chunk := self._waiting.get()) is not None:
            self.digest.update(chunk)
