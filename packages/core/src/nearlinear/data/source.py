"""Sources of token shards: the files of one split, its token stream, and the documents in it.

`ShardSource` is the interface. `LocalShards` reads token shards from a local folder and checks them
once per process. Files are mapped on first use, so opening a stream takes the same time at any
size. Byte offsets in a Megatron index ascend, so the documents of a window are found by binary
search, which reads only a few pages of the mapped `.idx`. Source: MMIDIDX,
`megatron/core/datasets`. In Megatron's files a document may consist of several sequences; in token
shards it is exactly one.
"""

from __future__ import annotations

import abc
import bisect
import functools
import itertools
import logging
import resource
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError
from .format import Manifest, Shard, verify
from .format.shards import INDEX_HEADER

MOST_OPEN = max(16, min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8))
"""Maximum number of mapped files of a stream. Each mapping holds a file descriptor."""


Piece = tuple[int, int, int, int]
"""Row of a batch, file, first token in the file, and end: tokens that are consecutive in both."""


class TokenStream:
    """Concatenation of token files.

    Args:
        counts: Number of tokens in each file.
        open_: Opens a file by its index and returns its tokens [n].
    """

    def __init__(self, counts: list[int], open_: Callable[[int], np.ndarray]):
        self.ends: list[int] = list(itertools.accumulate(counts))
        self.starts: list[int] = [0, *self.ends[:-1]]
        self.file = functools.lru_cache(MOST_OPEN)(open_)

    @property
    def tokens(self) -> int:
        return self.ends[-1]

    def pieces(self, ranges: Iterable[tuple[int, int]]) -> Iterator[Piece]:
        """Split ranges [begin, end) of the stream at file boundaries. Each range is a row."""
        for row, (begin, end) in enumerate(ranges):
            file = bisect.bisect_right(self.ends, begin)
            while begin < end:
                start, stop = self.starts[file], min(end, self.ends[file])
                if begin < stop:
                    yield row, file, begin - start, stop - start
                begin, file = stop, file + 1

    def read(self, pieces: Iterable[Piece], out: np.ndarray) -> tuple[list[int], list[int]]:
        """Read `pieces` into the rows of `out` [N, L], from left to right.

        Returns the position of each piece in the flattened rows, and the number of tokens in each
        row.
        """
        places, filled, length = [], [0] * len(out), out.shape[1]
        for row, file, start, stop in pieces:
            first = filled[row]
            filled[row] = first + stop - start
            places.append(row * length + first)
            out[row, first : filled[row]] = self.file(file)[start:stop]
        return places, filled


_DTYPES = {
    4: np.dtype("<i4"),
    8: np.dtype("<u2"),
}  # Megatron's codes of the dtypes used for token ids


class DocumentIndex:
    """Documents of a shard, from its memory-mapped `.idx`. Opening reads two pages.

    Args:
        path: The `.idx` file.
        bytes_: Size of the `.bin` file in bytes.

    Raises:
        DataError: If `path` is not the index of a file of this size.
    """

    def __init__(self, path: Path, bytes_: int):
        try:
            raw = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
            header = INDEX_HEADER.unpack(raw[: INDEX_HEADER.size].tobytes())
        except FileNotFoundError:
            raise DataError(f"{path} is missing: copy it again beside its .bin") from None
        except (
            OSError,
            ValueError,
            struct.error,
        ) as error:  # ValueError and struct.error: file too short
            raise DataError(
                f"{path} is not a document index ({error}): copy it again beside its .bin"
            ) from None
        magic, version, code, sequences, documents = header
        size = INDEX_HEADER.size + 12 * sequences + 8 * documents
        if magic != b"MMIDIDX\x00\x00" or version != 1 or code not in _DTYPES or len(raw) != size:
            raise DataError(
                f"{path} is not a document index of uint16 or int32 tokens (MMIDIDX version 1): "
                "write it again with Megatron's preprocess_data.py or nearlinear data"
            )
        self.dtype: np.dtype = _DTYPES[code]
        self.documents: int = documents - 1
        lengths, offsets = INDEX_HEADER.size + 4 * sequences, 8 * sequences
        self._lengths = raw[INDEX_HEADER.size : lengths].view("<i4")
        self._offsets = raw[lengths : lengths + offsets].view("<i8")
        self._firsts = raw[lengths + offsets :].view("<i8")
        self._plain = self.documents == sequences  # then sequence i is document i
        self._begins = _as_sequence(self._offsets)
        if not self._plain:
            self._begins = _Begins(self._begins, _as_sequence(self._firsts))
        self.tokens: int = bytes_ // self.dtype.itemsize
        end = 0
        if sequences:
            end = int(self._offsets[-1]) + int(self._lengths[-1]) * self.dtype.itemsize
        if end != bytes_:
            raise DataError(
                f"{path} describes {end} bytes but its .bin file has {bytes_}: the files do not "
                "belong together; copy both again"
            )

    def inside(self, start: int, stop: int) -> list[int]:
        """Return the starts of the documents that begin between `start` and `stop`, exclusive."""
        size, begins = self.dtype.itemsize, []
        document = bisect.bisect_right(self._begins, start * size)
        while document < self.documents and (begin := self._begins[document] // size) < stop:
            begins.append(begin)
            document += 1
        return begins

    def lengths(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return the number of tokens of each document in [start, stop), int64 [documents].

        The range must consist of whole documents. Without `stop`, return all documents, which reads
        the whole index.
        """
        first, end = 0, self.documents
        if stop is not None:
            size = self.dtype.itemsize
            first = bisect.bisect_left(self._begins, start * size)
            end = bisect.bisect_left(self._begins, stop * size, first)
        if self._plain:
            return self._lengths[first:end].astype(np.int64)
        begins = self._offsets[self._firsts[first:end]] // self.dtype.itemsize
        return np.diff(begins, append=self.tokens if stop is None else stop)


def _as_sequence(array: np.ndarray) -> Sequence[int]:
    """View an int64 array as a sequence with element access three times as fast as numpy."""
    return array.view(np.uint8).data.cast("q") if len(array) else ()


class _Begins:
    """Byte offsets of documents that may consist of several sequences."""

    def __init__(self, offsets: Sequence[int], firsts: Sequence[int]):
        self._offsets, self._firsts = offsets, firsts

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def __getitem__(self, document: int) -> int:
        return self._offsets[self._firsts[document]]


class DocumentsByToken:
    """Documents of a file without an index. Each document ends with the token `eos`."""

    def __init__(self, tokens: np.ndarray, eos: int):
        self._tokens, self._eos = tokens, eos

    def inside(self, start: int, stop: int) -> list[int]:
        """Return the document starts like `DocumentIndex.inside`. Reads the tokens."""
        ends = np.flatnonzero(self._tokens[start : stop - 1] == self._eos)
        return (ends + start + 1).tolist()

    def lengths(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return the document lengths like `DocumentIndex.lengths`. Reads the tokens in chunks."""
        step, stop = 2**24, len(self._tokens) if stop is None else stop
        ends = [
            np.flatnonzero(self._tokens[at : min(at + step, stop)] == self._eos) + at + 1
            for at in range(start, stop, step)
        ]
        ends = np.concatenate([[start], *ends])
        return np.diff(ends if ends[-1] == stop else np.append(ends, stop))


class DocumentEnds:
    """Documents of a file, from their memory-mapped ends in tokens, uint64 [documents].

    This is datatrove's `.ds.index`. Documents without tokens are passed over.

    Raises:
        DataError: If `path` is not such an index.
    """

    def __init__(self, path: Path):
        size = path.stat().st_size
        if size % 8:
            raise DataError(f"{path} is not an index of document ends: copy it again")
        raw = np.memmap(path, dtype="<i8", mode="r") if size else np.empty(0, "<i8")
        self._path, self._array = path, np.asarray(raw)
        self._ends = _as_sequence(self._array)
        self.documents: int = len(self._ends)
        self.tokens: int = self._ends[-1] if self.documents else 0

    def inside(self, start: int, stop: int) -> list[int]:
        """Return the document starts like `DocumentIndex.inside`."""
        first = bisect.bisect_right(self._ends, start)
        last = bisect.bisect_left(self._ends, stop, first)
        return list(dict.fromkeys(self._ends[first:last]))

    def lengths(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return the document lengths like `DocumentIndex.lengths`."""
        first = bisect.bisect_right(self._ends, start)
        end = self.documents if stop is None else bisect.bisect_right(self._ends, stop, first)
        found = np.diff(self._array[first:end], prepend=start)
        if (found < 0).any():
            raise DataError(f"{self._path}: the ends of documents do not ascend: copy it again")
        return found[found > 0]


Documents = DocumentIndex | DocumentEnds | DocumentsByToken


class NoSplit(DataError):
    """The data does not contain the requested split, or too little of it for one sequence."""


class ShardSource(abc.ABC):
    """Shards of one split of a dataset at `path`. Raises `NoSplit` if the split is absent."""

    files: Sequence[Path | str]
    """Token files of the shards in stream order: local paths or URLs."""
    downloads: bool = False
    """True if `prefetch` downloads."""

    def __init__(
        self, path: Path | str, split: str, manifest: Manifest, dtype: np.dtype | None = None
    ):
        self.path: Path | str = path
        self.split: str = split
        self.manifest: Manifest = manifest
        self.dtype: np.dtype[Any] = dtype or manifest.dtype
        """Dtype of the tokens in the files."""
        if split not in manifest.splits:
            raise NoSplit(
                f"{path} has no split {split!r}: it has {', '.join(sorted(manifest.splits))}"
            )
        self.shards: tuple[Shard, ...] = manifest.splits[split]
        if not manifest.total("tokens", split):
            raise NoSplit(
                f"split {split!r} of {path} is empty: prepare the data again with more text or a "
                "larger --val-fraction"
            )

    @abc.abstractmethod
    def tokens(self, shard: int) -> np.ndarray:
        """Return the tokens [n] of a shard: an array, or an object with the same slicing."""

    @abc.abstractmethod
    def documents(self, shard: int) -> Documents:
        """Return the document index of a shard."""

    @abc.abstractmethod
    def tokenizer(self) -> Path:
        """Return the local path of the tokenizer file. Raises `DataError` if it is unknown."""

    def prefetch(self, extents: np.ndarray) -> np.ndarray:
        """Download byte ranges of the files to this node.

        Args:
            extents: int64 [n, 3] of shard, first byte and end.

        Returns:
            The extents in local files, which the caller may read ahead.
        """
        return extents


logger = logging.getLogger("nearlinear.data")

_FULL_CHECK_BYTES = 2 * 1024**3
_verified: set[tuple] = set()
_verify_lock = threading.Lock()


class LocalShards(ShardSource):
    """Token shards in a local folder. `mode` is the `verify` argument of `TokenDataset`."""

    files: list[Path]

    def __init__(self, path: Path, split: str, mode: str):
        super().__init__(path, split, Manifest.read(path))
        self.files = [path / shard.file for shard in self.shards]
        _verify_once(path, self.manifest, split, mode)

    def tokens(self, shard: int) -> np.ndarray:
        return np.asarray(np.memmap(self.files[shard], dtype=self.dtype, mode="r"))

    def documents(self, shard: int) -> DocumentIndex:
        return DocumentIndex(self.files[shard].with_suffix(".idx"), self.shards[shard].bytes)

    def tokenizer(self) -> Path:
        return self.path / self.manifest.tokenizer["file"]


def _verify_once(path: Path, manifest: Manifest, split: str, mode: str) -> None:
    """Check the files of a split unless this process has already checked them unchanged."""
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
                "%s: checked file sizes only, because the split has %.1f GiB (limit 2 GiB); "
                "run `nearlinear data verify %s` to check every byte",
                path, size / 1024**3, path,
            )  # fmt: skip
        verify(path, full=full, splits=(split,))
        _verified.add((*key, full))
