"""Watchdog thread of each rank: send heartbeats, learn of the job's first fault, end the run.

Store traffic grows linearly with the number of ranks: each rank writes its own heartbeat and reads
that of rank 0; rank 0 reads all of them and diagnoses. The watchdog uses no collective and never
waits for an accelerator.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from .. import _torch
from ..errors import NearlinearError
from . import diagnosis, process_exit, rendezvous, runtime, thread_backend
from .diagnosis import Limits, dead, diagnose, never_started
from .heartbeat import STORE_ERRORS, Fault, Heartbeat, HeartbeatChannel, Operation, pid_namespace

log = logging.getLogger(__name__)

HEARTBEAT_INTERVAL = 1.0  # seconds
FIRST_INTERVAL = 0.1
"""Seconds between heartbeats until all ranks have sent one.

A rank that dies before the others have seen its first heartbeat leaves no trace of its last
operation, since its memory can only be opened while it lives.
"""
HEARTBEAT_TIMEOUT = 60.0  # seconds without a heartbeat until a rank counts as dead
HEARTBEAT_TIMEOUT_AFTER_FAILURE = 4.0  # seconds, once a collective has failed
EXIT_DELAY = 2.0  # seconds between the last connection of a process and its end
EXIT_GRACE = 5.0  # seconds for a rank to exit by itself, with its own error
HANDLER_TIMEOUT = 900.0  # seconds for on_fault, e.g. for an emergency checkpoint
UPDATE_TIMEOUT = 30.0  # seconds for a running state update to finish before on_fault starts

_watches_per_store: weakref.WeakKeyDictionary[dist.Store, int] = weakref.WeakKeyDictionary()


def watch_ranks(
    timeout: float = 300.0,
    on_fault: Callable[[Fault, bool], str] | None = None,
    *,
    setting: str = "timeout",
    silence: float = HEARTBEAT_TIMEOUT,
) -> Watchdog:
    """Watch the ranks of this job while a ``with`` block runs. A collective call.

    ::

        with nl.watch_ranks(timeout=300) as watch:
            for step in range(steps):
                watch.at(f"step {step}, loading a batch")
                batch = next(loader)
                watch.at(f"step {step}, forward and backward")
                ...

    A rank that dies, or makes no progress for ``timeout`` seconds while other ranks wait for it,
    ends the block on all other ranks with `RankFailure`. The message names the rank, its host and
    its last operation. A rank that raises an error ends the block on the others in the same way and
    raises its own error. Operations that are slow on all ranks are not a fault. A process that
    cannot leave the operation it is stuck in is terminated with exit code 143.

    Args:
        timeout: Seconds without progress. 0 disables the watchdog, and so does a job of one rank.
        on_fault: Called as ``on_fault(fault, consistent)`` by a thread of every rank that is able
            to, before the run ends. The returned text is appended to the error message.
            ``consistent`` is True if this rank is not inside of a `Watchdog.changing` block and
            will not enter one, so that its state may be saved.
        setting: Name of the setting that holds ``timeout``, for error messages.
        silence: Seconds without a sign of life of a process until it counts as dead.
    """
    return Watchdog(timeout, on_fault, setting, silence)


class Watchdog:
    """Context manager returned by `watch_ranks`."""

    def __init__(
        self,
        timeout: float,
        on_fault: Callable[[Fault, bool], str] | None,
        setting: str,
        silence: float,
    ):
        self.operation: Operation = Operation()
        self.fault: Fault | None = None
        """The fault that ends the run."""
        self.outcome: str = ""
        """Text returned by ``on_fault``."""
        self._timeout, self._on_fault, self._setting = timeout, on_fault, setting
        self._silence = silence
        self._interval = min(HEARTBEAT_INTERVAL, timeout / 8)
        self._changing, self._inconsistent = threading.Lock(), False
        self._handled, self._exiting, self._wake = (threading.Event() for _ in range(3))
        self._collective_failed, self._sequence, self._rank0_host = False, 0, "its host"
        self._own_fault: Fault | None = None  # reported to all ranks with the next heartbeat
        self._store_answers, self._all_heard = True, False
        self._thread: threading.Thread | None = None

    def at(self, name: str, patience: float = 1.0) -> None:
        """Start the next operation of this rank, named as in 'stuck in "step 7, forward"'.

        All ranks call this method with the same operations in the same order. ``patience``
        multiplies the timeout for this operation. Raises RankFailure once the run is over.
        """
        self._raise_if_over()
        self.operation.begin(name, patience)

    @contextlib.contextmanager
    def changing(self, name: str) -> Iterator[None]:
        """Start an operation that updates the training state, which must not be saved meanwhile."""
        self.at(name)
        with self._changing:
            if self.fault is None:
                self._inconsistent = True
                yield
                self._inconsistent = False
                return
        self._raise_if_over()

    def __enter__(self) -> Watchdog:
        now = runtime.current()
        self._rank, self._world = now.rank, now.mesh.world
        self.fault, self.outcome = None, ""
        self._collective_failed = self._inconsistent = False
        self._own_fault, self._store_answers, self._all_heard = None, True, False
        for event in (self._handled, self._exiting, self._wake):
            event.clear()
        if self._timeout and self._world > 1:
            store = _torch.job_store()
            number = _watches_per_store[store] = _watches_per_store.get(store, 0) + 1
            self._channel = HeartbeatChannel(store, str(number), self._rank)
            self._ordered_progress = now.mesh.pipeline == 1  # stages have different blocks
            self._ranks_are_threads = runtime.ranks_are_threads()
            self._watched_thread = threading.get_ident()
            if not self._ranks_are_threads:
                self.operation.share()
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if error is not None and not getattr(error, "everywhere", False):
                self._end_with(error)
        finally:
            self._exiting.set()
            self._wake.set()
            if self._thread is not None:
                self._thread.join(EXIT_GRACE)
                if not self._thread.is_alive():
                    self.operation.close()

    def _end_with(self, error: BaseException) -> None:
        """Attribute ``error`` to a rank; raise RankFailure if another rank caused it."""
        stopped = isinstance(error, SystemExit) and runtime.ranks_are_threads()
        leaving = isinstance(error, SystemExit | KeyboardInterrupt) and not stopped
        if not (isinstance(error, Exception) or stopped or leaving):
            return
        in_communication = isinstance(error, dist.DistError) or (
            not (leaving or isinstance(error, NearlinearError))
            and diagnosis.failed_in_communication(error)
        )
        if self._thread is not None and (in_communication or stopped):
            self._collective_failed = True
            self._wake.set()
            patience = 0 if stopped else HEARTBEAT_TIMEOUT_AFTER_FAILURE
            self._handled.wait(3 * self._interval + patience)
        if self.fault is None and not stopped:
            self._report_own(error)
        if self.fault is None:
            return
        self._handled.wait()
        by_peer = self.fault.rank != self._rank and (in_communication or stopped)
        if not leaving and (self.fault.kind != "failed" or by_peer):
            raise self.fault.error(self.outcome) from error
        if self.outcome:
            error.add_note(self.outcome)
            log.error("rank %d: %s", self._rank, self.outcome)

    def _report_own(self, error: BaseException) -> None:
        """Report this rank's own ``error`` to all ranks and wait until it is handled."""
        if isinstance(error, SystemExit):
            how, cause = "ended the run", f"sys.exit({error.code!r})"
        elif isinstance(error, KeyboardInterrupt):
            how, cause = "was interrupted", "SIGINT (Ctrl-C)"
        else:
            how, cause = "failed", f"{type(error).__name__}: {error}".partition("\n")[0]
        line = diagnosis.describe_error(error) if how == "ended the run" else ""
        place = f'"{self.operation.name}"' + (f" ({line})" if line else "")
        where = f"rank {self._rank} (host {runtime.host()}) {how} in {place}"
        fault = Fault("failed", self._rank, f"{where}: {cause}")
        if self._thread is not None:
            self._own_fault = fault
            self._wake.set()
            self._handled.wait()
        elif self._world == 1:
            self.fault = fault
            self._handle()
            self._handled.set()

    def _raise_if_over(self) -> None:
        if self.fault is not None:
            self._handled.wait()
            raise self.fault.error(self.outcome)

    # Methods of the watchdog thread.

    def _watch(self) -> None:
        try:
            while self.fault is None and not self._exiting.is_set():
                self.fault = self._exchange_in_time()
                if self.fault is None:
                    first = min(self._interval, FIRST_INTERVAL)
                    self._wake.wait(self._interval if self._all_heard else first)
                    self._wake.clear()
            if self.fault is not None:
                self._handle()
            if self._store_answers:
                with contextlib.suppress(*STORE_ERRORS):
                    self._say_goodbye()
        finally:
            self._handled.set()
        if self.fault is not None:
            self._terminate(self.fault)

    def _exchange_in_time(self) -> Fault | None:
        """Run `_exchange`; return a fault if the job's store does not answer for too long.

        A read from the store never ends if the process that holds it is stopped, or if the network
        drops all packets. A thread of its own therefore waits for it.
        """
        results: list[Fault | None] = []
        thread = threading.Thread(
            target=lambda: results.append(self._exchange()), name="heartbeat", daemon=True
        )
        thread.start()
        waited = 0.0  # counted by polls, so that a process that was suspended waits on
        while True:
            thread.join(self._interval)
            if not thread.is_alive():
                return results[0]
            waited += self._interval
            if waited > self._heartbeat_timeout(self._collective_failed):
                self._store_answers = False
                return self._own_fault or self._silent_store(waited)

    def _silent_store(self, seconds: float) -> Fault:
        """Describe a store that does not answer, from this rank's point of view."""
        first = self._channel.last_status(0)
        if self._rank and first.heartbeat is not None and not rendezvous.launched_by_agent():
            return dead(0, first, first.heartbeat)  # rank 0 holds the store
        return Fault(
            "store_lost",
            None,
            f"the job's store has not answered for {seconds:.0f} s: the process that holds it, "
            f"rank 0's or its launcher's on {self._rank0_host}, is stopped, or the network is "
            "down. Check both, then restart the run.",
        )

    def _exchange(self) -> Fault | None:
        """Send one heartbeat and return the fault of the job, if any."""
        try:
            self._send_heartbeat()
            if self._own_fault is not None:
                return self._channel.report(self._own_fault)
            return self._channel.fault() or self._diagnose()
        except STORE_ERRORS as error:
            log.debug("store of the job: %s", error)
            rank0_holds_it = self._rank and not rendezvous.launched_by_agent()
            first = self._channel.last_status(0, EXIT_DELAY if rank0_holds_it else 0.0)
            if first.process_exited and first.heartbeat is not None:
                return dead(0, first, first.heartbeat)
            return Fault(
                "store_lost",
                None,
                "the connection to the job's store is lost: the process that holds it, rank 0's or "
                f"its launcher's on {self._rank0_host}, has died. Check its log, then restart the "
                "run.",
            )

    def _say_goodbye(self) -> None:
        """Send the last heartbeat. Rank 0, which may hold the store, waits for the others."""
        if self.fault is None:
            self._send_heartbeat()
            return
        self._channel.acknowledge()
        absent = self.fault.kind in ("dead", "exited")
        deadline = time.monotonic() + EXIT_GRACE
        while self._rank == 0 and self._channel.acknowledged() < self._world - absent:
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)

    def _send_heartbeat(self) -> None:
        in_collective, source_line = diagnosis.describe_thread(self._watched_thread)
        current, now = self.operation, time.monotonic()
        self._sequence += 1
        heartbeat = Heartbeat(
            sequence=self._sequence,
            host=runtime.host(),
            pid=os.getpid(),
            pid_namespace=pid_namespace(),
            operation=current.place,
            operation_index=current.index,
            progress=current.progress,
            seconds_since_progress=max(0.0, now - current.since),
            patience=current.patience,
            in_collective=in_collective,
            source_line=source_line,
            exited=self._exiting.is_set(),
            collective_failed=self._collective_failed,
            shared_fd=current.shared_fd,
            thread=self._watched_thread,
        )
        self._channel.send(heartbeat)

    def _diagnose(self) -> Fault | None:
        """Diagnose all ranks on rank 0, and rank 0 itself on the others."""
        first = self._channel.status(0)
        if first.heartbeat is not None:
            self._rank0_host, self._all_heard = first.heartbeat.host, True
        if self._rank and first.heartbeat is None:
            late = first.seconds_since_heartbeat > self._timeout
            found = never_started(0, first) if late else None
        elif self._rank and first.heartbeat is not None and not first.heartbeat.exited:
            limit = self._heartbeat_timeout(self._collective_failed)
            lost = first.process_exited or first.seconds_since_heartbeat > limit
            found = dead(0, first, first.heartbeat) if lost else None
        else:
            ranks = [self._channel.status(rank) for rank in range(self._world)]
            self._all_heard = all(status.heartbeat is not None for status in ranks)
            failed = any(r.heartbeat is not None and r.heartbeat.collective_failed for r in ranks)
            limits = Limits(self._timeout, self._heartbeat_timeout(failed), self._setting)
            found = diagnose(ranks, limits, ordered_progress=self._ordered_progress)
        return self._channel.report(found) if found else None

    def _heartbeat_timeout(self, collective_failed: bool) -> float:
        limit = HEARTBEAT_TIMEOUT_AFTER_FAILURE if collective_failed else self._silence
        return min(limit, self._silence, self._timeout)

    def _handle(self) -> None:
        """Call ``on_fault`` once no state update is running."""
        consistent = self._changing.acquire(timeout=UPDATE_TIMEOUT)
        if self._on_fault is not None:
            self.outcome = self._call_handler(self._on_fault, consistent and not self._inconsistent)
        if consistent:
            self._changing.release()

    def _call_handler(self, on_fault: Callable[[Fault, bool], str], consistent: bool) -> str:
        """Run ``on_fault`` on a thread of its own, since it may get stuck; return its text."""
        results = [f"the fault handler did not finish within {HANDLER_TIMEOUT:.0f} s"]

        def call() -> None:
            assert self.fault is not None
            try:
                results.append(on_fault(self.fault, consistent))
            except Exception as error:
                log.exception("fault handler")
                results.append(f"the fault handler failed: {error}")

        thread = threading.Thread(target=call, name="fault handler", daemon=True)
        thread.start()
        thread.join(HANDLER_TIMEOUT)
        return results[-1]

    def _terminate(self, fault: Fault) -> None:
        """Make the watched thread exit, whatever operation it is in."""
        error = fault.error(self.outcome)
        if self._ranks_are_threads:
            if fault.kind != "failed":  # the failing rank's own error ends the others
                thread_backend.end_collectives(error)
            return
        own_stall = fault.kind == "stalled" and fault.rank == self._rank
        if not own_stall and self._exiting.wait(EXIT_GRACE):
            return
        try:
            process_exit.leave_error(str(error), by_peer=fault.rank != self._rank)
            print(f"[rank {self._rank}] {error.word}: {error}", file=sys.stderr, flush=True)
            sys.stdout.flush()
        finally:  # also with a full disk
            os._exit(error.exit_code)
