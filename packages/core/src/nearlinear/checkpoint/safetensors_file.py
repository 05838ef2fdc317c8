"""Safetensors files: parse and encode headers, and write files from memory without a copy.

`write_file` writes and hashes all tensors in one pass. `SafetensorsWriter` writes tensor by tensor,
for files larger than memory; the safetensors library needs all tensors at once. Both give the
byte layout of the library.

Format: https://huggingface.co/docs/safetensors (8 bytes with the header's length, the header as
JSON, the values).
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import storage
from ..storage.threads import Pace, run_in_thread
from . import sealed_json
from .index_schema import DTYPES, FileEntry

LENGTH_BYTES = 8
"""Bytes of the integer that gives the header's length."""
MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors library."""
CHUNK = 4 * 2**20
"""Bytes that are hashed while the next chunk is written."""

TensorSpecs = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape of tensors by name."""


def file_order(tensors: TensorSpecs) -> list[str]:
    """Return the names of ``tensors`` in the order of their values in a file."""
    rank = {dtype: place for place, dtype in enumerate(DTYPES)}
    return sorted(tensors, key=lambda name: (rank[tensors[name][0]], name))


def encode_header(tensors: TensorSpecs, metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes before the values of ``tensors``, which follow in `file_order`.

    Args:
        tensors: Dtypes and shapes.
        metadata: Texts to store in the header.

    Raises ValueError for a dtype that safetensors does not support.
    """
    unknown = [name for name, (dtype, _) in tensors.items() if dtype not in DTYPES]
    if unknown:
        dtype, _ = tensors[unknown[0]]
        raise ValueError(
            f"{unknown[0]} is {dtype}, which safetensors files do not support: convert it to "
            "another dtype"
        )
    header: dict = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name in file_order(tensors):
        dtype, shape = tensors[name]
        begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


@dataclass(frozen=True)
class HeaderEntry:
    """One tensor in the header of a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    """Position of the first value in the file, in bytes."""


def header_length(first: bytes | bytearray) -> int:
    """Return the header's length from the first `LENGTH_BYTES` of a file. Raises ValueError."""
    length = int.from_bytes(first, "little")
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"header of {length} bytes exceeds the limit of {MAX_HEADER_BYTES}")
    return length


def parse_header(header: bytes) -> tuple[dict[str, HeaderEntry], dict[str, str]]:
    """Parse the JSON of a header into entries in file order, and metadata. Raises ValueError.

    Values must follow one another without gaps, as the safetensors library requires.
    """
    parsed = sealed_json.parse(header)
    metadata = parsed.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise ValueError("header has invalid metadata")
    dtypes = {word: dtype for dtype, word in DTYPES.items()}
    found, end = {}, 0
    try:
        for name, entry in sorted(parsed.items(), key=lambda item: item[1]["data_offsets"]):
            dtype, shape = dtypes[entry["dtype"]], tuple(map(int, entry["shape"]))
            begin, last = end, end + torch.Size(shape).numel() * dtype.itemsize
            if min(shape, default=0) < 0 or list(entry["data_offsets"]) != [begin, last]:
                raise ValueError(f"{name} is at invalid offsets {entry['data_offsets']}")
            found[name], end = HeaderEntry(dtype, shape, LENGTH_BYTES + len(header) + begin), last
    except (KeyError, TypeError, OverflowError, RuntimeError) as error:
        raise ValueError(f"header is invalid: {error!r}") from None
    return found, metadata


def tensor_bytes(values: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    array: Any = values.detach().reshape(-1).view(torch.uint8).numpy()  # a buffer, also untyped
    return memoryview(array)


class SafetensorsWriter:
    """An open file that takes the values of ``tensors`` one by one, in `file_order`."""

    def __init__(self, path: Path, tensors: TensorSpecs):
        self.file = path.open("xb")
        self.file.write(encode_header(tensors))

    def add(self, values: torch.Tensor) -> None:
        """Append the values of the next tensor."""
        self.file.write(tensor_bytes(values.cpu().contiguous()))

    def close(self) -> None:
        """Flush the file to disk and close it."""
        with self.file:
            self.file.flush()
            os.fsync(self.file.fileno())


def write_file(
    path,
    tensors: dict[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    pace: Pace | None = None,
) -> FileEntry:
    """Write contiguous CPU tensors to ``path`` and return the size and SHA-256 of the file.

    With ``pace``, hashing and writing run on two background threads of bounded speed.

    The file appears atomically and is durable when this returns. Raises OSError,
    StorageUnreachable, and ValueError for a dtype that safetensors does not support.
    """
    specs = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    parts = [memoryview(encode_header(specs, metadata))]
    parts += [tensor_bytes(tensors[name]) for name in file_order(specs)]
    size = sum(map(len, parts))
    with _HashThread(pace) as hashing:
        chunks = hashing.tee(_chunks(parts))
        if pace is None:
            storage.as_path(path).write(chunks, size)
        else:
            paced = pace.pace(chunks)
            run_in_thread(lambda: storage.as_path(path).write(paced, size))()
    return hashing.result


def _chunks(parts: list[memoryview]) -> Iterator[memoryview]:
    for part in parts:
        for at in range(0, len(part), CHUNK):
            yield part[at : at + CHUNK]


class _HashThread:
    """SHA-256 on a separate thread. Hashing releases the GIL, as writing does."""

    def __init__(self, pace: Pace | None):
        self._digest, self._size, self._pace = hashlib.sha256(), 0, pace
        self._chunks: queue.SimpleQueue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._hash, name="checkpoint hash", daemon=True)

    @property
    def result(self) -> FileEntry:
        """Size and SHA-256 of all chunks, valid after the ``with`` block."""
        return FileEntry(self._size, self._digest.hexdigest())

    def tee(self, chunks: Iterable[memoryview]) -> Iterator[memoryview]:
        """Yield ``chunks`` and queue each one for hashing."""
        for chunk in chunks:
            self._size += len(chunk)
            self._chunks.put(chunk)
            yield chunk

    def __enter__(self) -> _HashThread:
        self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        self._chunks.put(None)
        self._thread.join()

    def _hash(self) -> None:
        chunks = iter(self._chunks.get, None)
        for chunk in chunks if self._pace is None else self._pace.pace(chunks):
            self._digest.update(chunk)
