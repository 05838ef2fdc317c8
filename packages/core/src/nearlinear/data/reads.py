"""What reading windows asks of a file system: counters, for a client that is modelled.

The model is Lustre's client: a page fault that misses brings the whole aligned unit of 1 MiB around
it, an explicit read brings the pages it names, an RPC carries one unit at most, and what was
brought last is remembered. Source: Lustre's manual on read-ahead of clients, and LUDOC-485 on that
of mapped files. It counts the same on every machine, and says nothing about time.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np

PAGE = 4096
UNIT = 2**20
_NEVER = -(2**62)


@dataclass
class Reads:
    """Counts of what was read since they were made, or since `clear`."""

    sizes: list[int]
    """bytes of each file"""
    unit: int = UNIT
    """bytes that a page fault brings, and that an RPC carries at most"""
    memory: int = 1024 * UNIT
    """bytes that are remembered, of those brought last"""
    used: int = 0
    """bytes of the windows that were handed out"""
    requests: int = 0
    """contiguous ranges that were asked of the file system"""
    rpcs: int = 0
    """messages that carry them"""
    fetched: int = 0
    """bytes that they bring"""
    seeks: int = 0
    """requests that do not begin where the one before ended"""
    _brought: list[np.ndarray] = field(default_factory=list, repr=False)
    _volume: int = 0
    _head: tuple[int, int] = (-1, -1)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self):
        self._brought = [np.full(-(-size // PAGE), _NEVER) for size in self.sizes]

    @property
    def amplification(self) -> float:
        """Bytes fetched for each byte used: 1 is the least, unless windows are used again."""
        return self.fetched / self.used if self.used else 0.0

    @property
    def bytes_per_rpc(self) -> float:
        return self.fetched / self.rpcs if self.rpcs else 0.0

    @property
    def bytes_per_seek(self) -> float:
        """How far it reads on before it goes elsewhere."""
        return self.fetched / self.seeks if self.seeks else 0.0

    def clear(self) -> None:
        """Count from zero; what is in memory stays there."""
        self.used = self.requests = self.rpcs = self.fetched = self.seeks = 0

    def faults(self, extents: np.ndarray) -> None:
        """Windows read through mapped memory: `extents` int64 [pieces, 3] of file, start, end."""
        with self._lock:
            self.used += int((extents[:, 2] - extents[:, 1]).sum())
            for file, start, end in extents.tolist():
                self._bring(file, start, end, self.unit)

    def explicit(self, extents: np.ndarray) -> None:
        """Ranges read with a call of their own."""
        with self._lock:
            for file, start, end in extents.tolist():
                self._bring(file, start, end, PAGE)

    def _bring(self, file: int, start: int, end: int, step: int) -> None:
        """Whole steps around [start, end), if one of its pages is not in memory."""
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
