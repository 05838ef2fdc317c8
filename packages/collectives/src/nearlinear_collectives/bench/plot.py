"""Bus bandwidth over size, a line per contender and a panel per operation."""

import math
from pathlib import Path

from .errors import UsageError
from .sizes import show

COLOURS = ("#2563eb", "#f59e0b", "#059669", "#db2777", "#7c3aed", "#0891b2", "#dc2626", "#65a30d")
INK, GRID = "#1f2a37", "#e5e7eb"
SUFFIXES = (".svg", ".png", ".pdf")


def check(path: Path) -> None:
    """UsageError before an hour of measuring, not after it."""
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"--plot {path}: the name must end in {', '.join(SUFFIXES)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError("--plot draws with matplotlib: pip install matplotlib") from None


def draw(entries: list[dict], path: Path, title: str) -> None:
    """Draw the records that `table.entry` makes."""
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
            for label, colour in zip(labels, _cycle(COLOURS, len(labels)), strict=True):
                points = [
                    (e["bytes"], e["busbw_GBps"])
                    for e in entries
                    if e["contender"] == label and tuple(e[key] for key in series) == panel
                ]
                ax.plot(*zip(*points, strict=True), "o-", ms=3.5, lw=1.6, color=colour, label=label)
            _dress(ax, f"{panel[0]} ({panel[1]}, {panel[2]})", [e["bytes"] for e in entries])
        for ax in list(axes):
            ax.axis("off")
        for ax in figure.axes[::columns]:
            ax.set_ylabel("bus bandwidth, GB/s")
        figure.axes[0].legend(frameon=False, fontsize=9)
        figure.suptitle(title, fontsize=10)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def _dress(ax, title: str, sizes: list[int]) -> None:
    first, last = min(sizes), max(sizes)
    ticks = sorted({2 ** round(math.log2(size)) for size in sizes})
    ticks = ticks[:: -(-len(ticks) // 6)]
    ax.set_xscale("log", base=2)
    ax.set_xlim(first / 1.3, last * 1.3)
    ax.set_ylim(bottom=0)
    ax.set_xticks(ticks, [show(size) for size in ticks], fontsize=8)
    ax.set_xticks([], minor=True)
    ax.set_title(title, fontsize=10, color=INK)
    ax.grid(color=GRID, lw=0.8)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def _cycle(colours: tuple[str, ...], count: int) -> list[str]:
    return [colours[i % len(colours)] for i in range(count)]
