"""Random access to a token stream over several files, and to the documents in it.

Files are mapped on first use, so opening a stream takes the same time at any size. Byte offsets in
a Megatron index ascend, so the documents of a window are found by binary search, which reads only a
few pages of the mapped `.idx`. Source: MMIDIDX, `megatron/core/datasets`. In Megatron's files a
document may consist of several sequences; in token shards it is exactly one.
"""

from __future__ import annotations

import bisect
import functools
import resource
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ..errors import DataError
from .format.shards import INDEX_HEADER

MOST_OPEN = max(16, min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8))
"""Maximum number of mapped files of a stream. Each mapping holds a file descriptor."""


class TokenStream:
    """Concatenation of token files.

    Args:
        counts: Number of tokens in each file.
        open_: Opens a file by its index and returns its tokens [n].
    """

    def __init__(self, counts: list[int], open_: Callable[[int], np.ndarray]):
        self.ends = np.cumsum(np.array(counts, dtype=np.int64))
        self.starts = self.ends - counts
        self.file = functools.lru_cache(MOST_OPEN)(open_)

    @property
    def tokens(self) -> int:
        return int(self.ends[-1])

    def pieces(self, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Split ranges [begin, end) of the stream at file boundaries.

        Returns int64 [pieces, 4] of range index, file, first token in the file, and end.
        """
        row, file = np.arange(len(begin)), np.searchsorted(self.ends, begin, side="right")
        found = []
        while True:
            stop, offset = np.minimum(end, self.ends[file]), self.starts[file]
            part = np.empty((len(row), 4), dtype=np.int64)
            part[:, 0], part[:, 1] = row, file
            part[:, 2], part[:, 3] = begin - offset, stop - offset
            found.append(part)
            rest = stop < end
            if not rest.any():
                break
            begin, end, row, file = stop[rest], end[rest], row[rest], file[rest] + 1
        return found[0] if len(found) == 1 else np.concatenate(found)

    def read(self, pieces: np.ndarray, out: np.ndarray) -> tuple[list[int], list[int]]:
        """Read `pieces` into the rows of `out` [N, L], from left to right.

        Returns the position of each piece in the flattened rows, and the number of tokens in each
        row.
        """
        places, filled, length = [], [0] * len(out), out.shape[1]
        for row, file, start, stop in pieces.tolist():
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
                "write it again with Megatron's preprocess_data.py or python -m data_prep"
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
