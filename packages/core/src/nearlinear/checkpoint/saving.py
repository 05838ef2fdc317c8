"""A checkpoint that is being written while training goes on, on every rank by a thread.

Each rank writes its file and tells rank 0; when all are there, the first rank of every node puts
the index in place, and only then is it a checkpoint. One is written at a time.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from .. import _torch, runtime
from ..errors import CheckpointError
from ..leaving import before_leaving
from ..storage import Place
from . import file, index
from .index import File, Index
from .meeting import Deserted, Meeting, Patience
from .snapshot import Copy, Snapshot

log = logging.getLogger(__name__)

AFTER_AN_ERROR = 60.0
"""seconds that a process which ends with an error waits for others to finish a checkpoint"""


class Saving:
    """What `nearlinear.save` returns: a checkpoint that will be in ``folder``.

    A path, as far as ``os.fspath`` and ``open`` care, or an address like ``s3://bucket/prefix``.
    """

    def __init__(self, place: Place, write: Callable[[Saving], None]):
        self.folder = place.told
        self.error = ""
        """why there will be none"""
        self.known = False
        """whether it has been raised"""
        self._deadline: float | None = None
        self._gone: int | None = None
        # not a daemon: a script that ends waits for its last checkpoint
        self._thread = threading.Thread(target=write, args=(self,), name="checkpoint")
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it is there, or has failed."""
        return not self._thread.is_alive()

    def wait(self) -> Path | str:
        """The folder, once the checkpoint is there. Raises CheckpointError, on all ranks alike."""
        self._thread.join()
        if self.error:
            self.known = True
            raise CheckpointError(self.error)
        return self.folder

    def abandon(self, why: BaseException | None = None, seconds: float = AFTER_AN_ERROR) -> None:
        """Wait no longer than this for other ranks, and not at all for one that is dead.

        ``why``: the error that ends this process, if there is one; a RankLost names who is dead.
        """
        self._gone = getattr(why, "gone", None)
        self._deadline = time.monotonic() + seconds

    def patient(self, rank: int) -> bool:
        """Whether ``rank`` is still worth waiting for."""
        if self._deadline is None:
            ended_by_error = not threading.main_thread().is_alive() and hasattr(sys, "last_type")
            if ended_by_error:
                self.abandon(sys.last_value)
            return True
        return rank != self._gone and time.monotonic() < self._deadline

    def __fspath__(self) -> str:
        return os.fspath(self.folder)

    def __str__(self) -> str:
        return str(self.folder)


@dataclass
class Saves:
    """Those of this rank in one job."""

    rank: int
    world: int
    first: bool
    """whether this is the first rank of its node"""
    store: dist.Store
    """a connection to the job's, of their own: other threads wait on theirs"""
    snapshot: Snapshot = field(default_factory=Snapshot)
    newest: Saving | None = None
    meeting: Meeting | None = None
    """the one of the newest"""
    hook: RemovableHandle | None = None
    """what has the optimizer wait for its copy"""

    def finish(self) -> None:
        """See `finish`."""
        saving = self.newest
        if saving is not None:
            try:
                if not saving.known:
                    saving.wait()
            finally:  # not before: who saves meanwhile would take its memory
                if self.newest is saving:  # an emergency has not begun another
                    self.newest = None


_of_jobs: weakref.WeakKeyDictionary[dist.Store, Saves] = weakref.WeakKeyDictionary()


def of_this_rank() -> Saves:
    """Those of the job that this rank is in now."""
    store = _torch.job_store()
    if store not in _of_jobs:
        now = runtime.current()
        first = runtime.first_of_node()
        _of_jobs[store] = Saves(now.rank, now.mesh.world, first, store.clone())
    return _of_jobs[store]


@before_leaving
def finish() -> None:
    """Wait until the checkpoint that this rank is writing is there, if it is writing one.

    Raises CheckpointError, on all ranks alike, if there will be none.
    """
    mine = _of_jobs.get(_torch.job_store())
    if mine is not None:
        mine.finish()


def start(
    mine: Saves,
    folder: Place,
    name: str,
    tensors: dict[str, torch.Tensor],
    made: Callable[[list[File | None]], Index],
    after: Callable[[], None],
    changed_by: torch.optim.Optimizer | None = None,
    later: Collection[str] = (),
) -> Saving:
    """Begin to write this rank's ``tensors``, once the save before it has been finished.

    Those named in ``later`` are copied while training goes on: before ``changed_by`` steps.

    ``name`` is the same on all ranks, and of no other save; ``made(files)`` is the index, given
    what each rank's file looks like; ``after()`` is called on the first rank of every node once the
    checkpoint is there.
    """
    if mine.meeting is not None and mine.rank == 0:
        mine.meeting.forget("file", "index")
    meeting = mine.meeting = Meeting(mine.store, f"save/{name}", mine.rank, mine.world)
    copy = mine.snapshot.of(tensors, later)
    if mine.hook is not None:
        mine.hook.remove()
    mine.hook = changed_by.register_step_pre_hook(copy.hold) if later else None
    name, first = file_of(mine.rank, mine.world), mine.first

    def write(saving: Saving) -> None:
        try:
            saving.error = _write(folder, saving.patient, meeting, name, copy, made, first)
        except Deserted as error:
            unheard = f"{folder}: rank {error.rank} was not heard of"
            saving.error = f"{unheard}, so this checkpoint is not finished; {_UNTOUCHED}"
        except Exception as error:  # the store is gone, with the rank that had it
            saving.error = f"{folder}: this checkpoint was not finished: {error}"
        if saving.error:
            log.warning("%s", saving.error)
        elif first:
            try:
                after()
            except (OSError, CheckpointError) as error:  # the checkpoint is there all the same
                log.warning("%s is saved; beside it: %s", folder, error)

    mine.newest = Saving(folder, write)
    return mine.newest


def file_of(rank: int, world: int) -> str:
    """Where a rank's blocks are."""
    return f"rank-{rank:05d}-of-{world:05d}.safetensors"


def _write(
    folder: Place, patient: Patience, meeting: Meeting, name: str, copy: Copy,
    made: Callable, first: bool,
) -> str:  # fmt: skip
    """Why it failed, the same on every rank; empty: it is there. Raises Deserted."""
    answer = {}
    try:
        tensors = copy.complete()
        folder.make()
        (folder / index.NAME).remove()  # of an earlier save of this step
        if tensors:
            found = file.write(folder / name, tensors)
            answer = {"bytes": found.bytes, "sha256": found.sha256}
    except Exception as error:  # whatever it is, the others must hear of it
        answer = {"failed": f"rank {meeting.rank} cannot write {folder}: {_why(error)}"}
    answers = meeting.agree("file", answer, patient)
    failed = [answer["failed"] for answer in answers if "failed" in answer]
    if failed:
        return f"{failed[0]}; {_UNTOUCHED}"
    why = ""
    if first:
        try:
            folder.settle()
            made([File(**answer) if answer else None for answer in answers]).write(folder)
        except Exception as error:
            why = f"{folder / index.NAME} cannot be written: {_why(error)}"
    failures = meeting.agree("index", why, patient, lambda told: [why for why in told if why])
    return f"{failures[0]}; {_UNTOUCHED}" if failures else ""


_UNTOUCHED = "checkpoints that were there before are as they were"


def _why(error: Exception) -> str:
    """Cause and remedy."""
    if isinstance(error, OSError):
        cause = error.strerror or error
        return f"{cause}: make room or mend the permissions, or choose another folder"
    return str(error)
