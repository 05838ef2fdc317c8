"""Communication beside computation: a thread that runs collectives in the order they were given.

Accelerators have streams for this. On the CPU torch's streams do nothing and gloo's reduce-scatter
blocks its caller, so FSDP2 there waits for every byte. A `Lane` gives collectives to a thread of
its own: order, and so the order on every rank, is that of the calls; several collectives may be one
item, which keeps a second hop behind its first; and waiting for an item raises what it failed with.
"""

import queue
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from .. import counts
from ..errors import NearlinearError


class Item(dist.Work):
    """A piece of communication on its way; FSDP2 waits for it as for any other work."""

    def __init__(self, run: Callable[[], None]):
        super().__init__()
        self._run, self._done, self.error = run, threading.Event(), None

    def count_for(self, counters: list[counts.count_collectives]) -> None:
        """Have the counters open where this was given count it, and wait for it."""
        run = self._run

        def counted():
            with counts.also_here(counters):
                run()

        self._run = counted
        for counter in counters:
            counter.expect(self._done)

    def perform(self) -> None:
        try:
            self._run()
        except BaseException as error:  # SystemExit too: it ends a rank that is a thread
            self.error = error
        self._run = None  # and with it the tensors
        self._done.set()

    def refuse(self, error: BaseException) -> None:
        """End it without having run, because one before it failed."""
        self.error, self._run = error, None
        self._done.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        seconds = timeout.total_seconds() if timeout else None
        if not self._done.wait(seconds or None):
            raise NearlinearError(f"communication is still under way after {seconds:g} s")
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self.is_completed() and self.error is None

    def synchronize(self) -> None:
        """Nothing: host memory has no streams."""


class Lane:
    """Runs what it is given one after the other, on a daemon thread; ``inline``: at once, here."""

    def __init__(self, name: str, inline: bool = False):
        self.inline = inline
        self._items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._failed: list[BaseException] = []
        self.spans: list[tuple[str, float, float]] | None = None  # (label, begin, end) if asked for
        if not inline:
            threading.Thread(
                target=_serve, args=(self._items, self._failed), name=name, daemon=True
            ).start()
            weakref.finalize(self, self._items.put, None)

    def give(self, **parts: Callable[[], None]) -> Item:
        """Have ``parts`` called in a row, after all given before; returns what to wait for.

        Their names are for timelines. After a failure the group it happened on is of no more use:
        later items fail with it too.
        """

        def run():
            for label, part in parts.items():
                begin = time.perf_counter()
                part()
                if self.spans is not None:
                    self.spans.append((label, begin, time.perf_counter()))

        item = Item(run)
        if self.inline:
            item.perform()
            item.wait()
            return item
        counters = counts.open_here()
        if counters:
            item.count_for(counters)
        self._items.put(item)
        return item


def _serve(items: "queue.SimpleQueue[Item | None]", failed: list) -> None:
    with torch.no_grad():
        while (item := items.get()) is not None:
            if failed:
                item.refuse(failed[0])
                continue
            item.perform()
            if item.error is not None:
                failed.append(item.error)
            del item
