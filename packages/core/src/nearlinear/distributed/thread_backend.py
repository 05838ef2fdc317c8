"""Process group whose ranks are threads of one process: real FSDP2 and collectives, no start-up.

Built on the threaded process group of torch's own tests, which has no point-to-point messages;
those are added here. Collectives copy between the ranks' tensors in shared memory. Rank 0 of each
group does the arithmetic, so sums are in rank order. Not for timing: all ranks share one
interpreter.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

import torch
import torch.distributed as dist

from .. import _torch
from ..errors import NearlinearError, RankError
from . import process_exit
from .collectives import report_collective

BACKEND = "nearlinear_threads"
_POLL_INTERVAL = 0.05  # seconds between checks for a failure of another rank


class Transfer:
    """Work handle of a send or receive."""

    def __init__(self, tensor: torch.Tensor | None, run_failed: Callable[[], bool]):
        self.tensor, self.run_failed = tensor, run_failed
        self.done = threading.Event()

    def deliver(self, message: torch.Tensor) -> None:
        """Copy ``message`` into the receiver's tensor and complete the transfer."""
        assert self.tensor is not None
        with torch.no_grad():
            self.tensor.detach().copy_(message)
        self.done.set()

    def wait(self, timeout=None) -> bool:
        while not self.done.wait(_POLL_INTERVAL):
            if self.run_failed():
                sys.exit("another rank failed")
        return True

    def is_completed(self) -> bool:
        return self.done.is_set()


class Mailbox:
    """Messages in flight between the ranks of a run.

    A send copies the tensor and completes at once. A receive takes the oldest message of its sender
    and tag, in the order in which the receives were posted, as in other process groups. Waiting
    ends when ``run_failed()`` is true.
    """

    def __init__(self, run_failed: Callable[[], bool]):
        self.run_failed = run_failed
        self.lock = threading.Lock()
        self.sent: dict[tuple, deque[torch.Tensor]] = {}
        self.awaited: dict[tuple, deque[Transfer]] = {}

    def send(self, channel: tuple, tensor: torch.Tensor) -> Transfer:
        """Send ``tensor`` on ``channel``: (group, sender, receiver, tag)."""
        message = tensor.detach().clone()
        with self.lock:
            receivers = self.awaited.setdefault(channel, deque())
            if receivers:
                receivers.popleft().deliver(message)
            else:
                self.sent.setdefault(channel, deque()).append(message)
        transfer = Transfer(None, self.run_failed)
        transfer.done.set()
        return transfer

    def receive(self, channel: tuple, tensor: torch.Tensor) -> Transfer:
        """Receive the next message of ``channel`` into ``tensor``."""
        transfer = Transfer(tensor, self.run_failed)
        with self.lock:
            messages = self.sent.setdefault(channel, deque())
            if messages:
                transfer.deliver(messages.popleft())
            else:
                self.awaited.setdefault(channel, deque()).append(transfer)
        return transfer

    def clear(self) -> None:
        with self.lock:
            self.sent.clear()
            self.awaited.clear()


_one_run = threading.Lock()
_Base, _install, _uninstall, _run_failed = _torch.thread_group_base()
_mailbox = Mailbox(_run_failed)


class ThreadGroup(_Base):
    """Threaded process group that reports its collectives to open collective counters."""

    def send(self, tensors: list[torch.Tensor], receiver: int, tag: int) -> Transfer:
        (tensor,) = tensors
        report_collective("send", tensor)
        return _mailbox.send((self.pg_name, self.rank(), receiver, tag), tensor)

    def recv(self, tensors: list[torch.Tensor], sender: int, tag: int) -> Transfer:
        (tensor,) = tensors
        report_collective("recv", tensor)
        return _mailbox.receive((self.pg_name, sender, self.rank(), tag), tensor)


def _reporting(name: str):
    inner = getattr(_Base, name)

    def collective(self, *args, **kwargs):
        report_collective(name, *args)
        return inner(self, *args, **kwargs)

    collective.__name__ = name
    return collective


for _name in (
    "all_gather_single _allgather_base reduce_scatter_single _reduce_scatter_base "
    "allreduce broadcast all_to_all_single alltoall_base alltoall scatter gather"
).split():
    if _name in vars(_Base):
        setattr(ThreadGroup, _name, _reporting(_name))


def _create_group(store, rank, world, timeout):
    """Create a group once all its ranks call this function; SystemExit if one failed before."""
    group = ThreadGroup(rank, world)
    store.add("here", 1)
    while store.add("here", 0) < world:
        if _run_failed():
            sys.exit("another rank failed")
        time.sleep(0.0005)
    return group


dist.Backend.register_backend(BACKEND, _create_group, devices=["cpu", "cuda"])


@dataclass
class _Rank:
    """Thread and outcome of one rank."""

    thread: threading.Thread
    value: object = None
    error: BaseException | None = None
    failed_at: float = 0.0


def run_threads(fn, ranks: int, args: tuple, timeout: float) -> list:
    """Run ``fn`` on ranks that are threads, see `nearlinear.spmd.run`."""
    if not _one_run.acquire(blocking=False):
        raise NearlinearError("spmd.run is already running in this process. Wait for it to return.")
    intra_op = torch.get_num_threads()
    states: list[_Rank] = []
    store = dist.HashStore()
    excepthook = sys.excepthook  # init_process_group wraps it once per rank

    def work(rank: int) -> None:
        state = states[rank]
        torch.set_num_threads(max(1, intra_op // ranks))
        try:
            dist.init_process_group(BACKEND, rank=rank, world_size=ranks, store=store)
            state.value = fn(rank, *args)
            if dist.is_initialized():
                process_exit.run_callbacks()
        except BaseException as error:  # SystemExit too, which stops the other ranks
            state.error, state.failed_at = error, time.monotonic()
            end_collectives(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    _install()
    try:
        for rank in range(ranks):
            thread = threading.Thread(target=work, args=(rank,), name=f"rank {rank}", daemon=True)
            states.append(_Rank(thread))
        for state in states:
            state.thread.start()
        _join(states, timeout)
    except KeyboardInterrupt as error:
        _stop(states, error)
        raise
    finally:
        _Base.reset()
        _mailbox.clear()
        _uninstall()
        sys.excepthook = excepthook
        torch.set_num_threads(intra_op)
        _one_run.release()
    return [state.value for state in states]


def _join(states: list[_Rank], timeout: float) -> None:
    """Wait for all ranks; raise RankError for the first that failed or the first still running."""
    deadline = time.monotonic() + timeout
    for state in states:
        state.thread.join(max(0.0, deadline - time.monotonic()))
    stuck = [rank for rank, state in enumerate(states) if state.thread.is_alive()]
    where = {rank: stack_of_thread(states[rank].thread.ident or 0) for rank in stuck}
    if stuck:
        _stop(states, TimeoutError())
    failed = [  # errors of a single rank sort before those that all ranks raise
        (getattr(state.error, "everywhere", False), state.failed_at, rank)
        for rank, state in enumerate(states)
        if state.error is not None and not isinstance(state.error, SystemExit)
    ]
    if failed:
        rank = min(failed)[-1]
        error = states[rank].error
        text = "".join(traceback.format_exception(error))
        raise RankError(rank, len(states), f"{type(error).__name__}: {error}", text) from error
    if stuck:
        raise RankError(
            stuck[0],
            len(states),
            f"ranks {stuck} did not finish within {timeout:g} s; the usual cause is a collective "
            "that some ranks do not call",
            where[stuck[0]],
        )
    gone = [rank for rank, state in enumerate(states) if state.error is not None]
    if gone:
        raise RankError(gone[0], len(states), f"it exited: {states[gone[0]].error}")


def end_collectives(error: BaseException) -> None:
    """End the current or next collective of every rank with SystemExit."""
    while True:
        with suppress(RuntimeError):  # a rank entered or left a collective meanwhile: try again
            return _Base.exception_handle(error)


def _stop(states: list[_Rank], error: BaseException) -> None:
    """Stop the ranks that are in a collective, and those that reach one within seconds."""
    end_collectives(error)
    deadline = time.monotonic() + 5.0
    for state in states:
        state.thread.join(max(0.0, deadline - time.monotonic()))


def stack_of_thread(ident: int) -> str:
    """Return the lines of the stack of thread ``ident``, the innermost first, or an empty string.

    Python's fault handler reads the stacks of all threads at once, 100 lines of each. Walking the
    frame objects of a thread that runs ended in a segmentation fault (CPython 3.11.7), and in
    deadlocks with the garbage collector before CPython 3.12 (gh-106883).
    """
    with _temporary_file() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        text = file.read().decode("utf-8", "replace")
    return stack_in_report(text, ident)


def stack_in_report(report: str, ident: int) -> str:
    """Return the lines of thread ``ident`` in a report of the fault handler, or an empty string."""
    for block in report.split("\n\n"):
        head, _, lines = block.strip("\n").partition("\n")
        if f"{ident:016x} " in head:
            return lines
    return ""


def _temporary_file() -> IO[bytes]:
    """Return a file in memory where the system has those, otherwise on a disk."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("stacks"), "w+b")
    return tempfile.TemporaryFile()
