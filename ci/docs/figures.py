"""Figures of the concept pages, drawn by matplotlib and by nearlinear's own plots."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle  # noqa: E402

import nearlinear as nl  # noqa: E402
from ci.notebooks import overview  # noqa: E402
from nearlinear.plots import INK, MUTED, PALETTE  # noqa: E402

BLUE, ORANGE, GREEN, RED = PALETTE[:4]
PLAN: dict[str, Any] = {
    "model": {"preset": "gpt2-30b"},
    "parallel": {"hybrid_shard_degree": 128, "bf16": True},
    "activations": {"checkpoint": "each"},
}
"""Config of the planner's figure."""


def draw_all(folder: Path) -> list[Path]:
    """Draw every figure into ``folder``; the bytes are reproducible."""
    folder.mkdir(parents=True, exist_ok=True)
    plt.rcParams |= {"svg.hashsalt": "nearlinear", "svg.fonttype": "path"}
    written = [overview.draw(folder / "mics.svg")]
    for name, draw in FIGURES.items():
        figure = draw()
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        plt.close(figure)
        written.append(folder / f"{name}.svg")
    return written


def canvas(width: float, height: float, x: tuple[float, float], y: tuple[float, float]) -> Any:
    """Return axes without frame or ticks."""
    _, ax = plt.subplots(figsize=(width, height), layout="constrained")
    ax.set(xlim=x, ylim=y)
    ax.axis("off")
    return ax


def box(ax, x, y, width, height, text="", colour=BLUE, size=8, ink="white", dashed=False) -> None:
    """Draw a filled rectangle with text in its centre."""
    face = "none" if dashed else colour
    edge = colour if dashed else "white"
    style = "--" if dashed else "-"
    ax.add_patch(Rectangle((x, y), width, height, facecolor=face, edgecolor=edge, ls=style, lw=1))
    colour = colour if dashed else ink
    ax.text(
        x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size, color=colour
    )


def arrow(ax, start, end, colour=MUTED, style="->", bend=0.0) -> None:
    """Draw an arrow."""
    shape = f"arc3,rad={bend}"
    patch = FancyArrowPatch(start, end, arrowstyle=style, mutation_scale=10, connectionstyle=shape)
    patch.set(color=colour, lw=1.4)
    ax.add_patch(patch)


def label(ax, x, y, text, colour=INK, size=9, align="left") -> None:
    """Write text."""
    ax.text(x, y, text, fontsize=size, color=colour, ha=align, va="center")


def two_hop() -> Any:
    ax = canvas(9, 2.6, (-2.3, 12.2), (-0.2, 3.5))
    for number in range(4):
        x = number * 2.6
        box(ax, x, 2, 2.3, 0.8, f"micro-batch {number + 1}", MUTED)
        box(ax, x + 1.2, 1, 1.1, 0.8, "reduce-\nscatter", BLUE)
        arrow(ax, (x + 1.75, 2), (x + 1.75, 1.8))
    box(ax, 9.1, 0, 1.1, 0.8, "all-\nreduce", ORANGE)
    arrow(ax, (9.65, 1), (9.65, 0.8), ORANGE)
    box(ax, 10.6, 0, 1.5, 0.8, "optimizer\nstep", GREEN)
    for y, text in ((2.4, "compute"), (1.4, "within the replica"), (0.4, "between replicas")):
        label(ax, -0.15, y, text, align="right")
    label(ax, 4.9, 3.2, "one optimizer step on one rank", align="center", colour=MUTED)
    return ax.figure


def hierarchical_gather() -> Any:
    ax = canvas(9, 3.4, (-0.3, 15.5), (-0.6, 4.2))
    for stage, title in enumerate(("1. between nodes", "2. inside each node")):
        left = stage * 8.2
        label(ax, left + 3.3, 4, title, align="center")
        for node in range(2):
            x = left + node * 3.6
            ax.add_patch(
                FancyBboxPatch((x, 0.1), 3, 3.4, boxstyle="round,pad=0.1", fill=False, ec=MUTED)
            )
            label(ax, x + 1.5, -0.35, f"node {node}", align="center", colour=MUTED)
            for rank in range(2):
                for shard in range(4):
                    held = shard % 2 == rank if stage == 0 else True
                    own = shard == 2 * node + rank
                    colour = PALETTE[shard] if held else "#eef1f5"
                    received = held and not own and stage == 0
                    place = (x + 0.2 + rank * 1.5, 2.6 - shard * 0.8, 1.1, 0.7)
                    box(ax, *place, str(shard) if held else "", colour, dashed=received)
        if stage == 0:
            arrow(ax, (left + 1.3, 3.42), (left + 3.8, 3.42), ORANGE, "<->", -0.25)
            arrow(ax, (left + 2.8, 0.08), (left + 5.3, 0.08), ORANGE, "<->", 0.25)
        else:
            for node in range(2):
                arrow(
                    ax, (left + node * 3.6 + 1.3, 1.8), (left + node * 3.6 + 1.7, 1.8), BLUE, "<->"
                )
    return ax.figure


def overlap() -> Any:
    ax = canvas(9, 2.6, (-2.4, 14.2), (-0.3, 3.4))
    rows = {"all-gather": 2.2, "compute": 1.2, "reduce-scatter": 0.2}
    for name, y in rows.items():
        label(ax, -0.15, y + 0.35, name, align="right")
    x = 0.0
    box(ax, x, rows["all-gather"], 0.9, 0.7, "1", RED)
    x = 0.9
    for block in (1, 2, 3):
        box(ax, x, rows["compute"], 1.4, 0.7, f"fwd {block}", BLUE)
        if block < 3:
            box(ax, x, rows["all-gather"], 0.9, 0.7, str(block + 1), ORANGE)
        x += 1.4
    for block in (3, 2, 1):
        box(ax, x, rows["compute"], 2.4, 0.7, f"bwd {block}", GREEN)
        if block > 1:
            box(ax, x, rows["all-gather"], 0.9, 0.7, str(block - 1), ORANGE)
        colour = RED if block == 1 else ORANGE
        box(ax, x + 2.4, rows["reduce-scatter"], 0.9, 0.7, str(block), colour)
        x += 2.4
    label(ax, 0, 3.2, "orange: hidden behind compute; red: exposed. Numbers are blocks", MUTED)
    return ax.figure


def offload() -> Any:
    ax = canvas(9, 2.9, (-2.4, 12.6), (-0.3, 3.6))
    for y, name in ((2.4, "compute"), (1.3, "copies"), (0.2, "host memory")):
        label(ax, -0.15, y + 0.35, name, align="right")
    for block in range(4):
        box(ax, block * 1.5, 2.4, 1.4, 0.7, f"fwd {block + 1}", BLUE)
        if block < 2:
            box(ax, block * 1.5 + 1.5, 1.3, 1.0, 0.7, f"out {block + 1}", ORANGE)
        x = 6 + (3 - block) * 1.6
        box(ax, x, 2.4, 1.5, 0.7, f"bwd {block + 1}", GREEN)
        if block < 2:  # prefetched while an earlier block computes
            box(ax, x - 2.2, 1.3, 1.0, 0.7, f"in {block + 1}", RED)
    box(ax, 2.5, 0.2, 7.0, 0.7, "saved activations of blocks 1 and 2", MUTED)
    label(
        ax,
        0,
        3.45,
        "blocks 3 and 4 are within the loading horizon and never leave the device",
        MUTED,
    )
    return ax.figure


def exactness() -> Any:
    ax = canvas(9, 2.6, (-0.2, 14), (-0.2, 3.4))
    for row, (targets, pads, weight) in enumerate(((6, 0, "6/8"), (2, 4, "2/8"))):
        y = 2 - row * 1.5
        label(ax, 0, y + 0.4, f"rank {row}")
        for at in range(targets + pads):
            box(ax, 1.3 + at * 0.8, y, 0.72, 0.8, "" if at < targets else "pad",
                BLUE if at < targets else "#d5dae1", 7, MUTED)  # fmt: skip
        label(ax, 6.4, y + 0.4, f"mean over {targets} targets  x  {weight}")
        arrow(ax, (10.3, y + 0.4), (11.2, 1.65), ORANGE)
    box(ax, 11.3, 1.2, 2.5, 0.9, "mean over\n8 targets", GREEN)
    label(
        ax,
        0,
        3.25,
        "averaging the two means would weight the two targets of rank 1 three times",
        MUTED,
    )
    return ax.figure


def failure_semantics() -> Any:
    ax = canvas(9, 2.8, (-0.2, 16.2), (-0.4, 4.2))
    for row, (fault, detector) in enumerate((
        ("rank dies or hangs", "heartbeats"),
        ("bit flips in memory", "fingerprints"),
        ("file changes on disk", "checksums"),
    )):  # fmt: skip
        y = 3 - row * 1.5
        box(ax, 0, y, 3.6, 0.9, fault, RED)
        box(ax, 4.4, y, 2.8, 0.9, detector, ORANGE)
        arrow(ax, (3.65, y + 0.45), (4.35, y + 0.45))
        arrow(ax, (7.25, y + 0.45), (8.2, 1.95))
    box(ax, 8.3, 1.5, 3.4, 0.9, "stop with the name;\nsave the last step", BLUE)
    box(ax, 12.6, 1.5, 3.4, 0.9, "resume from the\nnewest intact state", GREEN)
    arrow(ax, (11.75, 1.95), (12.55, 1.95))
    return ax.figure


def planner() -> Any:
    return nl.plan(PLAN, "p4d.24xlarge:32").figure().figure


FIGURES: dict[str, Callable[[], Any]] = {
    "two_hop": two_hop,
    "hierarchical_gather": hierarchical_gather,
    "overlap": overlap,
    "offload": offload,
    "exactness": exactness,
    "failure_semantics": failure_semantics,
    "planner": planner,
}
"""Functions by file name, besides ``mics``, which is the figure of the README."""
