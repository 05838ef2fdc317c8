"""Describe the code a thread is running: its source line, and whether it waits in a collective."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType

import torch

_TORCH = str(Path(torch.__file__).parent)
_NEARLINEAR = str(Path(__file__).parent.parent)
_STANDARD = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
_PACKAGES = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))
_THREAD_BACKEND = (
    f"{_NEARLINEAR}/distributed/thread_backend.py",
    f"{_NEARLINEAR}/distributed/local_ranks.py",
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


def of_thread(ident: int) -> tuple[bool, str]:
    """Return whether thread ``ident`` waits in a collective, and its source line.

    Only waits in Python, or in native code called from a communication module, are recognized; a
    kernel that waits on an accelerator is not. Returns ``(False, "")`` for an unknown thread.
    """
    frame = sys._current_frames().get(ident)
    if frame is None:
        return False, ""
    frames = list(_outwards(frame))
    return _is_communication(frames), _describe(frames)


def failed_in_communication(error: BaseException) -> bool:
    """Return whether a collective raised ``error``, judged by its innermost frame."""
    frames = [trace.tb_frame for trace in _traces(error.__traceback__)]
    return _is_communication(frames[::-1])


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _traces(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_communication(frames: list[FrameType]) -> bool:
    """Classify a stack by its innermost frame outside of the standard library."""
    for frame in frames:
        name = frame.f_code.co_filename
        if not _is_standard(name) and name != _OPERATOR_DISPATCH:
            return any(part in name for part in _COMMUNICATION)
    return False


def _describe(frames: list[FrameType]) -> str:
    """Return "collective, file:line in function" for the innermost frame of user code."""
    calls = (f.f_code for f in frames if f.f_code.co_filename.endswith(_C10D_CALLS))
    call = next((code.co_name for code in calls), "")
    user_frames = (
        frame
        for frame in frames
        if not _is_standard(name := frame.f_code.co_filename)
        and not name.startswith((_TORCH, *_THREAD_BACKEND))
    )
    frame = next(user_frames, None)
    if frame is None:
        return call
    path = Path(frame.f_code.co_filename)
    line = f"{path.parent.name}/{path.name}:{frame.f_lineno} in {frame.f_code.co_name}"
    return f"{call}, {line}" if call else line


def _is_standard(name: str) -> bool:
    return name.startswith("<") or (name.startswith(_STANDARD) and not name.startswith(_PACKAGES))
