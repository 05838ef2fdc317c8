"""Where a thread is: the line of code that says most, and whether it waits for other ranks."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType

import torch

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent.parent)
_STANDARD = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
_PACKAGES = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))
_COMMUNICATION = (
    f"{_TORCH}/distributed/",
    f"{_TORCH}/testing/_internal/distributed/",  # of ranks that are threads
    f"{_OURS}/parallel/",
    f"{_OURS}/spmd/",
    f"{_OURS}/c10d_names.py",
    "nearlinear_collectives/",
)
_PASSES_ON = f"{_TORCH}/_ops.py"
_CALLS = "/distributed_c10d.py"


def of_thread(ident: int) -> tuple[bool, str]:
    """Whether thread ``ident`` waits for other ranks, and where it is; ``(False, "")``: unknown.

    By the code that is running, so that only what waits in Python or was called from it counts: not
    a kernel that waits on an accelerator.
    """
    frame = sys._current_frames().get(ident)
    if frame is None:
        return False, ""
    frames = list(_outwards(frame))
    return _communicates(frames), _described(frames)


def failed_in_communication(error: BaseException) -> bool:
    """Whether ``error`` was raised by a collective, by the innermost code of its traceback."""
    frames = [trace.tb_frame for trace in _traces(error.__traceback__)]
    return _communicates(frames[::-1])


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _traces(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _communicates(frames: list[FrameType]) -> bool:
    """``frames``: the innermost first."""
    for frame in frames:
        name = frame.f_code.co_filename
        if not _is_standard(name) and name != _PASSES_ON:
            return any(part in name for part in _COMMUNICATION)
    return False


def _described(frames: list[FrameType]) -> str:
    call = next((f.f_code.co_name for f in frames if f.f_code.co_filename.endswith(_CALLS)), "")
    telling = (
        frame
        for frame in frames
        if not _is_standard(name := frame.f_code.co_filename)
        and not name.startswith((_TORCH, f"{_OURS}/spmd/"))
    )
    frame = next(telling, None)
    if frame is None:
        return call
    path = Path(frame.f_code.co_filename)
    line = f"{path.parent.name}/{path.name}:{frame.f_lineno} in {frame.f_code.co_name}"
    return f"{call}, {line}" if call else line


def _is_standard(name: str) -> bool:
    return name.startswith("<") or (name.startswith(_STANDARD) and not name.startswith(_PACKAGES))
