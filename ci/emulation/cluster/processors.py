"""Processor time of emulated nodes: a cgroup with a quota for each, so that none uses another's."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from nearlinear.distributed.process_exit import cgroup

PERIOD = 20_000
"""Microseconds in which a node may use its share."""


def unavailable_reason() -> str:
    """Return why nodes cannot have a share of the processors here, or an empty string."""
    parent, _ = cgroup("cpu")
    if parent is None:
        return "this process has no cgroup of the cpu controller"
    folder = parent / f"nearlinear-{os.getpid()}-trial-node"
    try:
        folder.mkdir()
    except OSError as error:
        return f"a cgroup for processor time cannot be made: {error}"
    limits = [(folder / name).exists() for name in ("cpu.max", "cpu.cfs_quota_us")]
    folder.rmdir()
    return "" if any(limits) else "the cpu controller is not delegated to children of this cgroup"


def limit(holders: Sequence[int], cores: float) -> list[Path]:
    """Give each node, held by one of ``holders``, ``cores`` processors; return the cgroups."""
    (parent, version), folders = cgroup("cpu"), []
    assert parent is not None
    for stale in parent.glob("nearlinear-*-node*"):
        if not Path("/proc", stale.name.split("-")[1]).exists():  # its owner was killed
            stale.rmdir()
    for number, holder in enumerate(holders):
        folder = parent / f"nearlinear-{os.getpid()}-{holder}-node{number}"
        folder.mkdir()
        folders.append(folder)
        quota = round(cores * PERIOD)
        if version == 2:
            (folder / "cpu.max").write_text(f"{quota} {PERIOD}")
        else:
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD))
            (folder / "cpu.cfs_quota_us").write_text(str(quota))
        (folder / "cgroup.procs").write_text(str(holder))
    return folders


def join(holder: int) -> None:
    """Move the calling process to the cgroup of the node that ``holder`` holds, if it has one."""
    parent, _ = cgroup("cpu")
    for folder in parent.glob(f"nearlinear-*-{holder}-node*") if parent is not None else ():
        (folder / "cgroup.procs").write_text(str(os.getpid()))


def command(folder: Path, words: Sequence[str]) -> list[str]:
    """Return a command that runs ``words`` in the cgroup ``folder``."""
    return ["sh", "-c", 'echo $$ > "$0/cgroup.procs"; exec "$@"', str(folder), *words]


def remove(folders: Sequence[Path]) -> None:
    """Remove cgroups whose processes have been killed."""
    deadline = time.monotonic() + 5
    for folder in folders:
        while (folder / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        folder.rmdir()
