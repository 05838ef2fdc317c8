"""Fixed-length windows over a split's token stream, read from memory-mapped shards.

The sequence length belongs to the reader, not to the files: window i is tokens [i*L, (i+1)*L) of
the documents laid end to end, so nothing is padded and at most L - 1 tokens of a split are unused.
Source: packing as in GPT-2 and GPT-3 training. Documents in one window attend to each other.
"""

import logging
import threading
from pathlib import Path

import numpy as np

from ..errors import DataError
from .format import Manifest, read_index, verify
from .reads import Reads

logger = logging.getLogger("nearlinear.data")

_FULL_CHECK_BYTES = 2 * 1024**3
_verified: set[tuple] = set()
_verify_lock = threading.Lock()


class TokenDataset:
    """The windows of `sequence_length` tokens of one split of a folder of token shards.

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
    ):
        if verify not in ("auto", "full", "size"):
            raise DataError(f"verify is {verify!r}: use 'auto', 'full' or 'size'")
        if sequence_length < 1:
            raise DataError(f"sequence_length is {sequence_length}: give at least 1")
        self.path, self.split, self.sequence_length = Path(path), split, sequence_length
        self.manifest = Manifest.read(path)
        self.tokens = self._check_split()
        _verify_once(self.path, self.manifest, split, verify)
        self._shards = self.manifest.splits[split]
        self.reads: Reads | None = None
        self._maps = [_map(path, self.manifest.dtype) for path in self.files]
        counts = np.array([p.tokens for p in self._shards], dtype=np.int64)
        self._ends = np.cumsum(counts)
        self._starts = self._ends - counts
        # Windows that lie wholly inside one shard are rows of a 2D view of it.
        self._first_row = -(-self._starts // sequence_length)
        self._rows = [
            _rows(tokens, int(first * sequence_length - start), sequence_length)
            for tokens, first, start in zip(self._maps, self._first_row, self._starts, strict=True)
        ]

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
        if tokens < length:
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
    def files(self) -> list[Path]:
        """The shards' token files, in stream order."""
        return [self.path / shard.file for shard in self._shards]

    @property
    def shard_bytes(self) -> list[int]:
        """Bytes of each of `files`."""
        return [shard.bytes for shard in self._shards]

    def __len__(self) -> int:
        """The number of whole windows."""
        return self.tokens // self.sequence_length

    def __getitem__(self, index: int) -> np.ndarray:
        """Window `index` as int64 [L]; negative indices count from the end."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        return self.windows([index % len(self)])[0]

    def windows(self, indices) -> np.ndarray:
        """The windows `indices` [N] as int64 [N, L], in the order asked for."""
        indices = np.asarray(indices, dtype=np.int64)
        if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < len(self):
            raise IndexError(f"windows {indices.min()}..{indices.max()} of {len(self)}")
        if self.reads is not None:
            self.reads.faults(self.extents(indices))
        length = self.sequence_length
        out = np.empty((len(indices), length), dtype=np.int64)
        shard_of = np.searchsorted(self._ends, indices * length, side="right")
        inside = (indices + 1) * length <= self._ends[shard_of]
        for shard in np.unique(shard_of[inside]):
            chosen = np.flatnonzero(inside & (shard_of == shard))
            out[chosen] = self._rows[shard][indices[chosen] - self._first_row[shard]]
        for row in np.flatnonzero(~inside):
            self._read_across(int(indices[row]) * length, out[row])
        return out

    def count_reads(self, **options) -> Reads:
        """From now on count what reading asks of the file system; the counters, see `Reads`."""
        self.reads = Reads(self.shard_bytes, **options)
        return self.reads

    def extents(self, first, end=None) -> np.ndarray:
        """Where windows [first, end) lie: int64 [pieces, 3] of shard, first byte, end in its file.

        Arrays of equal length; without `end` single windows. Where the stream goes on in the next
        shard there are two pieces, or more.
        """
        size, first = self.manifest.dtype.itemsize, np.asarray(first, dtype=np.int64).reshape(-1)
        begin = first * self.sequence_length
        end = (first + 1 if end is None else end) * self.sequence_length
        shard = np.searchsorted(self._ends, begin, side="right")
        pieces = [np.empty((0, 3), dtype=np.int64)]
        while begin.size:
            stop = np.minimum(end, self._ends[shard])
            offset = self._starts[shard]
            pieces.append(np.stack([shard, (begin - offset) * size, (stop - offset) * size], 1))
            rest = stop < end
            begin, end, shard = stop[rest], end[rest], shard[rest] + 1
        return np.concatenate(pieces)

    def block_starts(self, block_bytes: int) -> np.ndarray:
        """The first window that begins in each aligned block of the files, int64 [blocks]."""
        step = max(1, block_bytes // self.manifest.dtype.itemsize)
        firsts = [
            start + np.arange(0, end - start, step)
            for start, end in zip(self._starts, self._ends, strict=True)
        ]
        starts = np.unique(-(-np.concatenate(firsts) // self.sequence_length))
        return starts[starts < len(self)]

    def document_lengths(self) -> np.ndarray:
        """Tokens per document of the split in stream order, int64 [documents], EOS counted."""
        lengths = [read_index(self.path, p, self.manifest.dtype) for p in self._shards]
        return np.concatenate(lengths).astype(np.int64)

    def _read_across(self, position: int, out: np.ndarray) -> None:
        """Fill `out` with the stream's tokens from `position`, from as many shards as it takes."""
        filled = 0
        while filled < len(out):
            shard = int(np.searchsorted(self._ends, position, side="right"))
            start = position - int(self._starts[shard])
            piece = self._maps[shard][start : start + len(out) - filled]
            out[filled : filled + len(piece)] = piece
            filled, position = filled + len(piece), position + len(piece)

    def __reduce__(self):
        # Reopen instead of pickling mapped memory; the files were checked when first opened.
        return _open, (self.path, self.split, self.sequence_length)


def _open(path: Path, split: str, sequence_length: int) -> TokenDataset:
    return TokenDataset(path, split, sequence_length=sequence_length, verify="size")


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))


def _rows(tokens: np.ndarray, offset: int, length: int) -> np.ndarray:
    """The whole windows inside one shard as a view [windows, length]."""
    count = max(0, len(tokens) - offset) // length
    return tokens[offset : offset + count * length].reshape(count, length)


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
