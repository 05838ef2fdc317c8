"""A safetensors file written tensor by tensor: the header says first where each will be.

Format: https://huggingface.co/docs/safetensors (8 bytes with the header's length, the header as
JSON, the values). As long and as ordered as what the library writes, which wants all at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

DTYPES = {
    torch.complex64: "C64", torch.float64: "F64", torch.int64: "I64", torch.uint64: "U64",
    torch.float32: "F32", torch.int32: "I32", torch.uint32: "U32",
    torch.bfloat16: "BF16", torch.float16: "F16", torch.int16: "I16", torch.uint16: "U16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""What they are called in the header; wider ones come first, as alignment wants it."""


Described = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""dtype and shape of tensors, by name"""


def in_order(tensors: Described) -> list[str]:
    """The names of ``tensors`` as they follow one another in a file."""
    rank = {dtype: place for place, dtype in enumerate(DTYPES)}
    return sorted(tensors, key=lambda name: (rank[tensors[name][0]], name))


def beginning(tensors: Described) -> bytes:
    """What a file with ``tensors`` begins with; their bytes follow `in_order`.

    Raises ValueError for a dtype that safetensors does not have.
    """
    unknown = [name for name, (dtype, _) in tensors.items() if dtype not in DTYPES]
    if unknown:
        dtype, _ = tensors[unknown[0]]
        raise ValueError(f"{unknown[0]} is {dtype}, which safetensors files do not hold")
    header: dict = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in in_order(tensors):
        dtype, shape = tensors[name]
        begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class Entry:
    """A tensor of a file that has been written, as the header has it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    """bytes of the file before its values"""


LENGTH = 8
"""bytes that say how long the header is"""
LONGEST = 100_000_000
"""bytes of a header, as for the library"""


def length_of(first: bytes) -> int:
    """Of the header, by the `LENGTH` ``first`` bytes of a file. Raises ValueError."""
    length = int.from_bytes(first, "little")
    if length > LONGEST:
        raise ValueError("its header is too long")
    return length


def entries(header: bytes) -> dict[str, Entry]:
    """What a header tells, in the file's order: `beginning` read back. Raises ValueError.

    Values must follow one another without gaps, as the library wants it.
    """
    told = json.loads(header)
    if not isinstance(told, dict):
        raise ValueError("its header is no table")
    told.pop("__metadata__", None)
    dtypes = {word: dtype for dtype, word in DTYPES.items()}
    found, end = {}, 0
    try:
        for name, entry in sorted(told.items(), key=lambda item: item[1]["data_offsets"]):
            dtype, shape = dtypes[entry["dtype"]], tuple(map(int, entry["shape"]))
            begin, last = end, end + torch.Size(shape).numel() * dtype.itemsize
            if min(shape, default=0) < 0 or list(entry["data_offsets"]) != [begin, last]:
                raise ValueError(f"{name} is not where it must be")
            found[name], end = Entry(dtype, shape, LENGTH + len(header) + begin), last
    except (KeyError, TypeError) as error:
        raise ValueError(f"its header does not make sense: {error!r}") from None
    return found


def bytes_of(values: torch.Tensor) -> memoryview:
    """Of a tensor on the CPU, contiguous: its own memory."""
    return memoryview(values.detach().reshape(-1).view(torch.uint8).numpy())


class Stream:
    """An open file, to be given ``tensors`` `in_order`."""

    def __init__(self, path: Path, tensors: Described):
        self.file = path.open("xb")
        self.file.write(beginning(tensors))

    def add(self, values: torch.Tensor) -> None:
        """The next tensor's values."""
        self.file.write(bytes_of(values.cpu().contiguous()))

    def close(self) -> None:
        """Have the file on the disk."""
        with self.file:
            self.file.flush()
            os.fsync(self.file.fileno())
