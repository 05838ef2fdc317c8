"""Staging copies of tensors in host memory, so that training can continue during a write.

Tensors that only the optimizer changes can be copied during the next forward and backward pass, if
the optimizer's step waits for the copy. Source: CheckFreq (Mohan et al., FAST 2021), section 4.2.
"""

from __future__ import annotations

import threading
from collections.abc import Collection

import torch


class StagingBuffers:
    """Host buffers reused from save to save; allocating new pages costs more than the copy."""

    def __init__(self):
        self._buffers: dict[str, torch.Tensor] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def copy(self, tensors: dict[str, torch.Tensor], deferred: Collection[str] = ()) -> StagedCopy:
        """Copy ``tensors`` to contiguous CPU memory. The copies are valid until the next call.

        On CUDA the buffers are pinned, and copies are asynchronous.

        Args:
            tensors: Tensors by name.
            deferred: Names whose copies may still be pending when this returns.
        """
        known, self._buffers = self._buffers, {}
        pending, streams = [], set()
        for name, tensor in tensors.items():
            buffer = known.get(name)
            on_gpu = tensor.device.type == "cuda"
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
            self._buffers[name] = buffer
            if on_gpu:
                stream = self._copy_stream(tensor.device, overlap=name in deferred)
                streams.add(stream)
                with torch.cuda.stream(stream):
                    buffer.copy_(tensor, non_blocking=True)
            elif name in deferred:
                pending.append((buffer, tensor))
            else:
                buffer.copy_(tensor)
        events = [stream.record_event() for stream in streams]
        copy = StagedCopy(dict(self._buffers), pending, events)
        if not deferred:
            copy.complete()
        return copy

    def _copy_stream(self, device: torch.device, overlap: bool) -> torch.cuda.Stream:
        """Return the stream for copies.

        Without ``overlap``, copies run on the compute stream, ordered before later writes. With it,
        they run on a side stream that waits for the compute stream's current position.
        """
        compute = torch.cuda.current_stream(device)
        if not overlap:
            return compute
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        stream.wait_stream(compute)
        return stream


class StagedCopy:
    """Copies in staging buffers, complete once `complete` has returned."""

    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        pending: list[tuple[torch.Tensor, torch.Tensor]],
        events: list[torch.cuda.Event],
    ):
        self._tensors, self._pending, self._events = tensors, pending, events
        self._host_done = threading.Event()

    def complete(self) -> dict[str, torch.Tensor]:
        """Finish all copies, the pending host copies on the calling thread, and return them."""
        try:
            for buffer, tensor in self._pending:
                buffer.copy_(tensor)
        finally:
            self._host_done.set()
        for event in self._events:
            event.synchronize()
        return self._tensors

    def wait_before_update(self, *_) -> None:
        """Block updates of the tensors until they are copied: an optimizer step pre-hook.

        The calling thread waits for host copies, the current CUDA stream for device copies.
        """
        for event in self._events:
            event.wait()
        self._host_done.wait()
