"""A shard: a `.bin` of token ids with its `.idx`, and what writes documents as shards."""

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from ... import storage
from ...errors import DataError
from .checksums import Checksums
from .index import INDEX_HEADER, dtype_for, encode_index, int32_lengths

DEFAULT_SHARD_TOKENS = 64 * 1024 * 1024
SPLITS = ("train", "val")

_HEX = re.compile("[0-9a-f]{8}|[0-9a-f]{16}")


@dataclass(frozen=True)
class Shard:
    """One `.bin`/`.idx` pair; `file` is the `.bin`, relative to the dataset's folder."""

    file: str
    tokens: int
    documents: int
    bytes: int
    sha256: str
    idx_bytes: int
    idx_sha256: str
    blocks: tuple[str, ...] = ()
    """xxh3_64 of each 4 MiB of the `.bin`, the last one shorter: 16 hex digits"""
    crcs: tuple[str, ...] = ()
    """CRC-32 of the same blocks, 8 hex digits: they name the bit that flipped"""

    @classmethod
    def parse(cls, fields: dict) -> "Shard":
        """The shard of the fields of a JSON object. Raises `ValueError` among others."""
        blocks, crcs = tuple(fields["blocks"]), tuple(fields["crcs"])
        if not all(map(_HEX.fullmatch, (*blocks, *crcs))):
            raise ValueError(f"checksums of {fields['file']} are not hex digits")
        return cls(**{**fields, "blocks": blocks, "crcs": crcs})

    @property
    def idx_file(self) -> str:
        """The index beside `file`, relative to the dataset's folder."""
        return str(PurePosixPath(self.file).with_suffix(".idx"))


def read_index(folder: str | Path | storage.Place, shard: Shard, dtype: np.dtype) -> np.ndarray:
    """Document lengths in tokens, int32 [documents], EOS counted, from a shard's `.idx`.

    Raises `DataError` when the index does not describe exactly this shard.
    """
    place = storage.at(folder) / shard.idx_file
    raw = place.read()
    lengths = np.frombuffer(raw[INDEX_HEADER.size :][: 4 * shard.documents], dtype="<i4")
    if int(lengths.sum(dtype=np.int64)) != shard.tokens or raw != encode_index(lengths, dtype):
        raise DataError(
            f"{place} disagrees with {shard.file} "
            f"({shard.documents} documents, {shard.tokens} tokens): prepare the data again"
        )
    return lengths


class ShardWriter:
    """Writes the documents of one split as shards of about `shard_tokens` tokens.

    Memory stays bounded by what is added at once plus 4 bytes per document of the open shard. A
    document is never cut between shards, so a shard is larger than `shard_tokens` only when one
    document is. Call `add` or `extend`, then `close`; the shards are of use once a `Manifest`
    lists them.
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
        self.folder, self.split = Path(folder), split
        self.vocab_size, self.eos_id, self.shard_tokens = vocab_size, eos_id, shard_tokens
        self.dtype = dtype_for(vocab_size)
        self._shards: list[Shard] = []
        self._file = None
        (self.folder / split).mkdir(parents=True, exist_ok=True)

    def add(self, ids) -> None:
        """Append one document: token ids [n] without EOS, which is added here.

        Raises `DataError` for an id outside the vocabulary.
        """
        ids = np.asarray(ids, dtype=np.int64)
        if len(ids) and ids.min() < 0:
            raise DataError(f"a document holds the negative token id {int(ids.min())}")
        self.extend(np.append(ids, self.eos_id), [len(ids) + 1])

    def extend(self, tokens: np.ndarray, lengths) -> None:
        """Append documents: their token ids [sum of lengths] one after another, each with its EOS.

        Raises `DataError` for an id outside the vocabulary, and a document that is too long.
        """
        if len(tokens) and (highest := int(tokens.max())) >= self.vocab_size:
            raise DataError(
                f"a document holds token id {highest} but the vocabulary has "
                f"{self.vocab_size} entries: the tokenizer does not match its vocab_size"
            )
        tokens = np.ascontiguousarray(tokens, dtype=self.dtype)
        lengths = int32_lengths(lengths)
        while len(lengths):
            if self._file is None:
                self._start()
            ends = np.cumsum(lengths, dtype=np.int64)
            room = self.shard_tokens - self._tokens
            count = int(np.searchsorted(ends, room, side="right"))
            if not count and self._tokens:
                self._finish()
                continue
            count = max(count, 1)
            piece = tokens[: ends[count - 1]]
            self._file.write(piece)
            self._checksums.update(piece)
            self._lengths.append(lengths[:count])
            self._tokens += len(piece)
            tokens, lengths = tokens[len(piece) :], lengths[count:]

    def close(self) -> tuple[Shard, ...]:
        """Finish the open shard and return all shards of the split, in order."""
        if self._file is not None:
            self._finish()
        return tuple(self._shards)

    def _start(self) -> None:
        self._name = f"{self.split}/shard-{len(self._shards):05d}.bin"
        self._file = open(self.folder / self._name, "wb", buffering=1 << 20)
        self._checksums, self._lengths, self._tokens = Checksums(), [], 0

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
    """Have an open file on disk before it counts as written."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
