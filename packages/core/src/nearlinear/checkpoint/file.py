"""One safetensors file, written and hashed in one pass over memory that is not copied.

The format is eight bytes with the length of a JSON header, the header, and the tensors' bytes.
Source: the safetensors format specification, https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from .index import File

CHUNK = 16 * 2**20
"""bytes that are hashed while the next are written"""
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip


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
    """The file, in pieces. Larger numbers first, so that all are aligned."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header, end = {}, 0
    for name, tensor in ordered:
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} is {tensor.dtype}, which safetensors files do not hold")
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        values = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
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
