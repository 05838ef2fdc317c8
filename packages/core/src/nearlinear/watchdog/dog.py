"""The thread of a rank that tells what it does, hears of the job's first fault, and ends the run.

What the store carries grows with the ranks, not their square: each sends its own beat and reads
that of rank 0, which reads them all and judges.
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

import torch.distributed as dist

from .. import _torch, leaving, runtime
from ..errors import NearlinearError
from ..spmd import threads
from . import stack
from .alarm import Alarm
from .beat import Beat, Operation
from .judge import Limits, absent, judge, silent
from .post import Post, StoreError, house

log = logging.getLogger(__name__)

EVERY = 1.0
"""seconds between two beats"""
SILENT, SILENT_AND_MISSED = 60.0, 4.0
"""seconds without a beat until a rank counts as dead: by themselves, and if a collective failed"""
GRACE = 5.0
"""seconds in which a rank can leave by itself, with its own error, once the run has to end"""
HANDLING = 900.0
"""seconds that what is done after an alarm may take"""
CHANGING = 30.0
"""seconds that a change of the state, as in an optimizer's step, may still take then"""

_opened: weakref.WeakKeyDictionary[dist.Store, int] = weakref.WeakKeyDictionary()


def watch_ranks(
    timeout: float = 300.0,
    on_alarm: Callable[[Alarm, bool], str] | None = None,
    *,
    setting: str = "timeout",
) -> Watchdog:
    """Watch the ranks of this job while a ``with`` block runs, on every rank.

    ::

        with nl.watch_ranks(timeout=300) as watch:
            for step in range(steps):
                watch.at(f"step {step}, loading a batch")
                batch = next(loader)
                watch.at(f"step {step}, forward and backward")
                ...

    A rank that dies, or stands still for ``timeout`` seconds while others wait for it, ends the
    block on all others with `RankLost`, which names the rank, its host, its last operation and
    since when. So does a rank that raises an error, which the others would wait for; it raises its
    own. Slowness is no fault: ranks that take long for the same operation, all of them, are left
    in peace. A process that does not come out of what it is stuck in is ended, with exit code 143.

    ``on_alarm(alarm, steady)`` is called by a thread of every rank that can, before anything ends;
    what it returns is said beside the alarm. ``steady``: the rank is not inside of a block of
    `Watchdog.changing`, and will not enter one. ``setting``: how messages call ``timeout``. With
    ``timeout=0``, and in a job of one rank, nobody watches. The block is a collective call.
    """
    return Watchdog(timeout, on_alarm, setting)


class Watchdog:
    """What `watch_ranks` returns."""

    def __init__(self, timeout: float, on_alarm: Callable[[Alarm, bool], str] | None, setting: str):
        self.operation = Operation()
        self.alarm: Alarm | None = None
        """the fault that ends the run"""
        self.outcome = ""
        """what ``on_alarm`` said of it"""
        self._timeout, self._on_alarm, self._setting = timeout, on_alarm, setting
        self._every = min(EVERY, timeout / 8)
        self._changing, self._torn = threading.Lock(), False
        self._handled, self._leaving, self._wake = (threading.Event() for _ in range(3))
        self._missed, self._beats, self._first_host = False, 0, "its host"
        self._thread: threading.Thread | None = None

    def at(self, text: str, patience: float = 1.0) -> None:
        """What this rank does from now on, in words that go on "rank 3 hangs at ...".

        All ranks call it alike: who is at an earlier one is late. ``patience`` is how many times
        ``timeout`` it may take. Raises RankLost where the run is over.
        """
        self._leave_if_over()
        self.operation.begin(text, patience)

    @contextlib.contextmanager
    def changing(self, text: str) -> Iterator[None]:
        """`at`, around what changes the state of a run: until it is done, nobody may save that."""
        self.at(text)
        with self._changing:
            if self.alarm is None:
                self._torn = True
                yield
                self._torn = False
                return
        self._leave_if_over()

    def __enter__(self) -> Watchdog:
        now = runtime.current()
        self._rank, self._world = now.rank, now.mesh.world
        self.alarm, self.outcome, self._missed, self._torn = None, "", False, False
        for event in (self._handled, self._leaving, self._wake):
            event.clear()
        if self._timeout and self._world > 1:
            store = _torch.job_store()
            number = _opened[store] = _opened.get(store, 0) + 1
            self._post = Post(store, str(number), self._rank)
            self._comparable = now.mesh.pipeline == 1  # else stages have blocks of their own
            self._ranks_are_threads = runtime.ranks_are_threads()
            self._watched = threading.get_ident()
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind, error: BaseException | None, trace) -> None:
        try:
            if error is not None and not getattr(error, "everywhere", False):
                self._end_with(error)
        finally:
            self._leaving.set()
            self._wake.set()
            if self._thread is not None:
                self._thread.join(GRACE)

    def _end_with(self, error: BaseException) -> None:
        """Find out whose fault ``error`` is; raise that if it comes of another's."""
        stopped = isinstance(error, SystemExit) and runtime.ranks_are_threads()
        if not (isinstance(error, Exception) or stopped):
            return
        by_others = isinstance(error, dist.DistError) or (
            not isinstance(error, NearlinearError) and stack.failed_in_communication(error)
        )
        if self._thread is not None and (by_others or stopped):
            self._missed = True
            self._wake.set()
            self._handled.wait(3 * self._every + (0 if stopped else SILENT_AND_MISSED))
        if self.alarm is None and not stopped:
            self._fail(error)
        if self.alarm is None:
            return
        self._handled.wait()
        of_another = self.alarm.rank != self._rank and (by_others or stopped)
        if self.alarm.kind != "failed" or of_another:
            raise self.alarm.error(self.outcome) from error
        if self.outcome:
            error.add_note(self.outcome)
            log.error("rank %d: %s", self._rank, self.outcome)

    def _fail(self, error: Exception) -> None:
        """Let all know of this rank's own ``error``, and have it dealt with."""
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        who = f"rank {self._rank} on {runtime.host()} has failed at {self.operation.text}"
        alarm = Alarm("failed", self._rank, f"{who}: {what}")
        if self._thread is not None:
            with contextlib.suppress(*StoreError):  # the thread will say so
                self._post.raise_alarm(alarm)
            self._wake.set()
            self._handled.wait()
        elif self._world == 1:
            self.alarm = alarm
            self._handle()
            self._handled.set()

    def _leave_if_over(self) -> None:
        if self.alarm is not None:
            self._handled.wait()
            raise self.alarm.error(self.outcome)

    # What the thread does.

    def _watch(self) -> None:
        try:
            while self.alarm is None and not self._leaving.is_set():
                self.alarm = self._look()
                if self.alarm is None:
                    self._wake.wait(self._every)
                    self._wake.clear()
            if self.alarm is not None:
                self._handle()
            with contextlib.suppress(*StoreError):
                self._part()
        finally:
            self._handled.set()
        if self.alarm is not None:
            self._end(self.alarm)

    def _look(self) -> Alarm | None:
        """Beat once; the alarm, if there is one."""
        try:
            self._tell()
            return self._post.alarm() or self._judge()
        except StoreError as error:
            log.debug("the job's store: %s", error)
            return Alarm(
                "store",
                None,
                "the connection to the job's store is lost: the process that holds it, rank 0's or "
                f"its launcher's on {self._first_host}, has died; see its log, and start the run "
                "again",
            )

    def _part(self) -> None:
        """The last word. Rank 0, which may hold the store, lets the others have theirs first."""
        if self.alarm is None:
            self._tell()
            return
        self._post.hear_out()
        absent = self.alarm.kind in ("silent", "left")
        deadline = time.monotonic() + GRACE
        while self._rank == 0 and self._post.heard_out() < self._world - absent:
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)

    def _tell(self) -> None:
        waits, line = stack.of_thread(self._watched)
        what, now = self.operation, time.monotonic()
        self._beats += 1
        beat = Beat(
            number=self._beats,
            host=runtime.host(),
            pid=os.getpid(),
            house=house(),
            doing=f"{what.text}, {what.inside}" if what.inside else what.text,
            count=what.count,
            place=what.place,
            still=now - what.since,
            patience=what.patience,
            waits=waits,
            at=line,
            left=self._leaving.is_set(),
            missed=self._missed,
        )
        self._post.tell(beat)

    def _judge(self) -> Alarm | None:
        first = self._post.seen(0)
        if first.beat is not None:
            self._first_host = first.beat.host
        if self._rank and first.beat is None:
            found = absent(0, first) if first.unheard > self._timeout else None
        elif self._rank and not first.beat.left:
            lost = first.gone or first.unheard > self._silence(self._missed)
            found = silent(0, first) if lost else None
        else:
            ranks = [self._post.seen(rank) for rank in range(self._world)]
            missed = any(seen.beat is not None and seen.beat.missed for seen in ranks)
            limits = Limits(self._timeout, self._silence(missed), self._setting)
            found = judge(ranks, limits, self._comparable)
        return self._post.raise_alarm(found) if found else None

    def _silence(self, missed: bool) -> float:
        return min(SILENT_AND_MISSED if missed else SILENT, self._timeout)

    def _handle(self) -> None:
        """Have ``on_alarm`` do what it does, once nothing changes any more."""
        steady = self._changing.acquire(timeout=CHANGING)
        if self._on_alarm is not None:
            self.outcome = self._answer(steady and not self._torn)
        if steady:
            self._changing.release()

    def _answer(self, steady: bool) -> str:
        """What ``on_alarm`` says, by a thread of its own: it may get stuck, too."""
        said = [f"what was to be done then was not done after {HANDLING:.0f} s"]

        def ask() -> None:
            try:
                said.append(self._on_alarm(self.alarm, steady))
            except Exception as error:
                log.exception("after an alarm")
                said.append(f"what was to be done then has failed: {error}")

        asking = threading.Thread(target=ask, name="after an alarm", daemon=True)
        asking.start()
        asking.join(HANDLING)
        return said[-1]

    def _end(self, alarm: Alarm) -> None:
        """See to it that the watched thread leaves, whatever it is in."""
        error = alarm.error(self.outcome)
        if self._ranks_are_threads:
            if alarm.kind != "failed":  # else that rank's own error ends them
                threads.end_collectives(error)
            return
        mine = alarm.kind == "hung" and alarm.rank == self._rank
        if not mine and self._leaving.wait(GRACE):
            return
        try:
            leaving.leave_error(str(error))
            print(f"[rank {self._rank}] {error.word}: {error}", file=sys.stderr, flush=True)
            sys.stdout.flush()
        finally:  # with a full disk, too
            os._exit(error.exit_code)
