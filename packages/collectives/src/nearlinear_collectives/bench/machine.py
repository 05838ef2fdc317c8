"""What a reader must know of the machine to judge a number: processor, cores, memory, versions.

Names of hosts and users are left out: records are made to be published.
"""

import importlib.metadata
import os
import platform
import resource
import time
from pathlib import Path


def facts() -> dict:
    """Processor model, usable cores, memory and kernel of this machine."""
    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "memory_gib": round(memory_bytes("MemTotal") / 2**30, 1),
        "system": f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
    }


def versions(*packages: str) -> dict:
    """Versions of Python and of those packages that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def memory_bytes(which: str = "MemAvailable") -> int:
    """A line of /proc/meminfo, bounded by the container's limit; 0 where neither can be read."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = next(int(line.split()[1]) * 1024 for line in lines if line.startswith(which + ":"))
    except (OSError, StopIteration):
        return 0
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return found
    if limit == "max":
        return found
    return min(found, int(limit) - (used if which == "MemAvailable" else 0))


def own_seconds() -> float:
    """CPU seconds of this process and of its children that have ended."""
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(sum(resource.getrusage(one)[:2]) for one in who)


class Background:
    """How busy other programs kept the cores while something was measured."""

    def __init__(self):
        self.start, self.busy = time.monotonic(), _busy_seconds()

    def cores(self, own_seconds: float) -> float | None:
        """Cores that others used on average; ``own_seconds``: the measured programs' CPU time."""
        now = _busy_seconds()
        if self.busy is None or now is None:
            return None
        spent = time.monotonic() - self.start
        return max(0.0, (now - self.busy - own_seconds) / spent)


def background_line(cores: float | None) -> str:
    """One line for people; empty where nothing is known."""
    if cores is None:
        return ""
    advice = "" if cores < 0.1 * usable_cores() else ": times are longer and vary more than alone"
    return f"# other programs kept {cores:.2f} of {usable_cores()} cores busy meanwhile{advice}"


def _busy_seconds() -> float | None:
    """CPU seconds of all programs since the machine started; None where /proc does not tell.

    Without interrupts: those of sockets belong to the measured programs, but not to their clocks.
    """
    try:
        user, nice, system = Path("/proc/stat").read_text().split(maxsplit=4)[1:4]
    except OSError:
        return None
    return (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")
