"""Sequences of a fixed length from a split's token stream, read from memory-mapped shards.

The sequence length belongs to the reader, not to the files. By default window i is tokens
[i*L, (i+1)*L) of the documents laid end to end, so nothing is padded and at most L - 1 tokens of a
split are unused; `packing` has the other ways. Source: packing as in GPT-2 and GPT-3 training.
Documents in one window attend to each other, unless a `Loader` is told to mask them.
"""

import functools
import logging
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import DataError
from .cache import cache_folder
from .documents import DocumentIndex
from .format import Manifest, verify
from .packing import PACKINGS, Packing
from .plan import plan
from .reads import Reads
from .stream import MOST_OPEN, Stream

logger = logging.getLogger("nearlinear.data")

_FULL_CHECK_BYTES = 2 * 1024**3
_verified: set[tuple] = set()
_verify_lock = threading.Lock()


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
    `verify`: "auto" checks every sha256 when the split is at most 2 GiB and sizes otherwise,
    "full" always checks every sha256, "size" only sizes. A dataset already checked by this
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
    ):
        if verify not in ("auto", "full", "size"):
            raise DataError(f"verify is {verify!r}: use 'auto', 'full' or 'size'")
        if packing not in PACKINGS:
            raise DataError(f"packing is {packing!r}: use {', '.join(map(repr, PACKINGS))}")
        if sequence_length < 1:
            raise DataError(f"sequence_length is {sequence_length}: give at least 1")
        self.path, self.split, self.sequence_length = Path(path), split, sequence_length
        self.packing, self.cache = packing, cache
        self.manifest = Manifest.read(path)
        self.tokens = self._check_split()
        _verify_once(self.path, self.manifest, split, verify)
        self._shards = self.manifest.splits[split]
        self.reads: Reads | None = None
        self.files = [self.path / shard.file for shard in self._shards]
        """the shards' token files, in stream order"""
        counts = [shard.tokens for shard in self._shards]
        # Partial functions, not methods: who drops a dataset drops its maps at once.
        self._stream = Stream(counts, functools.partial(_map, self.files, self.manifest.dtype))
        self._index = functools.partial(_index, self.files, counts)
        self._documents = functools.lru_cache(MOST_OPEN)(self._index)
        self._plan = None
        if packing != "concat":
            lengths = (self._index(shard).lengths() for shard in range(len(self._shards)))
            self._plan = plan(
                cache_folder(cache), self.fingerprint, sequence_length, packing, lengths
            )
            if not len(self._plan):
                raise DataError(
                    f"split {split!r} of {self.path} has no document of two tokens: prepare more "
                    "text"
                )

    def _check_split(self) -> int:
        splits, length = self.manifest.splits, self.sequence_length
        if self.split not in splits:
            raise DataError(
                f"{self.path} has no split {self.split!r}: it has {', '.join(sorted(splits))}"
            )
        tokens = self.manifest.total("tokens", self.split)
        if not tokens:
            raise DataError(
                f"split {self.split!r} of {self.path} is empty: prepare the data again with more "
                "text or a larger --val-fraction"
            )
        if tokens < length and self.packing == "concat":
            raise DataError(
                f"split {self.split!r} of {self.path} holds {tokens} tokens, fewer than one window "
                f"of {length}: use a sequence_length of at most {tokens}, or prepare more text"
            )
        return tokens

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
        return [shard.bytes for shard in self._shards]

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
        if self.reads is not None:
            self.reads.faults(self._bytes(pieces))
        tokens, filled = np.empty(shape, dtype=np.int64), None
        if self._plan is not None:
            sizes = pieces[:, 3] - pieces[:, 2]
            filled = np.bincount(pieces[:, 0], sizes, minlength=len(indices)).astype(np.int64)
            for row in np.flatnonzero(filled < self.sequence_length).tolist():
                tokens[row, filled[row] :] = self.manifest.eos_id
        self._stream.read(pieces, tokens)
        return Rows(tokens, filled, self._begins(pieces, filled) if documents else None)

    def _begins(self, pieces: np.ndarray, filled: np.ndarray | None) -> np.ndarray:
        """As `Rows.begins`, of windows that consist of `pieces` and are `filled` so far."""
        length, begins = self.sequence_length, []
        if filled is None:
            # A piece begins a row, or is the first of a shard and so of a document.
            column = [0] * len(pieces)
            for row, shard, start, stop in pieces.tolist():
                place = row * length + column[row]
                begins.append(place)
                inside = self._documents(shard).inside(start, stop)
                begins += [place + begin - start for begin in inside]
                column[row] += stop - start
            return np.sort(np.array(begins, dtype=np.int64))
        sizes = pieces[:, 3] - pieces[:, 2]
        row, ends = pieces[:, 0], np.cumsum(sizes)
        before = np.cumsum(filled) - filled
        short = np.flatnonzero(filled < length)
        begins = row * length + ends - sizes - before[row]
        return np.sort(np.concatenate([begins, short * length + filled[short]]))

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
        if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < len(self):
            raise IndexError(f"windows {indices.min()}..{indices.max()} of {len(self)}")
        length = self.sequence_length
        if self._plan is None:
            return self._stream.pieces(indices * length, (indices + 1) * length)
        parts = self._plan.of(indices)
        found = self._stream.pieces(parts[:, 1], parts[:, 1] + parts[:, 2])
        found[:, 0] = parts[found[:, 0], 0]
        return found

    def _bytes(self, pieces: np.ndarray) -> np.ndarray:
        """File, first byte and end of pieces of files."""
        return pieces[:, 1:] * np.array([1, *2 * [self.manifest.dtype.itemsize]])

    def block_starts(self, block_bytes: int) -> np.ndarray:
        """The first window that begins in each aligned block of the files, int64 [blocks]."""
        step = max(1, block_bytes // self.manifest.dtype.itemsize)
        firsts = [
            start + np.arange(0, end - start, step)
            for start, end in zip(self._stream.starts, self._stream.ends, strict=True)
        ]
        starts = np.unique(-(-np.concatenate(firsts) // self.sequence_length))
        return starts[starts < len(self)]

    def document_lengths(self) -> np.ndarray:
        """Tokens per document of the split in stream order, int64 [documents], EOS counted."""
        return np.concatenate([self._index(shard).lengths() for shard in range(len(self._shards))])

    def __reduce__(self):
        # Reopen instead of pickling mapped memory; the files were checked when first opened.
        return _open, (self.path, self.split, self.sequence_length, self.packing, self.cache)


def _map(files: list[Path], dtype: np.dtype, shard: int) -> np.ndarray:
    return np.asarray(np.memmap(files[shard], dtype=dtype, mode="r"))


def _index(files: list[Path], counts: list[int], shard: int) -> DocumentIndex:
    return DocumentIndex(files[shard].with_suffix(".idx"), counts[shard])


def _open(path: Path, split: str, sequence_length: int, packing: str, cache) -> TokenDataset:
    return TokenDataset(
        path,
        split,
        sequence_length=sequence_length,
        verify="size",
        packing=packing,
        cache=cache,
    )


def _verify_once(path: Path, manifest: Manifest, split: str, mode: str) -> None:
    """Check a split's files unless this process already checked the same unchanged files."""
    size = manifest.total("bytes", split)
    full = mode == "full" or (mode == "auto" and size <= _FULL_CHECK_BYTES)
    with _verify_lock:
        files = [name for p in manifest.splits[split] for name in (p.file, p.idx_file)]
        stats = [(path / name).stat() for name in files if (path / name).is_file()]
        changed = tuple((s.st_size, s.st_mtime_ns) for s in stats)
        key = (path.resolve(), manifest.fingerprint, split, changed)
        if (*key, True) in _verified or (*key, full) in _verified:
            return
        if mode == "auto" and not full:
            logger.info(
                "%s: checked sizes only, %.1f GiB is over 2 GiB; "
                "`python -m data_prep verify %s` checks every byte",
                path, size / 1024**3, path,
            )  # fmt: skip
        verify(path, full=full, splits=(split,))
        _verified.add((*key, full))
