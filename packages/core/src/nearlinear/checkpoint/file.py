"""One safetensors file, written and hashed in one pass over memory that is not copied."""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Iterable, Iterator

import torch

from .. import storage
from .index import File
from .stream import beginning, bytes_of, in_order

CHUNK = 16 * 2**20
"""bytes that are hashed while the next are written"""


def write(path, tensors: dict[str, torch.Tensor]) -> File:
    """The file at ``path`` with ``tensors`` (contiguous, on the CPU), kept safe when this
    returns; what it looks like.

    It is there from one moment to the next. Raises OSError, Unreachable, and ValueError for a dtype
    that safetensors does not have.
    """
    described = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    parts = [memoryview(beginning(described))]
    parts += [bytes_of(tensors[name]) for name in in_order(described)]
    with _Hashing() as hashing:
        storage.at(path).write(hashing.of(_chunks(parts)), sum(map(len, parts)))
    return hashing.found


def _chunks(parts: list[memoryview]) -> Iterator[memoryview]:
    for part in parts:
        for at in range(0, len(part), CHUNK):
            yield part[at : at + CHUNK]


class _Hashing:
    """SHA-256 by a thread of its own, which holds Python's lock as little as writing does."""

    def __init__(self):
        self.digest, self.size = hashlib.sha256(), 0
        self._waiting: queue.SimpleQueue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._hash, name="checkpoint hash", daemon=True)

    @property
    def found(self) -> File:
        """What was given out, once it is closed."""
        return File(self.size, self.digest.hexdigest())

    def of(self, chunks: Iterable[memoryview]) -> Iterator[memoryview]:
        """``chunks``, each on its way to be hashed when it is given out."""
        for chunk in chunks:
            self.size += len(chunk)
            self._waiting.put(chunk)
            yield chunk

    def __enter__(self) -> _Hashing:
        self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        self._waiting.put(None)
        self._thread.join()

    def _hash(self) -> None:
        while (chunk := self._waiting.get()) is not None:
            self.digest.update(chunk)
