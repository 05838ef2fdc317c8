"""Figures of races: step times, timelines of a step, and efficiency over nodes or link rates."""

from __future__ import annotations

import statistics
from pathlib import Path

from .contestants import ENTRIES
from .table import seconds_of

KINDS = {
    "compute": ("computes", "#9ca3af"),
    "gather": ("gathers parameters", "#2563eb"),
    "reduce": ("reduces gradients", "#f59e0b"),
    "second_hop": ("joins replicas", "#db2777"),
}
COLOURS = ("#059669", "#2563eb", "#f59e0b", "#db2777", "#7c3aed", "#0891b2")
INK, MUTED, GRID = "#1f2a37", "#6b7280", "#e5e7eb"


def step_times(turns: list[dict]):
    """A bar per contestant, its turns as dots."""
    seconds = seconds_of(turns)
    names = sorted(seconds, key=lambda name: -statistics.median(seconds[name]))
    figure, ax = _figure(9, 0.42 * len(names) + 1.2)
    for row, name in enumerate(names):
        colour = COLOURS[0] if ENTRIES[name].module == "ours" else MUTED
        ax.barh(row, statistics.median(seconds[name]), 0.62, color=colour, alpha=0.75)
        ax.plot(seconds[name], [row] * len(seconds[name]), ".", color=INK, ms=4)
    ax.set_yticks(range(len(names)), [ENTRIES[name].title for name in names])
    ax.set_xlabel("seconds per step")
    return figure


def timelines(turns: list[dict]):
    """A panel per contestant: what rank 0, which is traced, does in one step, on one scale."""
    traced = [turn for turn in turns if turn.get("spans")]
    longest = max(end for t in traced for of in t["spans"].values() for _, end in of)
    figure, axes = _figure(10, 1.15 * len(traced) + 0.9, len(traced))
    for turn, ax in zip(traced, axes, strict=True):
        for row, (kind, (_, colour)) in enumerate(reversed(KINDS.items())):
            pieces = [(begin, end - begin) for begin, end in turn["spans"].get(kind, ())]
            ax.broken_barh(pieces, (row - 0.42, 0.84), color=colour, lw=0)
        ax.set(xlim=(0, longest), ylim=(-0.6, len(KINDS) - 0.4), yticks=[])
        ax.set_title(ENTRIES[turn["contestant"]].title, fontsize=9, loc="left", color=INK)
    axes[-1].set_xlabel("seconds into the step (traced: a little slower than timed ones)")
    handles = [_swatch(colour, words) for words, colour in KINDS.values()]
    figure.legend(handles=handles, loc="outside upper right", ncols=4, frameon=False, fontsize=9)
    return figure


def efficiencies(points: dict[str, list[tuple[float, float]]], label: str):
    """A line per contestant: share of the step that computation alone takes, over ``label``."""
    figure, ax = _figure(7, 4)
    ours_first = sorted(points.items(), key=lambda item: ENTRIES[item[0]].module != "ours")
    for (name, of), colour in zip(ours_first, COLOURS * 3, strict=False):
        ax.plot(*zip(*sorted(of), strict=True), "o-", color=colour, label=ENTRIES[name].title)
    ax.set(xlabel=label, ylabel="efficiency", ylim=(0, 1.05))
    ax.grid(axis="y", color=GRID)
    ax.legend(frameon=False, fontsize=9)
    return figure


def save(figure, path: Path) -> None:
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "nearlinear"}):
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def _figure(width: float, height: float, panels: int = 0):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(panels or 1, 1, squeeze=False, sharex=True).flatten()
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    return figure, list(axes) if panels else axes[0]


def _swatch(colour: str, words: str):
    from matplotlib.patches import Patch

    return Patch(color=colour, label=words)
