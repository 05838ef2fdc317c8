"""Windows of fixed length from the token stream of a split, read from memory-mapped shards.

The sequence length belongs to the reader, not to the files. By default, window i holds tokens
[i*L, (i+1)*L) of the concatenated documents, as in GPT-2 and GPT-3 training: no padding, at most
L - 1 unused tokens per split. `packing` describes the alternatives. Documents in one window attend
to each other unless the `Loader` masks them.

`ReadCounters` counts the requests that a Lustre client would send for these reads. A page fault
that misses the page cache fetches the aligned unit of 1 MiB around it. An explicit read fetches the
requested pages. An RPC carries at most one unit. The most recently fetched bytes stay in memory.
Sources: the Lustre manual on client read-ahead, and LUDOC-485 on read-ahead of mapped files.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..config.train import Packing
from ..errors import DataError
from .cache import cache_folder
from .format import Manifest
from .open import open_split
from .packing import PACKINGS, PackingPlan
from .source import MOST_OPEN, NoSplit, Piece, ShardSource, TokenStream

log = logging.getLogger(__name__)

PAGE = 4096
UNIT = 2**20
_NEVER = -(2**62)


@dataclass
class ReadCounters:
    """Counters of file system requests since construction or the last `clear`."""

    sizes: list[int]
    """Size of each file in bytes."""
    unit: int = UNIT
    """Bytes fetched by a page fault, and maximum bytes of an RPC."""
    memory: int = 1024 * UNIT
    """Size of the page cache in bytes."""
    used: int = 0
    """Bytes of the windows returned."""
    requests: int = 0
    """Contiguous ranges requested from the file system."""
    rpcs: int = 0
    """RPCs that carry the requests."""
    fetched: int = 0
    """Bytes fetched by the requests."""
    seeks: int = 0
    """Requests that do not start at the end of the previous one."""
    _brought: list[np.ndarray] = field(default_factory=list, repr=False)
    _volume: int = 0
    _head: tuple[int, int] = (-1, -1)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        self._brought = [np.full(-(-size // PAGE), _NEVER) for size in self.sizes]

    @property
    def amplification(self) -> float:
        """Bytes fetched per byte used; at least 1 unless windows are used repeatedly."""
        return self.fetched / self.used if self.used else 0.0

    @property
    def bytes_per_rpc(self) -> float:
        """Mean bytes per RPC."""
        return self.fetched / self.rpcs if self.rpcs else 0.0

    @property
    def bytes_per_seek(self) -> float:
        """Mean bytes read sequentially between seeks."""
        return self.fetched / self.seeks if self.seeks else 0.0

    def clear(self) -> None:
        """Reset the counters. The modeled page cache keeps its contents."""
        self.used = self.requests = self.rpcs = self.fetched = self.seeks = 0

    def faults(self, extents: np.ndarray) -> None:
        """Count reads through memory maps: `extents` int64 [pieces, 3] of file, start, end."""
        with self._lock:
            self.used += int((extents[:, 2] - extents[:, 1]).sum())
            for file, start, end in extents.tolist():
                self._fetch(file, start, end, self.unit)

    def explicit(self, extents: np.ndarray) -> None:
        """Count explicit reads of `extents`, int64 [pieces, 3] of file, start, end."""
        with self._lock:
            for file, start, end in extents.tolist():
                self._fetch(file, start, end, PAGE)

    def _fetch(self, file: int, start: int, end: int, step: int) -> None:
        """Fetch the multiples of `step` around [start, end) unless all its pages are in memory."""
        held = self._brought[file] > self._volume - self.memory
        if held[start // PAGE : -(-end // PAGE)].all():
            return
        first = start // step * step
        last = min(-(-end // step) * step, self.sizes[file])
        pages = slice(first // PAGE, -(-last // PAGE))
        bytes_ = min(int((~held[pages]).sum()) * PAGE, last - first)
        self.requests += 1
        self.rpcs += -(-last // self.unit) - first // self.unit
        self.seeks += (file, first) != self._head
        self.fetched += bytes_
        self._volume += bytes_
        self._brought[file][pages] = self._volume
        self._head = (file, last)


@dataclass(frozen=True)
class WindowRows:
    """Tokens of several windows."""

    tokens: np.ndarray
    """int64 [N, L]."""
    filled: np.ndarray | None
    """Number of document tokens in each row, int64 [N]. Later positions are EOS padding. None if no
    row has padding."""
    begins: np.ndarray | None
    """Positions in the flattened rows at which documents begin, int64, ascending. Include the first
    position of each row, also if a document continues there, and its first padding position. None
    if not requested."""
    ignored: np.ndarray | None = None
    """True for tokens that are no targets, bool [N, L]. None if all tokens are."""


class TokenDataset:
    """Windows of `sequence_length` tokens of one split of a dataset.

    Args:
        path: Folder of token shards, `s3://bucket/prefix`, `channel:name` for an input channel of a
            SageMaker job, or token files of other projects, see `open.open_split`.
        split: Name of the split.
        sequence_length: Tokens per window.
        verify: "full" checks the xxh3 of every block, "size" checks file sizes, and "auto" checks
            every block of splits up to 2 GiB and sizes of larger ones. Each process checks a
            dataset once, so ranks run as threads share one check.
        packing: "concat", "best_fit" or "one_document", see `packing`. The last two pad windows
            with EOS and store a packing plan in `cache`.
        cache: Cache folder for packing plans and remote shards; defaults to ~/.cache/nearlinear.
        cache_gib: Size limit of cached remote shards in GiB, or 0 for no limit.
        vocab_size: Vocabulary size of files of other projects; 0 means GPT-2's.
        eos_id: EOS id of files of other projects; -1 means the last id.
        skip_long_pairs: Leave out pairs of conversations longer than a window, with a warning;
            otherwise they are an error.

    Raises:
        DataError: If the data is missing, damaged or of another format, or if the split is shorter
            than one window.
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
        skip_long_pairs: bool = False,
    ):
        if verify not in ("auto", "full", "size"):
            raise DataError(f"verify is {verify!r}: use 'auto', 'full' or 'size'")
        if packing not in PACKINGS:
            raise DataError(f"packing is {packing!r}: use {', '.join(map(repr, PACKINGS))}")
        if sequence_length < 1:
            raise DataError(f"sequence_length is {sequence_length}: give at least 1")
        options = {"cache": cache, "cache_gib": cache_gib, "vocab_size": vocab_size,
                   "eos_id": eos_id}  # fmt: skip
        self.source: ShardSource = open_split(path, split, verify, **options)
        self.path: Path | str = self.source.path
        self.split: str = split
        self.manifest: Manifest = self.source.manifest
        self.marks_targets: bool = self.manifest.marks_targets
        """True if the data are conversations, of which only some tokens are targets."""
        self.pairs: bool = self.manifest.pairs
        """True if each document is a pair of conversations, which count as two documents."""
        self.sequence_length: int = sequence_length
        self.packing: str = packing
        self.tokens: int = self.manifest.total("tokens", split)
        self.files: Sequence[Path | str] = self.source.files
        """Token files of the shards in stream order."""
        self.skips_long: bool = False
        """True if documents longer than a window are left out."""
        self._options = options | {"packing": packing, "skip_long_pairs": skip_long_pairs}
        self.reads: ReadCounters | None = None
        self._byte_scale = np.array([1, *2 * [self.source.dtype.itemsize]])
        self._stream = TokenStream(
            [shard.tokens for shard in self.source.shards], self.source.tokens
        )
        self._documents = functools.lru_cache(MOST_OPEN)(self.source.documents)
        if self.pairs:
            self._check_pairs(skip_long_pairs)
        self._plan = self._planned(cache) if packing != "concat" else None
        if not len(self):
            raise NoSplit(
                f"split {split!r} of {self.path} holds {self.tokens} tokens, fewer than one window "
                f"of {sequence_length}: use a sequence_length of at most {self.tokens}, or prepare "
                "more text"
                if packing == "concat"
                else f"split {split!r} of {self.path} has no document of two tokens: prepare more "
                "text"
            )

    def _check_pairs(self, skip_long: bool) -> None:
        """Leave out pairs that would be cut, or raise DataError."""
        if self.packing == "concat":
            raise DataError(
                f'{self.path} holds pairs, which packing = "concat" would cut: use "best_fit" or '
                '"one_document"'
            )
        lengths = self.document_lengths()
        if too_long := int((lengths > self.sequence_length).sum()):
            self.skips_long = True
            found = (
                f"{too_long} of {len(lengths)} pairs of {self.path} ({self.split}) are longer than "
                f"a sequence of {self.sequence_length} tokens"
            )
            if not skip_long or too_long == len(lengths):
                raise DataError(
                    f"{found}: use a sequence_length of at least {lengths.max()}, or leave them "
                    "out with preference.skip_long = true (skip_long_pairs=True)"
                )
            log.warning("%s, and are left out", found)

    def _planned(self, cache: str | Path | None) -> PackingPlan:
        identity = self.fingerprint, self.sequence_length, self.packing
        shards = self._documents, len(self.files)
        return PackingPlan(cache_folder(cache), *identity, *shards, self.skips_long)

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
        """Number of windows."""
        return self.tokens // self.sequence_length if self._plan is None else len(self._plan)

    def __getitem__(self, index: int) -> np.ndarray:
        """Return window `index`, int64 [L]. Negative indices count from the end."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        return self.windows([index % len(self)])[0]

    def windows(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the windows `indices` [N] in the given order, int64 [N, L]."""
        return self.rows(indices).tokens

    def rows(self, indices: Sequence[int] | np.ndarray, documents: bool = False) -> WindowRows:
        """Return the windows `indices` [N] in order, with document starts if `documents`."""
        pieces, shape = list(self._pieces(indices)), (len(indices), self.sequence_length)
        if self.source.downloads:
            self.source.prefetch(self._bytes(pieces))
        if self.reads is not None:
            self.reads.faults(self._bytes(pieces))
        tokens = np.empty(shape, dtype=np.int64)
        starts, filled = self._stream.read(pieces, tokens)
        ignored = None
        if self.marks_targets:
            for row, count in enumerate(filled):
                tokens[row, count:] = self.manifest.eos_id  # uninitialized memory until here
            ignored = tokens >= self.manifest.vocab_size
            tokens -= ignored * self.manifest.vocab_size
        if self.pairs:  # the first token of each rejected conversation has a second mark
            rejected = tokens >= self.manifest.vocab_size
            tokens -= rejected * self.manifest.vocab_size
            starts += np.flatnonzero(rejected).tolist()
        if self._plan is None:
            begins = self._begins(pieces, starts) if documents else None
            return WindowRows(tokens, None, begins, ignored)
        for row, count in enumerate(filled):
            if count < self.sequence_length:
                tokens[row, count:] = self.manifest.eos_id
                starts.append(row * self.sequence_length + count)
        begins = np.array(sorted(starts)) if documents else None
        return WindowRows(tokens, np.array(filled), begins, ignored)

    def _begins(self, pieces: list[Piece], places: list[int]) -> np.ndarray:
        """Return the document starts of windows made of `pieces` at `places`, as in `begins`."""
        begins = []
        for (_, shard, start, stop), place in zip(pieces, places, strict=True):
            begins.append(place)  # the first of a row, or of a shard and thus of a document
            for begin in self._documents(shard).inside(start, stop):
                begins.append(place + begin - start)
        return np.array(begins)

    def tokenizer(self) -> Path:
        """Return the path of the tokenizer file. Raises `DataError` if it is unknown."""
        return self.source.tokenizer()

    def prefetch(self, extents: np.ndarray) -> np.ndarray:
        """Download byte ranges of the files to this node, see `ShardSource.prefetch`."""
        return self.source.prefetch(extents)

    def count_reads(self, **options: Any) -> ReadCounters:
        """Start counting file system requests. Returns the counters, see `ReadCounters`."""
        self.reads = ReadCounters(self.shard_bytes, **options)
        return self.reads

    def extents(self, first: ArrayLike, end: np.ndarray | None = None) -> np.ndarray:
        """Return byte ranges of windows [first, end): int64 [pieces, 3] of shard, first byte, end.

        `first` and `end` are arrays of equal length. Without `end`, each range is a single window.
        Ranges are split at shard boundaries.
        """
        first = np.asarray(first, dtype=np.int64).reshape(-1)
        end = first + 1 if end is None else end
        if self._plan is None:
            length = self.sequence_length
            pairs = np.stack([first, end], axis=1) * length
            return self._bytes(self._stream.pieces(pairs.tolist()))
        ranges = [np.arange(*pair) for pair in zip(first, end, strict=True)]
        return self._bytes(self._pieces(np.concatenate(ranges) if ranges else first))

    def _pieces(self, indices: Sequence[int] | np.ndarray) -> Iterator[Piece]:
        """Locate the windows `indices`, one row each. Raises IndexError."""
        numbers = np.asarray(indices, dtype=np.int64).tolist()
        if numbers and not 0 <= min(numbers) <= max(numbers) < len(self):
            raise IndexError(f"windows {min(numbers)}..{max(numbers)} of {len(self)}")
        if self._plan is not None:
            return self._plan.pieces(numbers)
        length = self.sequence_length
        return self._stream.pieces((number * length, (number + 1) * length) for number in numbers)

    def _bytes(self, pieces: Iterable[Piece]) -> np.ndarray:
        """Return file, first byte and end of `pieces`, int64 [pieces, 3]."""
        found = np.fromiter(pieces, dtype=np.dtype((np.int64, 4)))
        return found[:, 1:] * self._byte_scale

    def block_starts(self, block_bytes: int) -> np.ndarray:
        """Return the first window of each block, int64 [blocks].

        A block consists of the windows that begin in an aligned part of a file. Packed documents
        are spread over the windows of their group, so that a packed group is a block.
        """
        if self._plan is not None:
            return self._plan.group_starts
        step = max(1, block_bytes // self.source.dtype.itemsize)
        firsts = [
            start + np.arange(0, end - start, step)
            for start, end in zip(self._stream.starts, self._stream.ends, strict=True)
        ]
        starts = np.unique(-(-np.concatenate(firsts) // self.sequence_length))
        return starts[starts < len(self)]

    def document_lengths(self) -> np.ndarray:
        """Return tokens per document in stream order, including EOS, int64 [documents]."""
        return np.concatenate([self.source.documents(n).lengths() for n in range(len(self.files))])

    def __reduce__(self) -> tuple[Any, ...]:
        # Reopen instead of pickling mapped memory. The files were checked when first opened.
        return _open, (self.path, self.split, self.sequence_length, self._options)


def _open(path: Path | str, split: str, sequence_length: int, options: dict) -> TokenDataset:
    return TokenDataset(path, split, sequence_length=sequence_length, verify="size", **options)
