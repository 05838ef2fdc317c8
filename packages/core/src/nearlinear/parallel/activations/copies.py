"""How bytes get to host memory and back while the device computes: by streams, or by a thread.

Copies out run in order, and so do copies back; neither waits for the other, except that memory is
not written before whoever read it is done. `offload` decides what moves and when.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ...errors import NearlinearError
from ..lane import Item, Lane


class Copier(Protocol):
    """Copies flat uint8 tensors; what it returns stands for a copy on its way."""

    def out(self, source: torch.Tensor, target: torch.Tensor) -> object:
        """Copy what is in ``source``, on the device, after all computed so far; to the host."""

    def back(self, source: torch.Tensor, after: object) -> tuple[torch.Tensor, object]:
        """A new tensor on the device with what is in ``source`` once copy ``after`` is done."""

    def wait(self, copy: object) -> None:
        """What is computed from now on comes after ``copy``. Raises what that failed with."""

    def forget(self, copy: object) -> None:
        """Nobody will use the result of a copy back: its memory may have another use after it."""


@dataclass(eq=False)
class Copied:
    """A copy that a thread makes."""

    item: Item | None = None
    failed: bool = False
    error: BaseException | None = None
    """what it failed with; the thread goes on with the next"""


class ThreadCopier:
    """On machines without an accelerator: a thread of the rank's own."""

    def __init__(self):
        self._lane = Lane("activations")

    def out(self, source: torch.Tensor, target: torch.Tensor) -> Copied:
        return self._give(target, source)

    def back(self, source: torch.Tensor, after: Copied) -> tuple[torch.Tensor, Copied]:
        target = torch.empty_like(source)
        return target, self._give(target, source)

    def wait(self, copy: Copied) -> None:
        copy.item.wait()
        if copy.failed:
            # handed out once: its traceback holds the graph, which would never be freed
            error, copy.error = copy.error, None
            raise error or NearlinearError("this copy of activations has failed before")

    def forget(self, copy: Copied) -> None:
        """The thread holds what it copies."""

    def _give(self, target: torch.Tensor, source: torch.Tensor) -> Copied:
        copied = Copied()

        def run():
            try:
                copy_bytes(target, source)
            except BaseException as error:
                copied.failed, copied.error = True, error

        copied.item = self._lane.give(copy=run)
        return copied


def copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """On the copying thread."""
    target.copy_(source)


Marked = tuple[torch.cuda.Event, torch.cuda.Stream]
"""When a copy is done, and the stream that computed when it was asked for."""


class StreamCopier:
    """On CUDA devices: two streams, one in each direction, which the link can carry at once.

    The compute stream is looked up before a copy's stream is entered: inside, the current stream is
    that one, and waiting for it is waiting for nobody.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def out(self, source: torch.Tensor, target: torch.Tensor) -> Marked:
        compute = torch.cuda.current_stream(self.device)
        self._out.wait_stream(compute)
        self._out.wait_stream(self._back)  # ``target`` may have been read from
        with torch.cuda.stream(self._out):
            target.copy_(source, non_blocking=True)
        return self._out.record_event(), compute

    def back(self, source: torch.Tensor, after: Marked) -> tuple[torch.Tensor, Marked]:
        compute = torch.cuda.current_stream(self.device)
        target = torch.empty(source.numel(), dtype=source.dtype, device=self.device)
        self._back.wait_stream(compute)  # whose memory this was a moment ago
        self._back.wait_event(after[0])
        with torch.cuda.stream(self._back):
            target.copy_(source, non_blocking=True)
        return target, (self._back.record_event(), compute)

    def wait(self, copy: Marked) -> None:
        torch.cuda.current_stream(self.device).wait_event(copy[0])

    def forget(self, copy: Marked) -> None:
        event, compute = copy
        compute.wait_event(event)


def copier_for(device: torch.device) -> Copier:
    """Streams on CUDA devices, elsewhere a thread."""
    return StreamCopier(device) if device.type == "cuda" else ThreadCopier()
