"""The figure: the share of a node's link that is used over the output size, a panel per number of
ranks per node and a line per backend.

The same figure for GPUs, over EFA: AWS, "Enable faster training with Amazon SageMaker data parallel
library", 2023.
"""

from __future__ import annotations

from pathlib import Path

from nearlinear_collectives.bench.sizes import show

from .plan import CEILING, show_rate

COLOURS = ("#2563eb", "#f59e0b", "#059669", "#db2777", "#7c3aed")
INK, MUTED, GRID = "#1f2a37", "#6b7280", "#e5e7eb"


def draw(record: dict, operation: str = "all_gather", figure=None):
    """Draw a record, as ``--json`` writes it, on a matplotlib figure (a new one by default)."""
    from matplotlib.figure import Figure

    results = [entry for entry in record["results"] if entry["operation"] == operation]
    per_node = sorted({entry["ranks_per_node"] for entry in results})
    labels = list(dict.fromkeys(entry["contender"] for entry in results))
    columns = min(2, len(per_node))
    rows = -(-len(per_node) // columns)
    figure = figure or Figure(figsize=(4.4 * columns, 2.9 * rows + 0.4), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flatten()
    for ax in axes[len(per_node) :]:
        ax.remove()
    for ranks, ax in zip(per_node, axes, strict=False):
        for label, colour in zip(labels, COLOURS, strict=False):
            points = [
                (entry["bytes"], 100 * entry["link_used"])
                for entry in results
                if entry["ranks_per_node"] == ranks and entry["contender"] == label
            ]
            ax.plot(*zip(*points, strict=True), "o-", ms=4, lw=1.8, color=colour, label=label)
        _dress(ax, ranks, sorted({entry["bytes"] for entry in results}))
    for index, ax in enumerate(figure.axes):
        if index % columns == 0:
            ax.set_ylabel("share of the link used, %")
        if index + columns >= len(per_node):
            ax.set_xlabel("output size" if operation == "all_gather" else "size")
            ax.tick_params(labelbottom=True)
    figure.axes[0].legend(frameon=False, fontsize=9, loc="lower right")
    nodes, rate = record["settings"]["nodes"], record["settings"]["rate_bits_per_second"]
    name = operation.replace("_", "-")
    figure.suptitle(f"{name} over {nodes} nodes, {show_rate(rate)} each", fontsize=11, color=INK)
    return figure


def save(record: dict, path: Path) -> None:
    """All operations of a record: the first at ``path``, the others beside it by their name."""
    import matplotlib

    for operation in dict.fromkeys(entry["operation"] for entry in record["results"]):
        first = operation == record["results"][0]["operation"]
        target = path if first else path.with_stem(f"{path.stem}_{operation}")
        with matplotlib.rc_context({"svg.hashsalt": "nearlinear", "text.color": INK}):
            date = {"Date": None} if path.suffix == ".svg" else None
            draw(record, operation).savefig(target, dpi=150, metadata=date)


def _dress(ax, ranks: int, sizes: list[int]) -> None:
    ax.axhline(100 * CEILING, color=MUTED, lw=1, ls="--")
    ax.text(sizes[-1], 100 * CEILING + 0.8, "headers", color=MUTED, fontsize=7, ha="right")
    ax.set_xscale("log", base=2)
    ax.set_ylim(0, 104)
    ticks = sizes[:: -(-len(sizes) // 5)]
    ax.set_xticks(ticks, [show(size) for size in ticks], fontsize=8)
    ax.set_xticks([], minor=True)
    ax.set_title(f"{ranks} rank{'s' * (ranks > 1)} per node", fontsize=10, color=INK)
    ax.grid(color=GRID, lw=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
