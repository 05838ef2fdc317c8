"""A group of engine ranks, formed over a c10d store.

Each rank puts its peer info (an opaque block of bytes with its addresses) into the store and reads
those of all other ranks at once: two round trips, independent of the group's size. While it waits,
it checks that the ranks which have already joined are still alive.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from . import engine_library as engine

log = logging.getLogger("nearlinear_collectives")

MAX_POLL_INTERVAL = 0.1  # seconds between two looks into the store


def engine_error(status: int, text: str) -> Exception:
    """Convert an engine status to the exception type that c10d users expect."""
    from torch.distributed import DistBackendError

    return ValueError(text) if status == engine.BAD_ARGUMENT else DistBackendError(text)


def raise_for_status(status: int) -> None:
    """Raise the calling thread's last engine error unless ``status`` is OK."""
    if status != engine.OK:
        raise engine_error(status, engine.library().nlc_error().decode(errors="replace"))


class EngineGroup:
    """Owns the engine's group ``handle`` until :meth:`close` or :meth:`release`."""

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        *,
        timeout: timedelta,
        name: str = "group",
        global_ranks: Sequence[int] | None = None,
    ) -> None:
        lib = engine.library()
        ranks = (ctypes.c_int64 * size)(*(global_ranks or range(size)))
        options = engine.Options(rank, size, to_milliseconds(timeout), name.encode(), ranks)
        peer_info = ctypes.create_string_buffer(engine.PEER_INFO_BYTES)
        handle = ctypes.c_void_p()
        raise_for_status(lib.nlc_group_open(ctypes.byref(options), peer_info, ctypes.byref(handle)))
        self.handle: ctypes.c_void_p | None = handle
        self.process = os.getpid()
        try:
            deadline = time.monotonic() + timeout.total_seconds()
            peers = exchange_peer_info(store, peer_info.raw, rank, size, timeout, list(ranks), name)
            left = max(1, int(1000 * (deadline - time.monotonic())))
            raise_for_status(lib.nlc_group_connect(handle, b"".join(peers), left))
        except BaseException:
            self.close()
            raise

    def run(self, call: engine.Call) -> None:
        """Run a collective on this thread, after those already started."""
        raise_for_status(engine.library().nlc_run(self._open_handle(), ctypes.byref(call)))

    def start(self, call: engine.Call, done: Callable[[Exception | None], None]) -> None:
        """Start a collective on an engine thread.

        Args:
            call: The collective.
            done: Called on an engine thread with the collective's error, or None.
        """
        self._launch(engine.library().nlc_start, call, done)

    def post(self, call: engine.Call, done: Callable[[Exception | None], None]) -> Transfer:
        """Post a message; ``done`` is called as by :meth:`start`, or before this returns."""
        handle = ctypes.c_void_p()
        self._launch(engine.library().nlc_post, call, done, ctypes.byref(handle))
        return Transfer(handle)

    def _launch(
        self,
        function: Any,
        call: engine.Call,
        done: Callable[[Exception | None], None],
        *outputs: Any,
    ) -> None:
        key = next(_call_ids)
        _pending_callbacks[key] = done
        try:
            handle = self._open_handle()
            raise_for_status(function(handle, ctypes.byref(call), _on_call_ended, key, *outputs))
        except BaseException:
            _pending_callbacks.pop(key, None)
            raise

    def allocate_shared(self, bytes_per_rank: int) -> int | None:
        """Call nlc_shared_allocate; free the result with nlc_shared_free."""
        return engine.library().nlc_shared_allocate(self._open_handle(), bytes_per_rank)

    def describe(self) -> dict:
        """Return the group's ranks, nodes and network as the engine sees them."""
        return engine.read_json(engine.library().nlc_describe, self._open_handle())

    def set_timeout(self, timeout: timedelta) -> None:
        engine.library().nlc_group_set_timeout(self._open_handle(), to_milliseconds(timeout))

    def abort(self, reason: str) -> None:
        """Make all calls of this group fail, including those that are waiting."""
        if self.handle is not None:
            engine.library().nlc_group_abort(self.handle, reason.encode())

    def release(self) -> int:
        """Give up ownership and return the handle; the caller must close it."""
        handle, self.handle = self.handle, None
        assert handle is not None and handle.value is not None
        return handle.value

    def close(self) -> None:
        handle, self.handle = self.handle, None
        if handle is not None and os.getpid() == self.process:  # not in a forked child
            engine.library().nlc_group_close(handle)

    def _open_handle(self) -> ctypes.c_void_p:
        if self.handle is None:
            raise RuntimeError("the process group has been destroyed")
        return self.handle


class Transfer:
    """A message that was posted."""

    def __init__(self, handle: ctypes.c_void_p) -> None:
        self.handle = handle
        weakref.finalize(self, engine.library().nlc_transfer_free, handle).atexit = False

    def wait(self, timeout_ms: int) -> None:
        """Drive the message until its end, at most ``timeout_ms`` (0: no limit)."""
        raise_for_status(engine.library().nlc_transfer_wait(self.handle, timeout_ms))

    def rank(self) -> int:
        """Return the other rank, of the group."""
        return engine.library().nlc_transfer_rank(self.handle)


# The engine calls back with the id of the call, because it cannot hold a Python object.
_call_ids = itertools.count(1)
_pending_callbacks: dict[int, Callable[[Exception | None], None]] = {}


@engine.Done
def _on_call_ended(key: int, status: int, text: bytes) -> None:
    done = _pending_callbacks.pop(key)
    done(None if status == engine.OK else engine_error(status, text.decode(errors="replace")))


def to_milliseconds(duration: timedelta) -> int:
    return max(1, int(duration.total_seconds() * 1000))


def exchange_peer_info(
    store: Any,
    peer_info: bytes,
    rank: int,
    size: int,
    timeout: timedelta,
    global_ranks: Sequence[int],
    name: str,
) -> list[bytes]:
    """Publish this rank's peer info and return that of all ranks, in rank order.

    Raises:
        DistBackendError: A rank that had joined died, or a rank did not join within ``timeout``.
    """
    keys = [f"peer/{r}" for r in range(size)]
    store.set(keys[rank], peer_info)
    deadline = time.monotonic() + timeout.total_seconds()
    interval = 0.001
    while not store.check(keys):  # store.wait() would log a warning for every poll
        time.sleep(interval)
        interval = min(2 * interval, MAX_POLL_INTERVAL)
        if interval < MAX_POLL_INTERVAL:
            continue
        missing = [r for r in range(size) if not store.check([keys[r]])]
        for r in set(range(size)) - set(missing):
            if engine.library().nlc_peer_is_dead(bytes(store.get(keys[r]))):
                raise engine_error(
                    engine.PEER_DIED,
                    f"rank {global_ranks[r]} died while group '{name}' was being formed",
                )
        if time.monotonic() > deadline:
            raise engine_error(
                engine.TIMEOUT,
                f"group '{name}' could not be formed: rank(s) "
                f"{', '.join(str(global_ranks[r]) for r in missing)} did not join within "
                f"{timeout.total_seconds():g} s. Check that all ranks call the same "
                "init_process_group or new_group, and the logs of the missing ranks for errors",
            )
    try:
        return [bytes(peer) for peer in store.multi_get(keys)]
    except Exception:  # stores without the extended interface
        return [bytes(store.get(key)) for key in keys]
