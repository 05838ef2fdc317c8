"""Ranks as threads of one process: real FSDP2 and collectives, no start-up cost, no network.

Built on the threaded process group of torch's own tests. Collectives copy between the ranks'
tensors in shared memory; rank 0 of each group does the arithmetic, so sums are in rank order.
Not for timing: all ranks share one interpreter.
"""

import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .. import _torch, leaving
from ..counts import report
from ..errors import NearlinearError
from .failures import RankError
from .point_to_point import Mail, Transfer

BACKEND = "nearlinear_threads"

_one_run = threading.Lock()
_Base, _install, _uninstall, _ending = _torch.thread_group_base()
_mail = Mail(_ending)


class ThreadGroup(_Base):
    """The threaded process group, telling open collective counters what passes through it."""

    def send(self, tensors: list[torch.Tensor], receiver: int, tag: int) -> Transfer:
        (tensor,) = tensors
        report("send", tensor)
        return _mail.send((self.pg_name, self.rank(), receiver, tag), tensor)

    def recv(self, tensors: list[torch.Tensor], sender: int, tag: int) -> Transfer:
        (tensor,) = tensors
        report("recv", tensor)
        return _mail.receive((self.pg_name, sender, self.rank(), tag), tensor)


def _reporting(name: str):
    inner = getattr(_Base, name)

    def collective(self, *args, **kwargs):
        report(name, *args)
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
    """A group once all its ranks have come to make it; SystemExit if one failed before."""
    group = ThreadGroup(rank, world)
    store.add("here", 1)
    while store.add("here", 0) < world:
        if _ending():
            sys.exit("another rank failed")
        time.sleep(0.0005)
    return group


dist.Backend.register_backend(BACKEND, _create_group, devices=["cpu", "cuda"])


@dataclass
class _Rank:
    """One rank's thread and what became of it."""

    thread: threading.Thread
    value: object = None
    error: BaseException | None = None
    failed_at: float = 0.0


def run_threads(fn, ranks: int, args: tuple, timeout: float) -> list:
    """`nearlinear.spmd.run` with threads."""
    if not _one_run.acquire(blocking=False):
        raise NearlinearError("spmd.run is already running in this process: wait for it to return")
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
                leaving.finish()
        except BaseException as error:  # SystemExit too: that is how the others are stopped
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
        _mail.clear()
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
    where = {rank: _stack_of(states[rank].thread) for rank in stuck}
    if stuck:
        _stop(states, TimeoutError())
    failed = [  # first those by their own fault
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
            f"ranks {stuck} did not finish within {timeout:g} s; a collective that not every rank "
            "enters is the usual cause",
            where[stuck[0]],
        )
    gone = [rank for rank, state in enumerate(states) if state.error is not None]
    if gone:
        raise RankError(gone[0], len(states), f"it called exit: {states[gone[0]].error}")


def end_collectives(why: BaseException) -> None:
    """Have every rank's collective, that it is in or comes to, end with SystemExit."""
    while True:
        with suppress(RuntimeError):  # a rank came to a collective or left one: begin again
            return _Base.exception_handle(why)


def _stop(states: list[_Rank], why: BaseException) -> None:
    """End the ranks that are in a collective, and those that reach one within seconds."""
    end_collectives(why)
    deadline = time.monotonic() + 5.0
    for state in states:
        state.thread.join(max(0.0, deadline - time.monotonic()))


def _stack_of(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident)
    return "".join(traceback.format_stack(frame)) if frame else ""
