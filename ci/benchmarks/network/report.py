"""Tables for a terminal and figures of link utilization."""

from __future__ import annotations

from pathlib import Path

from ci.benchmarks.collectives.options import format_size
from nearlinear.plots import GRID, INK, LINES, MARKERS, MUTED

from .config import CEILING, show_rate

LEGEND = f"""\
per node: a node's input of all_gather, its output of reduce_scatter, its share of all_reduce's
buffer, or what its ranks send to those of another node in all_to_all. size: all_gather's output,
reduce_scatter's input, all_reduce's buffer, a rank's input of all_to_all.
link: bytes that must cross a node's NIC / time / rate, median (best) of the blocks; Ethernet, IP
and TCP headers leave {100 * CEILING:.1f} % to data. sent: bytes sent by the busiest NIC according
to its counter / bytes it must send."""


def table_head(operation: str, nodes: int, ranks: int, rate: int, labels: list[str]) -> str:
    """Return the title and the head of a table."""
    names = ["per node", "size", *(f"{label} link" for label in labels)]
    names += [f"{label} sent" for label in labels]
    names += [f"{label}/{labels[0]} time" for label in labels[1:]]
    widths = _widths(labels)
    cells = [name.rjust(width) for name, width in zip(names, widths, strict=True)]
    rule = "|".join("-" * (width + 1) + ":" for width in widths)
    title = f"{operation}, {nodes} nodes x {ranks} rank{'s' * (ranks > 1)}, {show_rate(rate)}"
    return f"\n{title}\n\n| {' | '.join(cells)} |\n|{rule}|"


def table_row(records: list[dict]) -> str:
    """Return the row of one size, with records in the order of the head's labels."""
    first = records[0]
    texts = [format_size(first["bytes_per_node"]), format_size(first["bytes"])]
    texts += [format_link(record) for record in records]
    texts += [f"{record['sent_over_necessary']:.2f}" for record in records]
    texts += [f"{record['median_us'] / first['median_us']:.2f}" for record in records[1:]]
    widths = _widths([record["contender"] for record in records])
    cells = [text.rjust(width) for text, width in zip(texts, widths, strict=True)]
    return f"| {' | '.join(cells)} |"


def format_link(record: dict) -> str:
    """Return the link utilization as ``94.7 % (95.2)``: median and best block."""
    text = f"{100 * record['link_used']:.1f} % ({100 * record['link_used_at_best']:.1f})"
    return text + (f" {record['wrong']} WRONG" if record["wrong"] else "")


def _widths(labels: list[str]) -> list[int]:
    names = [len(label) + 5 for label in labels]
    ratios = [len(f"{label}/{labels[0]} time") for label in labels[1:]]
    return [8, 8, *(max(14, width) for width in names), *names, *ratios]


def draw(record: dict, operation: str = "all_gather", figure=None):
    """Plot link utilization over the output size, a panel per number of ranks per node.

    The layout follows AWS, "Enable faster training with Amazon SageMaker data parallel library",
    2023, which shows GPUs over EFA.

    Args:
        record: Record written by ``--json``.
        operation: Collective to plot.
        figure: Matplotlib figure to draw on; a new one by default.
    """
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
        for number, label in enumerate(labels):
            colour, marker = LINES[number], MARKERS[number]
            points = [
                (entry["bytes"], 100 * entry["link_used"])
                for entry in results
                if entry["ranks_per_node"] == ranks and entry["contender"] == label
            ]
            ax.plot(
                *zip(*points, strict=True), marker=marker, ms=4, lw=1.8, color=colour, label=label
            )
        _format_axes(ax, ranks, sorted({entry["bytes"] for entry in results}))
    for index, ax in enumerate(figure.axes):
        if index % columns == 0:
            ax.set_ylabel("link utilization, %")
        if index + columns >= len(per_node):
            ax.set_xlabel("output size" if operation == "all_gather" else "size")
            ax.tick_params(labelbottom=True)
    figure.axes[0].legend(frameon=False, fontsize=9, loc="lower right")
    nodes, rate = record["settings"]["nodes"], record["settings"]["rate_bits_per_second"]
    name = operation.replace("_", "-")
    figure.suptitle(f"{name} over {nodes} nodes, {show_rate(rate)} each", fontsize=11, color=INK)
    return figure


def save(record: dict, path: Path) -> None:
    """Save a figure per operation: the first as ``path``, others with the operation in the name."""
    import matplotlib

    for operation in dict.fromkeys(entry["operation"] for entry in record["results"]):
        first = operation == record["results"][0]["operation"]
        target = path if first else path.with_stem(f"{path.stem}_{operation}")
        with matplotlib.rc_context({"svg.hashsalt": "nearlinear", "text.color": INK}):
            date = {"Date": None} if path.suffix == ".svg" else None
            draw(record, operation).savefig(target, dpi=150, metadata=date)


def _format_axes(ax, ranks: int, sizes: list[int]) -> None:
    ax.axhline(100 * CEILING, color=MUTED, lw=1, ls="--")
    ax.text(sizes[len(sizes) // 2], 101, "limit of headers", color=MUTED, fontsize=8, ha="center")
    ax.set_xscale("log", base=2)
    ax.set_ylim(0, 109)
    ticks = sizes[:: -(-len(sizes) // 5)]
    ax.set_xticks(ticks, [format_size(size) for size in ticks], fontsize=8)
    ax.set_xticks([], minor=True)
    ax.set_title(f"{ranks} rank{'s' * (ranks > 1)} per node", fontsize=10, color=INK)
    ax.grid(color=GRID, lw=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
