"""A group of the engine, formed over a c10d store.

Each rank puts one card of plain bytes into the store and reads all the others' at once: two
round trips, whatever the group's size. While it waits it looks whether a rank that has already
put its card has died meanwhile.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from nearlinear_collectives import engine_library as engine

log = logging.getLogger("nearlinear_collectives")

LONGEST_PAUSE = 0.1  # seconds between two looks into the store


def error_for(status: int, text: str) -> Exception:
    """The exception c10d users expect for an engine status."""
    from torch.distributed import DistBackendError

    return ValueError(text) if status == engine.BAD_ARGUMENT else DistBackendError(text)


def checked(status: int) -> None:
    if status != engine.OK:
        raise error_for(status, engine.library().nlc_error().decode(errors="replace"))


class Group:
    """Owns the engine's group ``handle`` until :meth:`close` or :meth:`release`."""

    def __init__(
        self,
        store,
        rank: int,
        size: int,
        *,
        timeout: timedelta,
        name: str = "group",
        global_ranks: Sequence[int] | None = None,
    ) -> None:
        lib = engine.library()
        ranks = (ctypes.c_int64 * size)(*(global_ranks or range(size)))
        options = engine.Options(rank, size, milliseconds(timeout), name.encode(), ranks)
        card = ctypes.create_string_buffer(engine.CARD_BYTES)
        handle = ctypes.c_void_p()
        checked(lib.nlc_group_open(ctypes.byref(options), card, ctypes.byref(handle)))
        self.handle: ctypes.c_void_p | None = handle
        self.process = os.getpid()
        try:
            deadline = time.monotonic() + timeout.total_seconds()
            cards = exchange(store, card.raw, rank, size, timeout, list(ranks), name)
            left = max(1, int(1000 * (deadline - time.monotonic())))
            checked(lib.nlc_group_connect(handle, b"".join(cards), left))
        except BaseException:
            self.close()
            raise

    def run(self, call: engine.Call) -> None:
        """One collective on this thread, behind those that were started."""
        checked(engine.library().nlc_run(self._open(), ctypes.byref(call)))

    def start(self, call: engine.Call, done: Callable[[Exception | None], None]) -> None:
        """One collective on a thread of the engine; ``done`` is called with its failure or None."""
        key = next(numbers)
        under_way[key] = done
        try:
            checked(engine.library().nlc_start(self._open(), ctypes.byref(call), ended, key))
        except BaseException:
            del under_way[key]
            raise

    def allocate_shared(self, bytes_per_rank: int) -> int | None:
        """See nlc_shared_allocate; nlc_shared_free gives it back."""
        return engine.library().nlc_shared_allocate(self._open(), bytes_per_rank)

    def describe(self) -> dict:
        return engine.read_json(engine.library().nlc_describe, self._open())

    def set_timeout(self, timeout: timedelta) -> None:
        engine.library().nlc_group_set_timeout(self._open(), milliseconds(timeout))

    def abort(self, reason: str) -> None:
        """Make the calls of this group fail, those that wait included."""
        if self.handle is not None:
            engine.library().nlc_group_abort(self.handle, reason.encode())

    def release(self) -> int:
        """Hand the group over; whoever takes the number closes it."""
        handle, self.handle = self.handle, None
        assert handle is not None and handle.value is not None
        return handle.value

    def close(self) -> None:
        handle, self.handle = self.handle, None
        if handle is not None and os.getpid() == self.process:  # a forked child leaves it alone
            engine.library().nlc_group_close(handle)

    def _open(self) -> ctypes.c_void_p:
        if self.handle is None:
            raise RuntimeError("the process group has been destroyed")
        return self.handle


# The engine is given a number for each call that was started, and calls back with it.
numbers = itertools.count(1)
under_way: dict[int, Callable[[Exception | None], None]] = {}


@engine.Done
def ended(key: int, status: int, text: bytes) -> None:
    done = under_way.pop(key)
    done(None if status == engine.OK else error_for(status, text.decode(errors="replace")))


def milliseconds(span: timedelta) -> int:
    return max(1, int(span.total_seconds() * 1000))


def exchange(
    store,
    card: bytes,
    rank: int,
    size: int,
    timeout: timedelta,
    global_ranks: Sequence[int],
    name: str,
) -> list[bytes]:
    """All ranks' cards, in rank order."""
    keys = [f"card/{r}" for r in range(size)]
    store.set(keys[rank], card)
    deadline = time.monotonic() + timeout.total_seconds()
    pause = 0.001
    while not store.check(keys):  # store.wait() would print a warning for every look around
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
        if pause < LONGEST_PAUSE:
            continue
        missing = [r for r in range(size) if not store.check([keys[r]])]
        for r in set(range(size)) - set(missing):
            if engine.library().nlc_card_is_dead(bytes(store.get(keys[r]))):
                raise error_for(
                    engine.PEER_DIED,
                    f"rank {global_ranks[r]} died while group '{name}' was being formed",
                )
        if time.monotonic() > deadline:
            raise error_for(
                engine.TIMEOUT,
                f"group '{name}' could not be formed: rank(s) "
                f"{', '.join(str(global_ranks[r]) for r in missing)} did not join within "
                f"{timeout.total_seconds():g} s. Do they all call the same init_process_group or "
                "new_group, and did any end with an error before?",
            )
    read = getattr(store, "multi_get", None)
    try:
        return [bytes(card) for card in read(keys)]
    except Exception:  # stores without the extended interface
        return [bytes(store.get(key)) for key in keys]
