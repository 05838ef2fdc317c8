"""Work in threads, for who must not count on ``concurrent.futures``.

Its pools take nothing more once the main thread has ended, and that is when the last checkpoint of
a script may still be on its way.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def begun(work: Callable[[], R]) -> Callable[[], R]:
    """``work()`` in a thread of its own; what to call for what it returns, or raises."""
    answer: list[R] = []
    fault: list[BaseException] = []

    def run() -> None:
        try:
            answer.append(work())
        except BaseException as error:  # raised where it is waited for
            fault.append(error)

    thread = threading.Thread(target=run, name="nearlinear part", daemon=True)
    thread.start()

    def result() -> R:
        thread.join()
        if fault:
            raise fault[0]
        return answer[0]

    return result


def side_by_side(work: Callable[[T], R], items: Iterable[T], at_once: int) -> Iterator[R]:
    """``work`` of every item, in their order; no more than ``at_once`` are begun and not given out.

    The first error is raised, once what is under way has ended.
    """
    under_way: deque[Callable[[], R]] = deque()
    try:
        for item in items:
            under_way.append(begun(lambda item=item: work(item)))
            if len(under_way) == at_once:  # before another item is asked for, which takes memory
                yield under_way.popleft()()
        while under_way:
            yield under_way.popleft()()
    finally:
        for result in under_way:
            with contextlib.suppress(Exception):
                result()
