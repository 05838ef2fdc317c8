"""Host memory for offloaded activations, and the copies to and from it.

Memory is allocated once and reused from step to step. It is pinned on machines with a GPU, where
pinning a page takes longer than filling it. Copies use streams on CUDA devices and a thread
elsewhere. Copies to the host run in order, and so do copies to the device; neither direction waits
for the other, except that memory is not written before its last reader is done.
"""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..distributed.comm_thread import CommThread, CommWork
from ..errors import NearlinearError


class HostCopier(Protocol):
    """Copies flat uint8 tensors between device and host; returns handles of copies in flight."""

    def offload(self, source: torch.Tensor, target: torch.Tensor) -> Any:
        """Copy ``source`` on the device to ``target`` on the host, after all work issued so far."""
        ...

    def prefetch(self, source: torch.Tensor, after: Any) -> tuple[torch.Tensor, Any]:
        """Copy ``source`` to a new tensor on the device, after the copy ``after``."""
        ...

    def wait(self, copy: Any) -> None:
        """Make the compute stream wait for ``copy``. Re-raises the exception of a failed copy."""

    def discard(self, copy: Any) -> None:
        """Discard an unused prefetch; its buffer may be reused once the copy completes."""


@dataclass(eq=False)
class ThreadCopy:
    """Handle of a copy on a thread."""

    work: CommWork | None = None
    failed: bool = False
    error: BaseException | None = None
    """Exception of a failed copy; the thread continues with the next one."""


class ThreadCopier:
    """Copies on a thread, for machines without an accelerator."""

    def __init__(self):
        self._thread = CommThread("activations")

    def offload(self, source: torch.Tensor, target: torch.Tensor) -> ThreadCopy:
        return self._submit(target, source)

    def prefetch(self, source: torch.Tensor, after: ThreadCopy) -> tuple[torch.Tensor, ThreadCopy]:
        target = torch.empty_like(source)
        return target, self._submit(target, source)

    def wait(self, copy: ThreadCopy) -> None:
        assert copy.work is not None
        copy.work.wait()
        if copy.failed:
            # raised once: its traceback references the graph, which would never be freed
            error, copy.error = copy.error, None
            raise error or NearlinearError("this copy of activations failed before")

    def discard(self, copy: ThreadCopy) -> None:
        """Do nothing: the thread holds references to the tensors that it copies."""

    def _submit(self, target: torch.Tensor, source: torch.Tensor) -> ThreadCopy:
        copy = ThreadCopy()

        def run():
            try:
                copy_bytes(target, source)
            except BaseException as error:
                copy.failed, copy.error = True, error

        copy.work = self._thread.submit(copy=run)
        return copy


def copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy on the copying thread."""
    target.copy_(source)


StreamCopy = tuple[Any, torch.cuda.Stream]
"""Event recorded after a copy, and the compute stream that was current when it was issued."""


class StreamCopier:
    """Copies on two CUDA streams, one per direction of the full-duplex link.

    The compute stream is looked up before a copy stream is entered; inside, the copy stream is the
    current one.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._to_host, self._to_device = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def offload(self, source: torch.Tensor, target: torch.Tensor) -> StreamCopy:
        compute = torch.cuda.current_stream(self.device)
        self._to_host.wait_stream(compute)
        self._to_host.wait_stream(
            self._to_device
        )  # an earlier prefetch may still read from ``target``
        with torch.cuda.stream(self._to_host):
            target.copy_(source, non_blocking=True)
        return self._to_host.record_event(), compute

    def prefetch(self, source: torch.Tensor, after: StreamCopy) -> tuple[torch.Tensor, StreamCopy]:
        compute = torch.cuda.current_stream(self.device)
        target = torch.empty(source.numel(), dtype=source.dtype, device=self.device)
        self._to_device.wait_stream(compute)  # the memory may have been in use by computation
        self._to_device.wait_event(after[0])
        with torch.cuda.stream(self._to_device):
            target.copy_(source, non_blocking=True)
        return target, (self._to_device.record_event(), compute)

    def wait(self, copy: StreamCopy) -> None:
        torch.cuda.current_stream(self.device).wait_event(copy[0])

    def discard(self, copy: StreamCopy) -> None:
        event, compute = copy
        compute.wait_event(event)


def copier_for(device: torch.device) -> HostCopier:
    """Return a copier with streams on CUDA devices, or with a thread elsewhere."""
    return StreamCopier(device) if device.type == "cuda" else ThreadCopier()


ALIGNMENT = 512  # bytes, as in torch's allocators


class BufferRange:
    """A range of bytes of a chunk."""

    __slots__ = ("begin", "chunk", "end")

    def __init__(self, chunk: int, begin: int, end: int):
        self.chunk, self.begin, self.end = chunk, begin, end


class HostBufferPool:
    """First-fit allocator that grows by chunks of ``chunk`` bytes, or by larger requests."""

    def __init__(self, chunk: int = 64 * 2**20, pinned: bool = False):
        self.chunk, self.pinned = chunk, pinned
        self._chunks: list[torch.Tensor] = []
        self._free: list[list[tuple[int, int]]] = []  # sorted ranges per chunk
        self._returned: deque[BufferRange] = deque()

    @property
    def nbytes(self) -> int:
        """Bytes of host memory, used or free."""
        return sum(chunk.numel() for chunk in self._chunks)

    @property
    def used(self) -> int:
        """Bytes in use."""
        self._collect()
        return self.nbytes - sum(end - begin for free in self._free for begin, end in free)

    def allocate(self, nbytes: int) -> tuple[BufferRange, torch.Tensor]:
        """Allocate ``nbytes`` bytes, rounded up; return the range and a tensor of ``nbytes``."""
        self._collect()
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        part = self._first_fit(size)
        if part is None:
            more = torch.empty(max(size, self.chunk), dtype=torch.uint8, pin_memory=self.pinned)
            self._chunks.append(more)
            self._free.append([(0, more.numel())])
            part = self._first_fit(size)
        assert part is not None
        return part, self._chunks[part.chunk][part.begin : part.begin + nbytes]

    def release(self, part: BufferRange) -> None:
        """Return ``part`` to the pool. Safe from any thread and from garbage collection."""
        self._returned.append(part)

    def _first_fit(self, size: int) -> BufferRange | None:
        for number, free in enumerate(self._free):
            for i, (begin, end) in enumerate(free):
                if end - begin >= size:
                    free[i : i + 1] = [(begin + size, end)] if end - begin > size else []
                    return BufferRange(number, begin, begin + size)
        return None

    def _collect(self) -> None:
        while self._returned:
            part = self._returned.popleft()
            free, begin, end = self._free[part.chunk], part.begin, part.end
            at = bisect.bisect(free, (begin, end))
            if at < len(free) and free[at][0] == end:
                end = free.pop(at)[1]
            if at and free[at - 1][1] == begin:
                at -= 1
                begin = free.pop(at)[0]
            free.insert(at, (begin, end))
