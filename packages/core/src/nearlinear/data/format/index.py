"""The `.idx` file beside a shard: Megatron's MMIDIDX version 1, one sequence per document.

Source: Megatron-LM, `megatron/core/datasets/indexed_dataset.py`.
"""

import struct

import numpy as np

from ...errors import DataError

INDEX_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, documents + 1
_MAGIC = b"MMIDIDX\x00\x00"
MOST_TOKENS = 2**31 - 1
"""of a document: lengths are int32"""
_DTYPE_CODE = {"uint16": 8, "uint32": 4}  # Megatron has no uint32: our ids fit its int32


def dtype_for(vocab_size: int) -> np.dtype:
    """The token dtype of a vocabulary: uint16 up to 65,536 entries, else uint32 (little-endian)."""
    return np.dtype("<u2") if vocab_size <= 65_536 else np.dtype("<u4")


def int32_lengths(lengths) -> np.ndarray:
    """Documents' lengths in tokens as an index has them, int32 [n]. Raises `DataError`."""
    lengths = np.asarray(lengths)
    if len(lengths) and (longest := int(lengths.max())) > MOST_TOKENS:
        raise DataError(
            f"a document has {longest} tokens, and a shard's index counts to {MOST_TOKENS}: cut "
            "such documents before"
        )
    return lengths.astype("<i4", copy=False)


def encode_index(lengths: np.ndarray, dtype: np.dtype) -> bytes:
    """The bytes of a `.idx` file whose documents have `lengths` tokens each (EOS counted).

    Layout: header, int32 lengths [n], int64 byte offsets [n], int64 document index [n + 1]. Raises
    `DataError` for a document that is too long.
    """
    lengths = int32_lengths(lengths)
    ends = np.cumsum(lengths, dtype="<i8") * dtype.itemsize
    offsets = ends - lengths.astype("<i8") * dtype.itemsize
    code, n = _DTYPE_CODE[dtype.name], len(lengths)
    header = INDEX_HEADER.pack(_MAGIC, 1, code, n, n + 1)
    return header + lengths.tobytes() + offsets.tobytes() + np.arange(n + 1, dtype="<i8").tobytes()
