"""Shards: `.bin` files of token ids with their `.idx` files, checksums, and their writer.

The `.idx` file is Megatron's MMIDIDX version 1 index with one sequence per document. Source:
Megatron-LM, `megatron/core/datasets/indexed_dataset.py`.

A sha256 identifies a shard. xxh3_64 verifies a block of 4 MiB at many GB/s, so a reader checks only
the blocks it fetches. CRC-32 is linear, so the CRCs of a block before and after a single bit flip
identify the flipped bit.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from ... import storage
from ...errors import DataError

BLOCK_BYTES = 4 * 1024 * 1024

_ONES = 0xFFFFFFFF
_STRIDE = 2048


class Checksums:
    """Compute all checksums of a byte stream in one pass."""

    def __init__(self):
        self.blocks: list[str] = []
        """xxh3_64 of each finished block, 16 hex digits."""
        self.crcs: list[str] = []
        """CRC-32 of each finished block, 8 hex digits."""
        self._sha256, self._room = hashlib.sha256(), BLOCK_BYTES
        self._block, self._crc = xxhash.xxh3_64(), 0

    def update(self, data) -> None:
        """Append `data`, any object that supports the buffer protocol."""
        data = memoryview(data).cast("B")
        self._sha256.update(data)
        while len(data):
            piece, data = data[: self._room], data[self._room :]
            self._block.update(piece)
            self._crc = zlib.crc32(piece, self._crc)
            self._room -= len(piece)
            if not self._room:
                self._end_block()

    def finish(self) -> dict[str, Any]:
        """Return the `Shard` fields `sha256`, `blocks` and `crcs` of the whole stream."""
        if self._room < BLOCK_BYTES:
            self._end_block()
        sha256 = self._sha256.hexdigest()
        return {"sha256": sha256, "blocks": tuple(self.blocks), "crcs": tuple(self.crcs)}

    def _end_block(self) -> None:
        self.blocks.append(self._block.hexdigest())
        self.crcs.append(f"{self._crc:08x}")
        self._block, self._crc, self._room = xxhash.xxh3_64(), 0, BLOCK_BYTES


def flipped_bit(block: bytes, crc: str, xxh3: str) -> tuple[int, int] | None:
    """Locate a single flipped bit in `block`.

    A flip of bit b in byte j of n changes the CRC by Z^(n-1-j) t(b), where Z advances the register
    over a zero byte and t is the CRC table. The exponent is found by a meet in the middle: steps
    of 1 from the CRC change against steps of 2048 from the table entries, about 20,000 steps for
    4 MiB. The result is verified with the block's xxh3_64.

    Args:
        block: Bytes read from the file.
        crc: CRC-32 of the block as written, 8 hex digits.
        xxh3: xxh3_64 of the block as written, 16 hex digits.

    Returns:
        Byte offset and bit index, or None if no single flip explains the checksums.
    """
    change = zlib.crc32(block) ^ int(crc, 16)
    if not change:
        return None
    entries = [(zlib.crc32(bytes([1 << bit]), _ONES) ^ _ONES, bit) for bit in range(8)]
    met = {}
    for stride in range(len(block) // _STRIDE + 2):
        for entry, bit in entries:
            met[entry] = (stride * _STRIDE, bit)
        entries = [(_skip_zeros(entry, _STRIDE), bit) for entry, bit in entries]
    for steps in range(_STRIDE):
        if change in met:
            zeros, bit = met[change]
            byte = len(block) - 1 - (zeros - steps)
            if 0 <= byte < len(block):
                mended = bytearray(block)
                mended[byte] ^= 1 << bit
                if xxhash.xxh3_64_hexdigest(mended) == xxh3:
                    return byte, bit
        change = _skip_zeros(change, 1)
    return None


def _skip_zeros(register: int, count: int) -> int:
    """Return the CRC register after `count` more zero bytes."""
    return zlib.crc32(bytes(count), register ^ _ONES) ^ _ONES


INDEX_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, documents + 1
_MAGIC = b"MMIDIDX\x00\x00"
MOST_TOKENS = 2**31 - 1
"""Longest document in tokens. The index stores lengths as int32."""
_DTYPE_CODE = {"uint16": 8, "uint32": 4}  # Megatron has no uint32; token ids fit int32


def dtype_for(vocab_size: int) -> np.dtype:
    """Return the token dtype of a vocabulary: `<u2` up to 65,536 entries, else `<u4`."""
    return np.dtype("<u2") if vocab_size <= 65_536 else np.dtype("<u4")


def int32_lengths(lengths: npt.ArrayLike) -> np.ndarray:
    """Convert document lengths to int32 [n]. Raises `DataError` if a document is too long."""
    lengths = np.asarray(lengths)
    if len(lengths) and (longest := int(lengths.max())) > MOST_TOKENS:
        raise DataError(
            f"a document has {longest} tokens, more than the maximum of a shard index "
            f"({MOST_TOKENS}): split such documents before preparing the data"
        )
    return lengths.astype("<i4", copy=False)


def encode_index(lengths: np.ndarray, dtype: np.dtype) -> bytes:
    """Return the bytes of the `.idx` file of documents with `lengths` tokens each, including EOS.

    Layout: header, int32 lengths [n], int64 byte offsets [n], int64 document index [n + 1].

    Raises:
        DataError: If a document is too long.
    """
    lengths = int32_lengths(lengths)
    ends = np.cumsum(lengths, dtype="<i8") * dtype.itemsize
    offsets = ends - lengths.astype("<i8") * dtype.itemsize
    code, n = _DTYPE_CODE[dtype.name], len(lengths)
    header = INDEX_HEADER.pack(_MAGIC, 1, code, n, n + 1)
    return header + lengths.tobytes() + offsets.tobytes() + np.arange(n + 1, dtype="<i8").tobytes()


DEFAULT_SHARD_TOKENS = 64 * 1024 * 1024
SPLITS = ("train", "val")

_HEX = re.compile("[0-9a-f]{8}|[0-9a-f]{16}")


@dataclass(frozen=True)
class Shard:
    """A `.bin`/`.idx` pair. `file` is the `.bin` path relative to the dataset folder."""

    file: str
    tokens: int
    documents: int
    bytes: int
    sha256: str
    idx_bytes: int
    idx_sha256: str
    blocks: tuple[str, ...] = ()
    """xxh3_64 of each 4 MiB block of the `.bin`, 16 hex digits. The last block may be shorter."""
    crcs: tuple[str, ...] = ()
    """CRC-32 of the same blocks, 8 hex digits. They locate a flipped bit."""

    @classmethod
    def parse(cls, fields: dict[str, Any]) -> Shard:
        """Create a shard from a JSON object. Raises KeyError, TypeError or ValueError."""
        blocks, crcs = tuple(fields["blocks"]), tuple(fields["crcs"])
        if not all(map(_HEX.fullmatch, (*blocks, *crcs))):
            raise ValueError(f"checksums of {fields['file']} are not hex digits")
        return cls(**{**fields, "blocks": blocks, "crcs": crcs})

    @property
    def idx_file(self) -> str:
        """Path of the `.idx` file relative to the dataset folder."""
        return str(PurePosixPath(self.file).with_suffix(".idx"))


def read_index(
    folder: str | Path | storage.StoragePath, shard: Shard, dtype: np.dtype
) -> np.ndarray:
    """Read document lengths in tokens from a shard's `.idx`, int32 [documents], including EOS.

    Raises:
        DataError: If the index does not describe exactly this shard.
    """
    place = storage.as_path(folder) / shard.idx_file
    raw = place.read()
    lengths = np.frombuffer(raw[INDEX_HEADER.size :][: 4 * shard.documents], dtype="<i4")
    if int(lengths.sum(dtype=np.int64)) != shard.tokens or raw != encode_index(lengths, dtype):
        raise DataError(
            f"{place} disagrees with {shard.file} "
            f"({shard.documents} documents, {shard.tokens} tokens): prepare the data again"
        )
    return lengths


class ShardWriter:
    """Write the documents of one split as shards of about `shard_tokens` tokens.

    Memory is bounded by the documents passed to one call plus 4 bytes per document of the open
    shard. A document is never split across shards, so a shard exceeds `shard_tokens` only if a
    single document does. Call `add` or `extend`, then `close`, then list the returned shards in a
    `Manifest`.
    """

    def __init__(
        self,
        folder: str | Path,
        split: str,
        *,
        vocab_size: int,
        eos_id: int,
        shard_tokens: int = DEFAULT_SHARD_TOKENS,
    ):
        if shard_tokens < 1:
            raise DataError(f"shard_tokens is {shard_tokens}: give at least 1")
        self.folder: Path = Path(folder)
        self.split: str = split
        self.vocab_size: int = vocab_size
        self.eos_id: int = eos_id
        self.shard_tokens: int = shard_tokens
        self.dtype: np.dtype[Any] = dtype_for(vocab_size)
        self._shards: list[Shard] = []
        self._file: BinaryIO | None = None
        (self.folder / split).mkdir(parents=True, exist_ok=True)

    def add(self, ids: npt.ArrayLike) -> None:
        """Append one document: token ids [n] without EOS. The EOS is added.

        Raises:
            DataError: If an id is outside the vocabulary.
        """
        ids = np.asarray(ids, dtype=np.int64)
        if len(ids) and ids.min() < 0:
            raise DataError(f"a document holds the negative token id {int(ids.min())}")
        self.extend(np.append(ids, self.eos_id), [len(ids) + 1])

    def extend(self, tokens: np.ndarray, lengths: npt.ArrayLike) -> None:
        """Append documents: their concatenated token ids [sum of lengths], each ending with EOS.

        Raises:
            DataError: If an id is outside the vocabulary or a document is too long.
        """
        if len(tokens) and (highest := int(tokens.max())) >= self.vocab_size:
            raise DataError(
                f"a document holds token id {highest} but the vocabulary has "
                f"{self.vocab_size} entries: the tokenizer does not match its vocab_size"
            )
        tokens = np.ascontiguousarray(tokens, dtype=self.dtype)
        lengths = int32_lengths(lengths)
        while len(lengths):
            file = self._file or self._start()
            ends = np.cumsum(lengths, dtype=np.int64)
            room = self.shard_tokens - self._tokens
            count = int(np.searchsorted(ends, room, side="right"))
            if not count and self._tokens:
                self._finish()
                continue
            count = max(count, 1)
            piece = tokens[: ends[count - 1]]
            file.write(piece.data)
            self._checksums.update(piece)
            self._lengths.append(lengths[:count])
            self._tokens += len(piece)
            tokens, lengths = tokens[len(piece) :], lengths[count:]

    def close(self) -> tuple[Shard, ...]:
        """Finish the open shard and return all shards of the split, in order."""
        if self._file is not None:
            self._finish()
        return tuple(self._shards)

    def _start(self) -> BinaryIO:
        self._name = f"{self.split}/shard-{len(self._shards):05d}.bin"
        self._file = open(self.folder / self._name, "wb", buffering=1 << 20)
        self._checksums, self._lengths, self._tokens = Checksums(), [], 0
        return self._file

    def _finish(self) -> None:
        sync_and_close(self._file)
        self._file = None
        lengths = np.concatenate(self._lengths)
        index = encode_index(lengths, self.dtype)
        shard = Shard(
            file=self._name,
            tokens=self._tokens,
            documents=len(lengths),
            bytes=self._tokens * self.dtype.itemsize,
            idx_bytes=len(index),
            idx_sha256=hashlib.sha256(index).hexdigest(),
            **self._checksums.finish(),
        )
        with open(self.folder / shard.idx_file, "wb") as file:
            file.write(index)
            sync_and_close(file)
        self._shards.append(shard)


def sync_and_close(file) -> None:
    """Flush a file to disk and close it."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
