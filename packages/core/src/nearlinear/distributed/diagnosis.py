"""Find the rank that stalls a job, from the heartbeats of all ranks and the stack of a thread.

Elapsed time alone does not identify a straggler: every rank compiles, evaluates and saves now and
then. Operations are therefore numbered identically on all ranks. When no rank makes progress, the
rank with the lowest operation index is the one the others wait for. The stack of a rank's thread
shows its source line, and whether it waits in a collective.
"""

from __future__ import annotations

import dataclasses
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from .heartbeat import Fault, Heartbeat, RankStatus
from .thread_backend import stack_in_report, stack_of_thread

_TORCH = str(Path(torch.__file__).parent)
_NEARLINEAR = str(Path(__file__).parent.parent)
_STANDARD = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
_PACKAGES = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))
_THREAD_BACKEND = (
    f"{_NEARLINEAR}/distributed/thread_backend.py",
    f"{_NEARLINEAR}/spmd.py",
    f"{_NEARLINEAR}/distributed/rank_worker.py",
)
_COMMUNICATION = (
    f"{_TORCH}/distributed/",
    f"{_TORCH}/testing/_internal/distributed/",  # base of the thread backend
    *_THREAD_BACKEND,
    f"{_NEARLINEAR}/distributed/collectives.py",
    f"{_NEARLINEAR}/distributed/comm_thread.py",
    f"{_NEARLINEAR}/activation/",
    f"{_NEARLINEAR}/compat/",
    f"{_NEARLINEAR}/context_parallel/",
    f"{_NEARLINEAR}/expert_parallel/",
    f"{_NEARLINEAR}/fsdp/",
    f"{_NEARLINEAR}/pipeline_parallel/",
    f"{_NEARLINEAR}/tensor_parallel/",
    "nearlinear_collectives/",
)
_OPERATOR_DISPATCH = f"{_TORCH}/_ops.py"
_C10D_CALLS = "/distributed_c10d.py"


def describe_thread(ident: int) -> tuple[bool, str]:
    """Return whether thread ``ident`` waits in a collective, and its source line.

    Only waits in Python, or in native code called from a communication module, are recognized; a
    kernel that waits on an accelerator is not. Returns ``(False, "")`` for an unknown thread.
    """
    stack = _lines_of(stack_of_thread(ident))
    return _is_communication(stack), _describe(stack)


def failed_in_communication(error: BaseException) -> bool:
    """Return whether a collective raised ``error``, judged by its innermost frame."""
    return _is_communication(_stack_of(error))


def describe_error(error: BaseException) -> str:
    """Return the source line of user code that raised ``error``, or an empty string."""
    return _describe(_stack_of(error))


class _Line(NamedTuple):
    """One line of a stack."""

    file: str
    number: int
    function: str


def _stack_of(error: BaseException) -> list[_Line]:
    """Return the stack of ``error``, innermost line first."""
    lines, trace = [], error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        lines.append(_Line(code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    return lines[::-1]


_REPORTED_LINE = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def _lines_of(report: str) -> list[_Line]:
    """Return the stack of one thread from a report of Python's fault handler."""
    found = map(_REPORTED_LINE.fullmatch, report.splitlines())
    return [_Line(line[1], int(line[2]), line[3]) for line in found if line]


def _is_communication(stack: list[_Line]) -> bool:
    """Classify a stack by its innermost line outside of the standard library."""
    for line in stack:
        if not _is_standard(line.file) and line.file != _OPERATOR_DISPATCH:
            return any(part in line.file for part in _COMMUNICATION)
    return False


def _describe(stack: list[_Line]) -> str:
    """Return "collective, file:line in function" for the innermost line of user code."""
    calls = (line.function for line in stack if line.file.endswith(_C10D_CALLS))
    call = next(calls, "")
    user_lines = (
        line
        for line in stack
        if not _is_standard(line.file) and not line.file.startswith((_TORCH, *_THREAD_BACKEND))
    )
    line = next(user_lines, None)
    if line is None:
        return call
    path = Path(line.file)
    place = f"{path.parent.name}/{path.name}:{line.number} in {line.function}"
    return f"{call}, {place}" if call else place


def _is_standard(name: str) -> bool:
    return name.startswith("<") or (name.startswith(_STANDARD) and not name.startswith(_PACKAGES))


RANKS_SHOWN = 4
"""Ranks listed in the message about a deadlock."""


@dataclass(frozen=True)
class Limits:
    """Timeouts in seconds."""

    stall_timeout: float
    """Time without progress while other ranks wait."""
    heartbeat_timeout: float
    """Age of the latest heartbeat at which a rank counts as dead."""
    setting: str = ""
    """Name of the setting that holds ``stall_timeout``, for error messages."""


def diagnose(
    ranks: Sequence[RankStatus], limits: Limits, *, ordered_progress: bool = True
) -> Fault | None:
    """Return the first fault of a job, or None while any rank makes progress.

    Checks in this order: ranks that never started, dead ranks, ranks that exited while others wait
    for them, and stalled ranks.

    Args:
        ranks: Status of each rank, indexed by rank.
        limits: Timeouts in seconds.
        ordered_progress: Whether progress inside an operation has the same order on all ranks, so
            that it can break ties between ranks in the same operation.
    """
    started: dict[int, tuple[RankStatus, Heartbeat]] = {}
    for rank, status in enumerate(ranks):
        heartbeat = status.heartbeat
        if heartbeat is None:
            if status.seconds_since_heartbeat > limits.stall_timeout:
                return never_started(rank, status)
            continue
        started[rank] = status, heartbeat
        silent = status.seconds_since_heartbeat > limits.heartbeat_timeout
        if not heartbeat.exited and (status.process_exited or silent):
            others = (s.heartbeat for each, s in enumerate(ranks) if each != rank)
            return dead(rank, status, heartbeat, next(filter(None, others), None))
    if len(started) < len(ranks):
        return None
    active = {rank: item for rank, item in started.items() if not item[1].exited}
    if not active or any(s.stalled_seconds <= limits.stall_timeout for s, _ in active.values()):
        return None
    return _find_exited_peer(started, active) or _find_straggler(active, limits, ordered_progress)


def never_started(rank: int, status: RankStatus) -> Fault:
    """Describe a rank that has not sent any heartbeat."""
    seconds = f"{status.seconds_since_heartbeat:.0f}"
    text = f"rank {rank} did not start within {seconds} s of the other ranks. Check its log."
    return Fault("dead", rank, text)


def dead(
    rank: int, status: RankStatus, heartbeat: Heartbeat, peer: Heartbeat | None = None
) -> Fault:
    """Describe a rank whose process ended or whose heartbeats stopped.

    gloo aborts a process whose collective does not match the message of another rank.

    Args:
        rank: The rank.
        status: Its status.
        heartbeat: Its last heartbeat.
        peer: Heartbeat of another rank, to compare collectives.
    """
    stack = _lines_of(stack_in_report(heartbeat.crash, heartbeat.thread))
    crash = heartbeat.crash.partition("\n")[0].removeprefix("Fatal Python error: ")
    if crash:
        heartbeat = dataclasses.replace(heartbeat, source_line=_describe(stack))
    if crash == "Aborted" and _is_communication(stack):
        waiting = f"; another rank is in {peer}" if peer is not None else ""
        text = (
            f"the ranks' collectives do not match: rank {rank} (host {heartbeat.host}) was aborted "
            f"in a collective by its backend, in {heartbeat}{waiting}. Call the same collective "
            f"with equal sizes and dtypes on all ranks; the log of rank {rank} has the backend's "
            "message."
        )
        return Fault("dead", rank, text)
    if status.process_exited:
        how = f"crashed ({crash}; process" if crash else "died (process"
        killer = "; the kernel's out-of-memory killer was at work" if status.out_of_memory else ""
        cause = f"{how} {heartbeat.pid} has ended{killer})"
    else:
        seconds = f"{status.seconds_since_heartbeat:.0f}"
        cause = f"sent no heartbeat for {seconds} s: it is dead, stopped or unreachable"
    known = "its last operation" if heartbeat.current else "its last known operation"
    text = (
        f"rank {rank} (host {heartbeat.host}) {cause}; {known} was {heartbeat}, "
        f"{status.seconds_since_progress:.0f} s ago. Check its log and its host, then restart "
        "the run."
    )
    return Fault("dead", rank, text)


def _find_straggler(
    active: dict[int, tuple[RankStatus, Heartbeat]], limits: Limits, ordered_progress: bool
) -> Fault | None:
    """Find the rank that all others wait for, given that no rank makes progress."""
    first = min(heartbeat.operation_index for _, heartbeat in active.values())
    late = {rank for rank, (_, h) in active.items() if h.operation_index == first}
    if len(late) == len(active):  # same operation everywhere: a rank outside of a collective
        late = {rank for rank, (_, h) in active.items() if not h.in_collective}
    if len(late) in (0, len(active)) and ordered_progress:
        least = min(heartbeat.progress for _, heartbeat in active.values())
        late = {rank for rank, (_, h) in active.items() if h.progress == least}
    if len(late) in (0, len(active)):
        all_wait = all(heartbeat.in_collective for _, heartbeat in active.values())
        return _deadlock(active) if all_wait and len(active) > 1 else None
    rank = max(late, key=lambda each: active[each][0].stalled_seconds)
    waiting = next(each for each in active if each not in late)
    status, heartbeat = active[rank]
    others = f"rank {waiting} is" if len(active) == 2 else f"rank {waiting} and others are"
    text = (
        f"rank {rank} (host {heartbeat.host}) has been stuck in {heartbeat} for "
        f"{status.seconds_since_progress:.0f} s; {others} waiting in "
        f"{active[waiting][1]}. Check the log of rank {rank}"
    )
    if limits.setting:
        text += (
            f", or raise {limits.setting} ({limits.stall_timeout:g} s) if this operation is "
            "expected to take longer"
        )
    return Fault("stalled", rank, text + ".")


def _deadlock(active: dict[int, tuple[RankStatus, Heartbeat]]) -> Fault:
    """Describe ranks that all wait in collectives at the same operation."""
    listed = [f"rank {rank} (host {h.host}) in {h}" for rank, (_, h) in active.items()]
    more = f" and {len(listed) - RANKS_SHOWN} more" if len(listed) > RANKS_SHOWN else ""
    seconds = next(iter(active.values()))[0].stalled_seconds
    text = (
        f"deadlock: all ranks have been waiting for each other for {seconds:.0f} s: "
        f"{'; '.join(listed[:RANKS_SHOWN])}{more}. The ranks called different collectives, or the "
        "network between them is down."
    )
    return Fault("deadlock", None, text)


def _find_exited_peer(
    ranks: dict[int, tuple[RankStatus, Heartbeat]],
    active: dict[int, tuple[RankStatus, Heartbeat]],
) -> Fault | None:
    """Find a rank that left the run while every active rank waits in a collective."""
    if not all(heartbeat.in_collective for _, heartbeat in active.values()):
        return None
    waiting, (status, heartbeat) = next(iter(active.items()))
    for rank, (_, last) in ranks.items():
        if last.exited:
            text = (
                f'rank {rank} (host {last.host}) exited the run in "{last.operation}"; rank '
                f"{waiting} has been waiting for it in {heartbeat} for "
                f"{status.seconds_since_progress:.0f} s. Check the log of rank {rank}."
            )
            return Fault("exited", rank, text)
    return None
