"""Sequences of a fixed length from a split's token stream, read from memory-mapped shards.

The sequence length belongs to the reader, not to the files. By default window i is tokens
[i*L, (i+1)*L) of the documents laid end to end, so nothing is padded and at most L - 1 tokens of a
split are unused; `packing` has the other ways. Source: packing as in GPT-2 and GPT-3 training.
Documents in one window attend to each other, unless a `Loader` is told to mask them.
"""

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import DataError
from .cache import cache_folder
from .opening import open_split
from .packing import PACKINGS, Packing
from .plan import Plan
from .reads import Reads
from .stream import MOST_OPEN, Stream


@dataclass(frozen=True)
class Rows:
    """Windows that were read."""

    tokens: np.ndarray
    """int64 [N, L]"""
    filled: np.ndarray | None
    """how many of each row are tokens of documents, int64 [N], the places after being EOS; None:
    all are"""
    begins: np.ndarray | None
    """where documents begin in the rows laid end to end, int64, ascending: every row's first place
    is one, whether a document begins there or goes on, and so is its first after `filled`; None:
    not asked for"""


class TokenDataset:
    """The windows of `sequence_length` tokens of one split of a folder of token shards.

    `packing`: "concat", "best_fit" or "one_document", see `packing`; the last two end a window with
    EOS where their documents do not fill it, and keep a plan in `cache` (default: ~/.cache).
    `path` is a folder of token shards, here or in a bucket (s3://bucket/prefix), a channel of a
    SageMaker job (channel:name), or what Megatron and nanoGPT prepare, see `opening`; the last two
    do not say what `vocab_size` and `eos_id` are (default: GPT-2's). Of a bucket, what is read is
    kept in `cache`, `cache_gib` at most (0: all).
    `verify`: "auto" checks every block's xxh3 when the split is at most 2 GiB and sizes otherwise,
    "full" always checks every block, "size" only sizes. A dataset already checked by this
    process is not read again, so ranks run as threads share one check. Raises `DataError` when
    the folder is missing, damaged or not token shards, or the split is shorter than one window.
    """

    def __init__(
        self,
        path: str | Path,
        split: str = "train",
        *,
        sequence_length: int,
        verify: str = "auto",
        packing: Packing = "concat",
        cache: str | Path | None = None,
        cache_gib: float = 0,
        vocab_size: int = 0,
        eos_id: int = -1,
    ):
        if verify not in ("auto", "full", "size"):
            raise DataError(f"verify is {verify!r}: use 'auto', 'full' or 'size'")
        if packing not in PACKINGS:
            raise DataError(f"packing is {packing!r}: use {', '.join(map(repr, PACKINGS))}")
        if sequence_length < 1:
            raise DataError(f"sequence_length is {sequence_length}: give at least 1")
        options = {"cache": cache, "cache_gib": cache_gib, "vocab_size": vocab_size,
                   "eos_id": eos_id}  # fmt: skip
        self.source = open_split(path, split, verify, **options)
        self.path, self.split, self.manifest = self.source.path, split, self.source.manifest
        self.sequence_length, self.packing = sequence_length, packing
        self.tokens = self.manifest.total("tokens", split)
        self.files = self.source.files
        """the shards' token files, in stream order"""
        self._options = options | {"packing": packing}
        self.reads: Reads | None = None
        self._stream = Stream([shard.tokens for shard in self.source.shards], self.source.tokens)
        self._documents = functools.lru_cache(MOST_OPEN)(self.source.documents)
        self._plan = self._planned(cache) if packing != "concat" else None
        if not len(self):
            raise DataError(
                f"split {split!r} of {self.path} holds {self.tokens} tokens, fewer than one window "
                f"of {sequence_length}: use a sequence_length of at most {self.tokens}, or prepare "
                "more text"
                if packing == "concat"
                else f"split {split!r} of {self.path} has no document of two tokens: prepare more "
                "text"
            )

    def _planned(self, cache: str | Path | None) -> Plan:
        identity = self.fingerprint, self.sequence_length, self.packing
        return Plan(cache_folder(cache), *identity, self._documents, len(self.files))

    def __repr__(self) -> str:
        windows = f"{len(self):,} windows of {self.sequence_length}"
        return f"{self.path} ({self.split}): {self.tokens:,} tokens, {windows}"

    @property
    def fingerprint(self) -> str:
        """Identity of the tokens of this split: 64 hex digits, plus the split's name."""
        return f"{self.manifest.fingerprint}/{self.split}"

    @property
    def shard_bytes(self) -> list[int]:
        """Bytes of each of `files`."""
        return [shard.bytes for shard in self.source.shards]

    def __len__(self) -> int:
        """The number of windows."""
        return self.tokens // self.sequence_length if self._plan is None else len(self._plan)

    def __getitem__(self, index: int) -> np.ndarray:
        """Window `index` as int64 [L]; negative indices count from the end."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        return self.windows([index % len(self)])[0]

    def windows(self, indices) -> np.ndarray:
        """The windows `indices` [N] as int64 [N, L], in the order asked for."""
        return self.rows(indices).tokens

    def rows(self, indices, documents: bool = False) -> Rows:
        """The windows `indices` [N], in the order asked for; `documents`: and where those begin."""
        pieces, shape = self._pieces(indices), (len(indices), self.sequence_length)
        extents = self._bytes(pieces)
        self.source.bring(extents)
        if self.reads is not None:
            self.reads.faults(extents)
        tokens = np.empty(shape, dtype=np.int64)
        begins, filled = self._stream.read(pieces, tokens)
        if self._plan is None:
            if documents:
                begins = self._begins(pieces, begins)
            return Rows(tokens, None, begins if documents else None)
        for row, count in enumerate(filled):
            if count < self.sequence_length:
                tokens[row, count:] = self.manifest.eos_id
                begins.append(row * self.sequence_length + count)
        return Rows(tokens, np.array(filled), np.array(sorted(begins)) if documents else None)

    def _begins(self, pieces: np.ndarray, places: list[int]) -> np.ndarray:
        """As `Rows.begins`, of windows that consist of `pieces` at `places`."""
        begins = list(places)  # a piece begins a row, or a shard and with it a document
        for (_, shard, start, stop), place in zip(pieces.tolist(), places, strict=True):
            begins += [
                place + begin - start for begin in self._documents(shard).inside(start, stop)
            ]
        return np.array(sorted(begins))

    def tokenizer(self) -> Path:
        """The file of the tokenizer whose ids these are. Raises `DataError` if that is not told."""
        return self.source.tokenizer()

    def bring(self, extents: np.ndarray) -> np.ndarray:
        """As `Split.bring`."""
        return self.source.bring(extents)

    def count_reads(self, **options) -> Reads:
        """From now on count what reading asks of the file system; the counters, see `Reads`."""
        self.reads = Reads(self.shard_bytes, **options)
        return self.reads

    def extents(self, first, end=None) -> np.ndarray:
        """Where windows [first, end) lie: int64 [pieces, 3] of shard, first byte, end in its file.

        Arrays of equal length; without `end` single windows. Where the stream goes on in the next
        shard there are two pieces, or more.
        """
        first = np.asarray(first, dtype=np.int64).reshape(-1)
        end = first + 1 if end is None else end
        if self._plan is None:
            length = self.sequence_length
            return self._bytes(self._stream.pieces(first * length, end * length))
        ranges = [np.arange(*pair) for pair in zip(first, end, strict=True)]
        return self._bytes(self._pieces(np.concatenate(ranges) if ranges else first))

    def _pieces(self, indices) -> np.ndarray:
        """As `Stream.pieces`, of the windows `indices`. Raises IndexError."""
        indices = np.asarray(indices, dtype=np.int64)
        # As unsigned numbers, negative ones are beyond the end, too.
        if indices.size and int(indices.view(np.uint64).max()) >= len(self):
            raise IndexError(f"windows {indices.min()}..{indices.max()} of {len(self)}")
        if self._plan is not None:
            return self._plan.pieces(indices)
        length = self.sequence_length
        return self._stream.pieces(indices * length, (indices + 1) * length)

    def _bytes(self, pieces: np.ndarray) -> np.ndarray:
        """File, first byte and end of pieces of files."""
        return pieces[:, 1:] * np.array([1, *2 * [self.source.dtype.itemsize]])

    def block_starts(self, block_bytes: int) -> np.ndarray:
        """The first window that begins in each aligned block of the files, int64 [blocks]."""
        step = max(1, block_bytes // self.source.dtype.itemsize)
        firsts = [
            start + np.arange(0, end - start, step)
            for start, end in zip(self._stream.starts, self._stream.ends, strict=True)
        ]
        starts = np.unique(-(-np.concatenate(firsts) // self.sequence_length))
        return starts[starts < len(self)]

    def document_lengths(self) -> np.ndarray:
        """Tokens per document of the split in stream order, int64 [documents], EOS counted."""
        return np.concatenate([self.source.documents(n).lengths() for n in range(len(self.files))])

    def __reduce__(self):
        # Reopen instead of pickling mapped memory; the files were checked when first opened.
        return _open, (self.path, self.split, self.sequence_length, self._options)


def _open(path: Path | str, split: str, sequence_length: int, options: dict) -> TokenDataset:
    return TokenDataset(path, split, sequence_length=sequence_length, verify="size", **options)
