"""Collectives on a thread of their own, in the order in which they are submitted.

Accelerators overlap communication with computation by streams. On the CPU torch's streams do
nothing and gloo's reduce-scatter blocks its caller, so that FSDP2 waits for every byte. A
`CommThread` runs collectives beside the caller's computation. Their order on every rank is the
order of the calls to `CommThread.submit`.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from ..errors import NearlinearError
from . import collectives


class CommWork(dist.Work):
    """Submitted communication. FSDP2 waits for it as for any other ``Work``."""

    def __init__(self, run: Callable[[], None]):
        super().__init__()
        self._run: Callable[[], None] | None = run
        self._done = threading.Event()
        self.error: BaseException | None = None

    def count_for(self, counters: list[collectives.count_collectives]) -> None:
        """Count the collectives of this work in ``counters``, which wait for it when they close."""
        run = self._run
        assert run is not None

        def run_counted() -> None:
            with collectives.count_here_too(counters):
                run()

        self._run = run_counted
        for counter in counters:
            counter.expect(self._done)

    def perform(self) -> None:
        """Run the communication and keep its error."""
        assert self._run is not None
        try:
            self._run()
        except BaseException as error:  # SystemExit too: it ends a rank that is a thread
            self.error = error
        self._run = None  # frees the tensors
        self._done.set()

    def fail(self, error: BaseException) -> None:
        """Complete without running, because earlier work on the thread failed with ``error``."""
        self.error, self._run = error, None
        self._done.set()

    def wait(self, timeout: timedelta | None = None) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride] torch declares a default object
        """Block until the work is complete. Raises the error it failed with."""
        seconds = timeout.total_seconds() if timeout else None
        if not self._done.wait(seconds or None):
            raise NearlinearError(f"communication did not complete within {seconds:g} s")
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self.is_completed() and self.error is None

    def synchronize(self) -> None:
        """Do nothing: host memory has no streams."""


class CommThread:
    """Daemon thread that runs submitted work one after another.

    With ``inline=True`` work runs in the caller's thread at once.
    """

    def __init__(self, name: str, inline: bool = False):
        self.inline = inline
        self._queue: queue.SimpleQueue[CommWork | None] = queue.SimpleQueue()
        self._failed: list[BaseException] = []
        self.spans: list[tuple[str, float, float]] | None = None
        """(label, begin, end) of every step run, in seconds; recorded if set to a list."""
        if not inline:
            threading.Thread(
                target=_serve, args=(self._queue, self._failed), name=name, daemon=True
            ).start()
            weakref.finalize(self, self._queue.put, None)

    def submit(self, **steps: Callable[[], None]) -> CommWork:
        """Run ``steps`` in a row, after all work submitted before, and return them as one work.

        The names of the steps label their `spans`. After a failure the process group is unusable:
        all later work fails with the same error.
        """

        def run() -> None:
            for label, step in steps.items():
                begin = time.perf_counter()
                step()
                if self.spans is not None:
                    self.spans.append((label, begin, time.perf_counter()))

        work = CommWork(run)
        if self.inline:
            work.perform()
            work.wait()
            return work
        counters = collectives.open_counters()
        if counters:
            work.count_for(counters)
        self._queue.put(work)
        return work


def _serve(works: queue.SimpleQueue[CommWork | None], failed: list[BaseException]) -> None:
    with torch.no_grad():
        while (work := works.get()) is not None:
            if failed:
                work.fail(failed[0])
                continue
            work.perform()
            if work.error is not None:
                failed.append(work.error)
            del work
