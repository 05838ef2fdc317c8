"""Write checkpoints on a background thread of every rank while training continues.

Each rank writes its file and reports it to rank 0. When all files exist, the first rank of every
node writes the index, which completes the checkpoint. Saves are written one after another.

The tensors are first copied to host memory. Tensors that only the optimizer changes can be copied
during the next forward and backward pass, if the optimizer's step waits for the copy. Source:
CheckFreq (Mohan et al., FAST 2021), section 4.2.
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

from .. import _torch
from ..distributed import runtime
from ..distributed.consensus import RankUnreachable, StoreBarrier, clone_store
from ..distributed.process_exit import before_leaving
from ..errors import CheckpointError
from ..storage import StoragePath
from ..storage.threads import Pace
from . import index, index_schema, safetensors_file
from .index_schema import FileEntry, Index

log = logging.getLogger(__name__)

ABANDON_TIMEOUT = 60.0
"""Seconds that a process which ends with an error waits for other ranks to finish a checkpoint."""
_UNCHANGED = "earlier checkpoints are unchanged"


class StagingBuffers:
    """Host buffers reused from save to save; allocating new pages costs more than the copy."""

    def __init__(self):
        self._buffers: dict[str, torch.Tensor] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def copy(self, tensors: dict[str, torch.Tensor], deferred: Collection[str] = ()) -> StagedCopy:
        """Copy ``tensors`` to contiguous CPU memory. The copies are valid until the next call.

        On CUDA the buffers are pinned, and copies are asynchronous.

        Args:
            tensors: Tensors by name.
            deferred: Names whose copies may still be pending when this returns.
        """
        known, self._buffers = self._buffers, {}
        pending, streams = [], set()
        for name, tensor in tensors.items():
            buffer = known.get(name)
            on_gpu = tensor.device.type == "cuda"
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
            self._buffers[name] = buffer
            if on_gpu:
                stream = self._copy_stream(tensor.device, overlap=name in deferred)
                streams.add(stream)
                with torch.cuda.stream(stream):
                    buffer.copy_(tensor, non_blocking=True)
            elif name in deferred:
                pending.append((buffer, tensor))
            else:
                buffer.copy_(tensor)
        events = [stream.record_event() for stream in streams]
        copy = StagedCopy(dict(self._buffers), pending, events)
        if not deferred:
            copy.complete()
        return copy

    def _copy_stream(self, device: torch.device, overlap: bool) -> torch.cuda.Stream:
        """Return the stream for copies.

        Without ``overlap``, copies run on the compute stream, ordered before later writes. With it,
        they run on a side stream that waits for the compute stream's current position.
        """
        compute = torch.cuda.current_stream(device)
        if not overlap:
            return compute
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        stream.wait_stream(compute)
        return stream


class StagedCopy:
    """Copies in staging buffers, complete once `complete` has returned."""

    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        pending: list[tuple[torch.Tensor, torch.Tensor]],
        events: list[torch.cuda.Event],
    ):
        self._tensors, self._pending, self._events = tensors, pending, events
        self._host_done = threading.Event()

    def complete(self) -> dict[str, torch.Tensor]:
        """Finish all copies, the pending host copies on the calling thread, and return them."""
        try:
            for buffer, tensor in self._pending:
                buffer.copy_(tensor)
        finally:
            self._host_done.set()
        for event in self._events:
            event.synchronize()
        return self._tensors

    def wait_before_update(self, *_) -> None:
        """Block updates of the tensors until they are copied: an optimizer step pre-hook.

        The calling thread waits for host copies, the current CUDA stream for device copies.
        """
        for event in self._events:
            event.wait()
        self._host_done.wait()


class PendingSave:
    """A checkpoint that is being written to ``folder``: the result of `nearlinear.save`.

    ``os.fspath`` and ``open`` accept it as a path. For storage such as ``s3://bucket/prefix``,
    ``folder`` is a string.
    """

    def __init__(self, place: StoragePath, write: Callable[[PendingSave], None]):
        self.folder: str | Path = place.path_or_url
        self.error = ""
        """Reason why the save failed, or ""."""
        self.error_raised: bool = False
        """True once `wait` has raised the error."""
        self.pace: Pace = Pace()
        """Speed limit of the writing threads, lifted once somebody waits."""
        self._deadline: float | None = None
        self._dead_rank: int | None = None
        # Not a daemon thread: a script that ends waits for its last checkpoint.
        self._thread = threading.Thread(target=write, args=(self,), name="checkpoint")
        self._thread.start()

    @property
    def done(self) -> bool:
        """True once the checkpoint is complete or has failed."""
        return not self._thread.is_alive()

    def wait(self) -> Path | str:
        """Wait until the checkpoint is complete; return its folder.

        Raises CheckpointError, on all ranks alike.
        """
        self.pace.hurry()
        self._thread.join()
        if self.error:
            self.error_raised = True
            raise CheckpointError(self.error)
        return self.folder

    def abandon(self, why: BaseException | None = None, seconds: float = ABANDON_TIMEOUT) -> None:
        """Limit the wait for other ranks to ``seconds``, and for a dead rank to none.

        Args:
            why: The error that ends this process, if any. A RankFailure names the dead rank.
            seconds: Remaining time for the other ranks.
        """
        self.pace.hurry()
        self._dead_rank = getattr(why, "dead_rank", None)
        self._deadline = time.monotonic() + seconds

    def should_wait(self, rank: int) -> bool:
        """Return True while it makes sense to wait for ``rank``."""
        if self._deadline is None:
            ended_by_error = not threading.main_thread().is_alive() and hasattr(sys, "last_type")
            if ended_by_error:
                self.abandon(sys.last_value)
            return True
        return rank != self._dead_rank and time.monotonic() < self._deadline

    def __fspath__(self) -> str:
        return os.fspath(self.folder)

    def __str__(self) -> str:
        return str(self.folder)


@dataclass
class RankWriter:
    """State of this rank's saves in one job."""

    rank: int
    world: int
    first_of_node: bool
    store: dist.Store
    """A separate connection to the job's store: a wait on a connection blocks its other users."""
    staging: StagingBuffers = field(default_factory=StagingBuffers)
    newest: PendingSave | None = None
    barrier: StoreBarrier | None = None
    """Barrier of the newest save."""
    hook: RemovableHandle | None = None
    """Optimizer hook that waits for the copy of the newest save."""

    def finish(self) -> None:
        """Wait for the newest save. Raises CheckpointError unless it was raised before."""
        pending = self.newest
        if pending is not None:
            try:
                if not pending.error_raised:
                    pending.wait()
            finally:  # only now: a concurrent save would reuse the staging buffers
                if self.newest is pending:  # an emergency save may have started another one
                    self.newest = None


_writers: weakref.WeakKeyDictionary[dist.Store, RankWriter] = weakref.WeakKeyDictionary()


def of_this_rank() -> RankWriter:
    """Return the writer of this rank in the current job."""
    store = _torch.job_store()
    if store not in _writers:
        rank, world = dist.get_rank(), dist.get_world_size()
        _writers[store] = RankWriter(rank, world, runtime.first_of_node(), clone_store(store))
    return _writers[store]


@before_leaving
def finish() -> None:
    """Wait until this rank's pending checkpoint is complete, if there is one.

    Raises CheckpointError, on all ranks alike, if the save failed.
    """
    writer = _writers.get(_torch.job_store())
    if writer is not None:
        writer.finish()


def start(
    writer: RankWriter,
    folder: StoragePath,
    name: str,
    tensors: dict[str, torch.Tensor],
    make_content: Callable[[], str],
    make_index: Callable[[list[FileEntry | None]], Index],
    on_complete: Callable[[], None],
    changed_by: torch.optim.Optimizer | None = None,
    deferred: Collection[str] = (),
) -> PendingSave:
    """Start writing this rank's ``tensors``. The previous save must be finished.

    Args:
        writer: State of this rank.
        folder: Folder of the checkpoint.
        name: Unique name of the save, equal on all ranks.
        tensors: Tensors of this rank's file, by key.
        make_content: Returns `Index.content`, equal on all ranks.
        make_index: Returns the index, given the size and hash of each rank's file.
        on_complete: Called on the first rank of every node once the checkpoint is complete.
        changed_by: Optimizer whose step waits for the copies of ``deferred``.
        deferred: Keys of tensors that are copied while training continues.
    """
    if writer.barrier is not None and writer.rank == 0:
        writer.barrier.forget("file", "index")
    barrier = writer.barrier = StoreBarrier(writer.store, f"save/{name}", writer.rank, writer.world)
    copy = writer.staging.copy(tensors, deferred)
    if writer.hook is not None:
        writer.hook.remove()
        writer.hook = None
    if changed_by is not None and deferred:
        writer.hook = changed_by.register_step_pre_hook(copy.wait_before_update)

    def write(pending: PendingSave) -> None:
        try:
            pending.error = _write(writer, folder, pending, barrier, copy, make_content, make_index)
        except RankUnreachable as error:
            pending.error = (
                f"checkpoint {folder} is incomplete, because rank {error.rank} does not respond; "
                f"{_UNCHANGED}"
            )
        except Exception as error:  # the store is lost together with the rank that hosted it
            pending.error = f"checkpoint {folder} is incomplete: {error}; {_UNCHANGED}"
        if pending.error:
            log.warning("%s", pending.error)
        elif writer.first_of_node:
            try:
                on_complete()
            except (OSError, CheckpointError) as error:  # the checkpoint itself is complete
                log.warning("%s is saved, but not its pointer or cleanup: %s", folder, error)

    writer.newest = PendingSave(folder, write)
    return writer.newest


def file_name(rank: int, world: int) -> str:
    """Return the name of the file with the shards of ``rank``."""
    return f"rank-{rank:05d}-of-{world:05d}.safetensors"


def _write(
    writer: RankWriter,
    folder: StoragePath,
    pending: PendingSave,
    barrier: StoreBarrier,
    copy: StagedCopy,
    make_content: Callable[[], str],
    make_index: Callable[[list[FileEntry | None]], Index],
) -> str:
    """Write the file and the index; return the error, equal on every rank, or "".

    Raises RankUnreachable.
    """
    own: dict = {}
    try:
        tensors = copy.complete()
        folder.mkdir()
        (folder / index.NAME).remove()  # of an earlier save of the same step
        own["content"] = content = make_content()
        if tensors:
            path = folder / file_name(writer.rank, writer.world)
            found = safetensors_file.write_file(
                path, tensors, {index_schema.BINDING: content}, pending.pace
            )
            own |= {"bytes": found.bytes, "sha256": found.sha256}
    except Exception as error:  # the other ranks must learn of any error
        own = {"failed": f"rank {writer.rank} cannot write {folder}: {_reason(error)}"}
    reports = barrier.agree("file", own, pending.should_wait)
    failed = [report["failed"] for report in reports if "failed" in report]
    if failed:
        return f"{failed[0]}; {_UNCHANGED}"
    contents = [report.pop("content") for report in reports]
    if len(set(contents)) > 1:
        rank = next(rank for rank, each in enumerate(contents) if each != contents[0])
        return (
            f"checkpoint {folder} is not complete: ranks 0 and {rank} passed different values to "
            f"nl.save; pass objects whose state_dict() is equal on all ranks; {_UNCHANGED}"
        )
    error_text = ""
    if writer.first_of_node:
        try:
            folder.sync()
            files = [FileEntry(**report) if report else None for report in reports]
            index.write(make_index(files), folder)
        except Exception as error:
            error_text = f"{folder / index.NAME} cannot be written: {_reason(error)}"
    errors = barrier.agree(
        "index", error_text, pending.should_wait, lambda texts: [t for t in texts if t]
    )
    return f"{errors[0]}; {_UNCHANGED}" if errors else ""


def _reason(error: Exception) -> str:
    """Return the cause of ``error`` and a remedy."""
    if isinstance(error, OSError):
        cause = error.strerror or error
        return f"{cause}: free space, fix the permissions, or choose another folder"
    return str(error)
