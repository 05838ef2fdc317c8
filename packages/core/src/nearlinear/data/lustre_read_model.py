"""Deterministic model of the Lustre client: counters of the requests caused by reading windows.

A page fault that misses the page cache fetches the aligned unit of 1 MiB around it. An explicit
read fetches the requested pages. An RPC carries at most one unit. The most recently fetched bytes
stay in memory. Sources: the Lustre manual on client read-ahead, and LUDOC-485 on read-ahead of
mapped files. The counts are the same on every machine and do not model time.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np

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
