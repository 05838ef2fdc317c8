"""Read-ahead of upcoming windows into the page cache with large reads.

Windows are read through memory maps, where each page fault waits for a server of a parallel file
system. `ReadAhead` reads the byte ranges of upcoming windows first, with adjacent ranges in one
call, so page faults hit the page cache. Read-ahead affects only performance.
"""

import os
import weakref
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from ..errors import DataError
from .dataset import TokenDataset
from .mixture import Mixture

_MOST_FILES = 64  # open at once
_CALL = 16 * 2**20  # bytes of one read call


class ReadAhead:
    """Read ranges of windows in a thread, except the last `remembered` ranges."""

    def __init__(self, dataset: TokenDataset | Mixture, remembered: int):
        self._dataset, self._remembered = dataset, remembered
        self._known: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._files: OrderedDict[int, int] = OrderedDict()
        self._buffer = bytearray()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="nearlinear-read-ahead")
        weakref.finalize(self, _close, self._thread, self._files)

    def start(self, ranges: np.ndarray) -> Future:
        """Call `read` in the background thread. Calls run in order."""
        return self._thread.submit(self.read, ranges)

    def read(self, ranges: np.ndarray) -> None:
        """Read the windows of `ranges`, int64 [N, 2] of first and end. Raises `DataError`."""
        new = [pair for pair in map(tuple, ranges.tolist()) if pair not in self._known]
        for pair in map(tuple, ranges.tolist()):
            self._known[pair] = None
            self._known.move_to_end(pair)
        while len(self._known) > self._remembered:
            self._known.popitem(last=False)
        extents = self._dataset.extents(*_merge_ranges(new))
        if self._dataset.reads is not None:
            self._dataset.reads.explicit(extents)
        for shard, start, end in self._dataset.prefetch(extents).tolist():
            try:
                self._read(shard, start, end)
            except OSError as error:
                raise DataError(
                    f"{self._dataset.files[shard]} cannot be read ({error.strerror}): check "
                    "its file system, and restart from the last checkpoint"
                ) from None

    def _read(self, shard: int, start: int, end: int) -> None:
        file = self._open(shard)
        while start < end:
            count = min(_CALL, end - start)
            if len(self._buffer) < count:
                self._buffer = bytearray(count)
            got = os.preadv(file, [memoryview(self._buffer)[:count]], start)
            if not got:  # truncated file; the dataset check reports it
                return
            start += got

    def _open(self, shard: int) -> int:
        if shard not in self._files:
            if len(self._files) >= _MOST_FILES:
                os.close(self._files.popitem(last=False)[1])
            file = os.open(self._dataset.files[shard], os.O_RDONLY)
            if hasattr(os, "posix_fadvise"):  # disable readahead by the kernel
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
            self._files[shard] = file
        self._files.move_to_end(shard)
        return self._files[shard]


def _close(thread: ThreadPoolExecutor, files: OrderedDict[int, int]) -> None:
    thread.shutdown(wait=False)
    while files:
        os.close(files.popitem()[1])


def _merge_ranges(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Sort ranges and merge adjacent ones. Returns their first and end values."""
    joined: list[list[int]] = []
    for first, end in sorted(pairs):
        if joined and first <= joined[-1][1]:
            joined[-1][1] = max(end, joined[-1][1])
        else:
            joined.append([first, end])
    both = np.array(joined, dtype=np.int64).reshape(-1, 2)
    return both[:, 0], both[:, 1]
