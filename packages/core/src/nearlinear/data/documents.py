"""Where documents begin in a shard, found in its mapped `.idx` without reading all of it.

Byte offsets in Megatron's index ascend, so the documents of a window are two binary searches away:
a few pages of the file, whatever its size. Source: MMIDIDX, `megatron/core/datasets`; a document
there may be several sequences, and ours is one.
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..errors import DataError
from .format.index import INDEX_HEADER

_DTYPES = {4: np.dtype("<i4"), 8: np.dtype("<u2")}  # Megatron's codes of those that hold ids


class DocumentIndex:
    """The documents of a shard of so many `bytes_`. Raises `DataError` if `path` is not its index.

    The arrays are mapped: opening reads two pages.
    """

    def __init__(self, path: Path, bytes_: int):
        try:
            raw = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
            header = INDEX_HEADER.unpack(raw[: INDEX_HEADER.size].tobytes())
        except FileNotFoundError:
            raise DataError(f"{path} is missing: copy it again beside its .bin") from None
        except (OSError, ValueError, struct.error) as error:  # the last two: it is too short
            raise DataError(
                f"{path} is no index of documents ({error}): copy it again beside its .bin"
            ) from None
        magic, version, code, sequences, documents = header
        size = INDEX_HEADER.size + 12 * sequences + 8 * documents
        if magic != b"MMIDIDX\x00\x00" or version != 1 or code not in _DTYPES or len(raw) != size:
            raise DataError(
                f"{path} is no index of documents of uint16 or int32 tokens (MMIDIDX version 1): "
                "write it again with Megatron's preprocess_data.py or python -m data_prep"
            )
        self.dtype, self.documents = _DTYPES[code], documents - 1
        lengths, offsets = INDEX_HEADER.size + 4 * sequences, 8 * sequences
        self._lengths = raw[INDEX_HEADER.size : lengths].view("<i4")
        self._offsets = raw[lengths : lengths + offsets].view("<i8")
        self._firsts = raw[lengths + offsets :].view("<i8")
        self._plain = self.documents == sequences  # then sequence i is document i
        self._begins = _numbers(self._offsets)
        if not self._plain:
            self._begins = _Begins(self._begins, _numbers(self._firsts))
        self.tokens = bytes_ // self.dtype.itemsize
        end = 0
        if sequences:
            end = int(self._offsets[-1]) + int(self._lengths[-1]) * self.dtype.itemsize
        if end != bytes_:
            raise DataError(
                f"{path} describes {end} bytes and its .bin has {bytes_}: they are not a pair; "
                "copy both again"
            )

    def inside(self, start: int, stop: int) -> list[int]:
        """The tokens at which documents begin between `start` and `stop`, both excluded."""
        size, begins = self.dtype.itemsize, []
        document = bisect.bisect_right(self._begins, start * size)
        while document < self.documents and (begin := self._begins[document] // size) < stop:
            begins.append(begin)
            document += 1
        return begins

    def lengths(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Tokens of every document, int64 [documents]; reads all of the index.

        Or of those of the tokens [start, stop), which are whole documents; reads what is of them.
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


def _numbers(array: np.ndarray) -> Sequence[int]:
    """Those of an int64 array of a file, which are had one by one in a third of the time."""
    return memoryview(array.view(np.uint8)).cast("q") if len(array) else ()


class _Begins:
    """Byte offsets at which documents begin that may be several sequences each."""

    def __init__(self, offsets: Sequence[int], firsts: Sequence[int]):
        self._offsets, self._firsts = offsets, firsts

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def __getitem__(self, document: int) -> int:
        return self._offsets[self._firsts[document]]


class DocumentsByToken:
    """The documents of a file without an index: each ends with the token `eos`."""

    def __init__(self, tokens: np.ndarray, eos: int):
        self._tokens, self._eos = tokens, eos

    def inside(self, start: int, stop: int) -> list[int]:
        """As `DocumentIndex.inside`; reads these tokens."""
        ends = np.flatnonzero(self._tokens[start : stop - 1] == self._eos)
        return (ends + start + 1).tolist()

    def lengths(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """As `DocumentIndex.lengths`; reads these tokens, and takes memory for the ends alone."""
        step, stop = 2**24, len(self._tokens) if stop is None else stop
        ends = [
            np.flatnonzero(self._tokens[at : min(at + step, stop)] == self._eos) + at + 1
            for at in range(start, stop, step)
        ]
        ends = np.concatenate([[start], *ends])
        return np.diff(ends if ends[-1] == stop else np.append(ends, stop))
