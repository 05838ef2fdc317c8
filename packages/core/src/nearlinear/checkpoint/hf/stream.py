"""A safetensors file written tensor by tensor: the header says first where each will be.

Format: https://huggingface.co/docs/safetensors (8 bytes with the header's length, the header as
JSON, the values). As long and as ordered as what the library writes, which wants all at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch

DTYPES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What they are called in the header; wider ones come first, as alignment wants it."""


def in_order(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> list[str]:
    """The names of ``tensors`` as they follow one another in a file."""
    rank = {dtype: place for place, dtype in enumerate(DTYPES)}
    return sorted(tensors, key=lambda name: (rank[tensors[name][0]], name))


class Stream:
    """An open file, to be given ``tensors`` (dtype and shape by name) `in_order`."""

    def __init__(self, path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]):
        header: dict = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in in_order(tensors):
            dtype, shape = tensors[name]
            begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
            header[name] = {"dtype": DTYPES[dtype], "shape": list(shape),
                            "data_offsets": [begin, end]}  # fmt: skip
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self.file = path.open("xb")
        self.file.write(len(text).to_bytes(8, "little") + text)

    def add(self, values: torch.Tensor) -> None:
        """The next tensor's values."""
        flat = values.detach().cpu().contiguous().view(-1)
        self.file.write(memoryview(flat.view(torch.uint8).numpy()))

    def close(self) -> None:
        """Have the file on the disk."""
        with self.file:
            self.file.flush()
            os.fsync(self.file.fileno())
