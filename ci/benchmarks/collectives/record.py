"""Records of a benchmark run as JSON and as a figure: machine, versions, load and results.

Records are made to be published, so they hold no names of hosts or users.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import resource
import shlex
import time
from pathlib import Path

from ci.benchmarks.collectives.options import UsageError, format_size
from nearlinear.plots import GRID, INK, PALETTE

PLOT_SUFFIXES = (".svg", ".png", ".pdf")


def header(module: str, arguments: list[str], *packages: str) -> dict:
    """Return the first entries of every record: command, versions and machine."""
    return {
        "command": shlex.join(["python", "-m", module, *arguments]),
        "versions": versions(*packages),
        "machine": machine_facts(),
    }


def write(path: Path, record: dict) -> None:
    """Write a record as JSON with one line per result, which keeps diffs readable."""
    lines = []
    for key, value in record.items():
        if isinstance(value, list):
            rows = ",\n  ".join(json.dumps(item) for item in value)
            lines.append(f"{json.dumps(key)}: [\n  {rows}\n ]")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value)}")
    path.write_text("{\n " + ",\n ".join(lines) + "\n}\n", encoding="utf-8")


def machine_facts() -> dict:
    """Return the processor model, usable cores, memory and kernel of this machine."""
    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "memory_gib": round(memory_bytes("MemTotal") / 2**30, 1),
        "system": f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
    }


def versions(*packages: str) -> dict:
    """Return the versions of Python and of the installed ones among ``packages``."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine_line(record: dict) -> str:
    """Format the machine and the versions of a record on one line."""
    facts = record["machine"]
    software = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return (
        f"# {facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB, "
        f"{facts['system']}; {software}"
    )


def usable_cores() -> int:
    """Return the number of cores this process may run on."""
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


def memory_bytes(field: str = "MemAvailable") -> int:
    """Read a field of /proc/meminfo, limited by the container's quota; 0 if it is unreadable."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))
    except (OSError, StopIteration):
        return 0
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return found
    if limit == "max":
        return found
    return min(found, int(limit) - (used if field == "MemAvailable" else 0))


def own_cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its terminated children."""
    scopes = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(sum(resource.getrusage(scope)[:2]) for scope in scopes)


class BackgroundLoad:
    """Load by other programs between construction and `cores`."""

    def __init__(self) -> None:
        self.start, self.busy = time.monotonic(), _busy_seconds()

    def cores(self, own_seconds: float) -> float | None:
        """Return the average number of cores used by other programs, or None if unknown.

        Args:
            own_seconds: CPU seconds of the measured programs since construction.
        """
        now = _busy_seconds()
        if self.busy is None or now is None:
            return None
        elapsed = time.monotonic() - self.start
        return max(0.0, (now - self.busy - own_seconds) / elapsed)


def background_line(cores: float | None) -> str:
    """Format the background load on one line; empty if it is unknown."""
    if cores is None:
        return ""
    warning = "" if cores < 0.1 * usable_cores() else ": times are longer and noisier than alone"
    return f"# other programs kept {cores:.2f} of {usable_cores()} cores busy meanwhile{warning}"


def _busy_seconds() -> float | None:
    """Return the CPU seconds of all programs since boot, or None without /proc.

    Interrupt time is excluded: socket interrupts are caused by the measured programs but are not
    counted in their own CPU time.
    """
    try:
        user, nice, system = Path("/proc/stat").read_text().split(maxsplit=4)[1:4]
    except OSError:
        return None
    return (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")


def check_plot_file(path: Path) -> None:
    """Raise UsageError before the measurement if ``path`` cannot be drawn after it."""
    if path.suffix.lower() not in PLOT_SUFFIXES:
        raise UsageError(f"--plot {path}: the name must end in {', '.join(PLOT_SUFFIXES)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError("--plot draws with matplotlib: pip install matplotlib") from None


def plot_bus_bandwidth(entries: list[dict], path: Path, title: str) -> None:
    """Plot bus bandwidth over size: one panel per operation, one line per backend.

    Args:
        entries: Results as `measure.entry` returns them.
        path: File to write, in one of `PLOT_SUFFIXES`.
        title: Title of the figure.
    """
    import matplotlib
    from matplotlib.figure import Figure

    series = ("operation", "pattern", "dtype")
    panels = list(dict.fromkeys(tuple(e[key] for key in series) for e in entries))
    labels = list(dict.fromkeys(e["contender"] for e in entries))
    with matplotlib.rc_context({"svg.hashsalt": "nearlinear", "text.color": INK}):
        columns = min(3, len(panels))
        rows = -(-len(panels) // columns)
        figure = Figure(figsize=(4.2 * columns, 3.3 * rows + 0.5), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).flat
        for panel, ax in zip(panels, axes, strict=False):
            for i, label in enumerate(labels):
                points = [
                    (e["bytes"], e["busbw_GBps"])
                    for e in entries
                    if e["contender"] == label and tuple(e[key] for key in series) == panel
                ]
                colour = PALETTE[i % len(PALETTE)]
                ax.plot(*zip(*points, strict=True), "o-", ms=3.5, lw=1.6, color=colour, label=label)
            _style_axes(ax, f"{panel[0]} ({panel[1]}, {panel[2]})", [e["bytes"] for e in entries])
        for ax in list(axes):
            ax.axis("off")
        for ax in figure.axes[::columns]:
            ax.set_ylabel("bus bandwidth, GB/s")
        figure.axes[0].legend(frameon=False, fontsize=9)
        figure.suptitle(title, fontsize=10)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def _style_axes(ax, title: str, sizes: list[int]) -> None:
    first, last = min(sizes), max(sizes)
    ticks = sorted({2 ** round(math.log2(size)) for size in sizes})
    ticks = ticks[:: -(-len(ticks) // 6)]
    ax.set_xscale("log", base=2)
    ax.set_xlim(first / 1.3, last * 1.3)
    ax.set_ylim(bottom=0)
    ax.set_xticks(ticks, [format_size(size) for size in ticks], fontsize=8)
    ax.set_xticks([], minor=True)
    ax.set_title(title, fontsize=10, color=INK)
    ax.grid(color=GRID, lw=0.8)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
