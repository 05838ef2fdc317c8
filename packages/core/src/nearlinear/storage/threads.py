"""Concurrent work in daemon threads, without ``concurrent.futures``.

A ``concurrent.futures`` pool accepts no work after the main thread has ended, but the last
checkpoint of a script may still be uploading then.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

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
