"""Host memory for activations: taken once, used again from step to step.

Pinned on machines with a GPU, where pinning a page takes longer than filling it. Memory comes in
chunks; parts of them are handed out first-fit, and join their neighbours when they come back.
"""

import bisect
from collections import deque

import torch

ALIGNMENT = 512  # bytes, as torch's allocators have it


class Part:
    """Some bytes of a chunk."""

    __slots__ = ("begin", "chunk", "end")

    def __init__(self, chunk: int, begin: int, end: int):
        self.chunk, self.begin, self.end = chunk, begin, end


class Slab:
    """Grows by ``chunk`` bytes, or by as many as are asked for at once if they are more."""

    def __init__(self, chunk: int = 64 * 2**20, pinned: bool = False):
        self.chunk, self.pinned = chunk, pinned
        self._chunks: list[torch.Tensor] = []
        self._free: list[list[tuple[int, int]]] = []  # of each chunk, in order
        self._came_back: deque[Part] = deque()

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that it has, used or not."""
        return sum(chunk.numel() for chunk in self._chunks)

    @property
    def used(self) -> int:
        """Bytes that are handed out."""
        self._collect()
        return self.nbytes - sum(end - begin for free in self._free for begin, end in free)

    def take(self, nbytes: int) -> tuple[Part, torch.Tensor]:
        """At least ``nbytes`` bytes, and the first ``nbytes`` of them as a tensor."""
        self._collect()
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        part = self._first_fit(size)
        if part is None:
            more = torch.empty(max(size, self.chunk), dtype=torch.uint8, pin_memory=self.pinned)
            self._chunks.append(more)
            self._free.append([(0, more.numel())])
            part = self._first_fit(size)
        return part, self._chunks[part.chunk][part.begin : part.begin + nbytes]

    def give_back(self, part: Part) -> None:
        """``part`` may be used for something else. From any thread, also by garbage collection."""
        self._came_back.append(part)

    def _first_fit(self, size: int) -> Part | None:
        for number, free in enumerate(self._free):
            for i, (begin, end) in enumerate(free):
                if end - begin >= size:
                    free[i : i + 1] = [(begin + size, end)] if end - begin > size else []
                    return Part(number, begin, begin + size)
        return None

    def _collect(self) -> None:
        while self._came_back:
            part = self._came_back.popleft()
            free, begin, end = self._free[part.chunk], part.begin, part.end
            at = bisect.bisect(free, (begin, end))
            if at < len(free) and free[at][0] == end:
                end = free.pop(at)[1]
            if at and free[at - 1][1] == begin:
                at -= 1
                begin = free.pop(at)[0]
            free.insert(at, (begin, end))
