"""Concurrent work in daemon threads, without ``concurrent.futures``.

A ``concurrent.futures`` pool accepts no work after the main thread has ended, but the last
checkpoint of a script may still be uploading then.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

NICENESS = 10
"""Priority of background threads: on a core that computes as well, they get a tenth of it."""
CORE_SHARE, SMALLEST_SHARE = 0.5, 0.1
"""Largest and smallest share of a core that a background thread uses, and of the bandwidth that one
core can use: a tenth for each core that a rank has."""

T = TypeVar("T")
R = TypeVar("R")


def run_in_thread(work: Callable[[], R]) -> Callable[[], R]:
    """Start ``work()`` in a new thread. Return a function that waits for its result.

    The returned function re-raises an exception of ``work``.
    """
    results: list[R] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # re-raised in the waiting thread
            errors.append(error)

    thread = threading.Thread(target=run, name="nearlinear part", daemon=True)
    thread.start()

    def result() -> R:
        thread.join()
        if errors:
            raise errors[0]
        return results[0]

    return result


def map_concurrent(work: Callable[[T], R], items: Iterable[T], limit: int) -> Iterator[R]:
    """Yield ``work(item)`` for each item in order, running at most ``limit`` calls ahead.

    Raises the first error after the calls in flight have ended.
    """
    in_flight: deque[Callable[[], R]] = deque()
    try:
        for item in items:
            in_flight.append(run_in_thread(lambda item=item: work(item)))
            if len(in_flight) == limit:  # before the next item is drawn, which takes memory
                yield in_flight.popleft()()
        while in_flight:
            yield in_flight.popleft()()
    finally:
        for result in in_flight:
            with contextlib.suppress(Exception):
                result()


class Pace:
    """Bound the share of cores and bandwidth that background threads take from training.

    Threads run at low priority, so that computation on the same core takes precedence, and rest in
    proportion to the processor time that they used. `hurry` ends the rests once somebody waits.
    """

    def __init__(self):
        self._hurried = threading.Event()

    def hurry(self) -> None:
        """Continue without rests."""
        self._hurried.set()

    def pace(self, chunks: Iterable[T]) -> Iterator[T]:
        """Yield ``chunks`` on a background thread, and rest after the work on each of them."""
        if sys.platform == "linux":  # where a priority belongs to a thread
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        rest, begin = 1 / _core_share() - 1, time.thread_time()
        for chunk in chunks:
            yield chunk
            used = time.thread_time() - begin
            if threading.main_thread().is_alive():  # otherwise the process waits to end
                self._hurried.wait(used * rest)
            begin = time.thread_time()


def _core_share() -> float:
    """Return a share that leaves the cores of a machine to the ranks that compute on them."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(CORE_SHARE, SMALLEST_SHARE * max(1.0, (os.cpu_count() or 1) / ranks))
