"""A copy of tensors in host memory, so that training can change them while they are written.

What only the optimizer changes need not be copied at once: the next forward and backward pass can
go on in the meantime, as long as the optimizer's step waits. Source: CheckFreq (Mohan et al., FAST
2021), section 4.2.
"""

from __future__ import annotations

import threading
from collections.abc import Collection

import torch


class Snapshot:
    """Host memory that is used again from save to save: fresh pages cost more than the copy."""

    def __init__(self):
        self._memory: dict[str, torch.Tensor] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def of(self, tensors: dict[str, torch.Tensor], later: Collection[str] = ()) -> Copy:
        """Copies of ``tensors`` on the CPU, contiguous, each by its name; good until the next call.

        Those named in ``later`` may still be on their way when this returns. On CUDA the memory is
        pinned, and one copy does not wait for another.
        """
        known, self._memory = self._memory, {}
        waiting, streams = [], set()
        for name, tensor in tensors.items():
            there = known.get(name)
            on_gpu = tensor.device.type == "cuda"
            if there is None or there.shape != tensor.shape or there.dtype != tensor.dtype:
                there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
            self._memory[name] = there
            if on_gpu:
                stream = self._stream(tensor.device, beside=name in later)
                streams.add(stream)
                with torch.cuda.stream(stream):
                    there.copy_(tensor, non_blocking=True)
            elif name in later:
                waiting.append((there, tensor))
            else:
                there.copy_(tensor)
        copy = Copy(dict(self._memory), waiting, [stream.record_event() for stream in streams])
        if not later:
            copy.complete()
        return copy

    def _stream(self, device: torch.device, beside: bool) -> torch.cuda.Stream:
        """The one that computes, which will not change a tensor before it has copied it; or one
        ``beside`` it, from where that is now.
        """
        computing = torch.cuda.current_stream(device)
        if not beside:
            return computing
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        stream.wait_stream(computing)
        return stream


class Copy:
    """A snapshot: whole once `complete` has returned."""

    def __init__(self, tensors: dict[str, torch.Tensor], waiting: list[tuple], events: list):
        self._tensors, self._waiting, self._events = tensors, waiting, events
        self._by_host = threading.Event()

    def complete(self) -> dict[str, torch.Tensor]:
        """Copy what has not been copied, on the thread that calls this; the whole snapshot."""
        try:
            for there, tensor in self._waiting:
                there.copy_(tensor)
        finally:
            self._by_host.set()
        for event in self._events:
            event.synchronize()
        return self._tensors

    def hold(self, *_) -> None:
        """Have what would change the tensors wait: this thread for the host, the GPU for its own.

        What has been held once, or is there, holds nothing up.
        """
        for event in self._events:
            event.wait()
        self._by_host.wait()
