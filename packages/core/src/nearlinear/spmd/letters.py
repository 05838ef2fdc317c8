"""Point-to-point messages among ranks that are threads: a box of letters for every pair and tag.

Sending copies and never waits, as a small message does on a network. The n-th receive between two
ranks gets the n-th message, also where receives are waited for in another order.
"""

import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

_ALIVE = 0.05  # seconds between looks whether another rank has failed


class Letters:
    """All boxes of a run. ``ending()`` says whether a rank has failed: then waiting ends."""

    def __init__(self, ending: Callable[[], bool]):
        self.ending = ending
        self.changed = threading.Condition()
        self.clear()

    def clear(self) -> None:
        """Forget what a run has left."""
        self.boxes: dict[tuple, dict[int, list[torch.Tensor]]] = defaultdict(dict)
        self.sent: dict[tuple, int] = defaultdict(int)
        self.asked: dict[tuple, int] = defaultdict(int)

    def send(self, box: tuple, tensors: list[torch.Tensor]) -> dist.Work:
        """Put a copy of ``tensors`` into ``box``: (group, from, to, tag)."""
        letter = [tensor.detach().clone() for tensor in tensors]
        with self.changed:
            self.boxes[box][self.sent[box]] = letter
            self.sent[box] += 1
            self.changed.notify_all()
        return Delivery(lambda: None)

    def receive(self, box: tuple, tensors: list[torch.Tensor]) -> dist.Work:
        """What to wait for until the next letter of ``box`` is in ``tensors``."""
        with self.changed:
            number = self.asked[box]
            self.asked[box] += 1

        def fetch() -> None:
            with self.changed:
                while number not in self.boxes[box]:
                    if self.ending():
                        sys.exit("another rank failed")
                    self.changed.wait(_ALIVE)
                letter = self.boxes[box].pop(number)
            with torch.no_grad():
                for tensor, value in zip(tensors, letter, strict=True):
                    tensor.copy_(value)

        return Delivery(fetch)


class Delivery(dist.Work):
    """A message on its way; it arrives when it is waited for."""

    def __init__(self, fetch: Callable[[], None]):
        super().__init__()
        self._fetch = fetch

    def wait(self, timeout: timedelta | None = None) -> bool:
        fetch, self._fetch = self._fetch, lambda: None
        fetch()
        return True
