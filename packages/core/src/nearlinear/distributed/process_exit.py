"""The end of a rank: callbacks, its error file, its parent's death, and the lack of memory."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_callbacks: list[Callable[[], None]] = []


def before_leaving(callback: Callable[[], None]) -> Callable[[], None]:
    """Register ``callback`` to run on every rank that leaves a job in order; usable as decorator.

    Callbacks run on all ranks in the order of registration, so they may call collectives.
    """
    _callbacks.append(callback)
    return callback


def run_callbacks() -> None:
    """Run the callbacks registered by `before_leaving`."""
    for callback in _callbacks:
        callback()


def leave_error(message: str, *, by_peer: bool = False) -> bool:
    """Write the one-line reason of this rank's end to torchelastic's error file, if there is one.

    Args:
        message: The reason.
        by_peer: True if this rank ends because it lost another one.

    Returns:
        True if a launcher reads the file. False also if the file cannot be written.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return False
    left = {"message": message, "timestamp": str(int(time.time())), "by_peer": by_peer}
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(left, file)
    except OSError:
        return False
    return True


def end_with_parent(parent: int) -> None:
    """Make the kernel end this process when process ``parent`` ends, however that happens.

    Call it early in the child. ``parent`` is the id that the parent passed to the child: if the
    parent is dead already, this process ends now. Does nothing except on Linux.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def cgroup(controller: str) -> tuple[Path | None, int]:
    """Return the folder of this process's cgroup for a controller, or None, and its version."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        places = {line.split(":", 2)[1]: line.split(":", 2)[2].lstrip("/") for line in lines}
        for controllers, path in places.items():
            if controller in controllers.split(","):
                return _existing(Path("/sys/fs/cgroup", controller), path), 1
        if "" in places:
            return _existing(Path("/sys/fs/cgroup"), places[""]), 2
    return None, 0


def memory_cgroup() -> tuple[Path | None, str]:
    """Return the folder of this process's memory cgroup, or None, and its file of kernel events."""
    folder, version = cgroup("memory")
    return folder, {1: "memory.oom_control", 2: "memory.events"}.get(version, "")


def _existing(root: Path, path: str) -> Path | None:
    """Return ``root/path``, or ``root`` where a container mounts its own cgroup there."""
    return next((each for each in (root / path, root) if each.is_dir()), None)


def memory_kills() -> int:
    """Return the number of processes of this cgroup that the kernel ended for lack of memory."""
    folder, name = memory_cgroup()
    if folder is not None:
        with contextlib.suppress(OSError):
            for line in (folder / name).read_text(encoding="ascii").splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0
