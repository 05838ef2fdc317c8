"""Figures for notebooks and runs: loss curves, memory, data, model layout, and planned steps.

Every function draws on the given matplotlib axes, or on new ones, and returns them. matplotlib is
imported on first use, and only by this module.

Example::

    metrics = nl.plots.read_metrics("runs/first")
    nl.plots.loss_curve(metrics).figure.savefig("loss.png")
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .distributed.mesh import Mesh

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, MUTED, GRID = "#1f2a37", "#6b7280", "#e5e7eb"
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#f0e442", INK)
"""Colors that people with any color vision can tell apart. Source: Okabe and Ito 2008."""
LINES = (*(PALETTE[number] for number in (0, 3, 2, 4)), INK)
"""Colors of `PALETTE` with a contrast of at least 3 to a white page, for lines and markers."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
"""Markers of lines, in addition to their colors."""
HATCHES = ("", "//", "..", "\\\\", "xx", "--", "oo", "++")
"""Patterns of areas, in addition to their colors."""


def show(alt: str) -> None:
    """Show the current figure of pyplot with an alternative text.

    In a notebook the text is stored in the output's metadata (``image/png``, ``alt``), where
    converters to HTML read it. Elsewhere the figure is shown without it.

    Args:
        alt: A sentence with the plotted quantities and the finding.

    Raises:
        ValueError: The text is empty.
    """
    import matplotlib.pyplot as plt

    if not alt.strip():
        raise ValueError("show: alt is empty. Describe the plotted quantities and the finding.")
    if "inline" not in plt.get_backend():
        plt.show()
        return
    from IPython.display import display

    figure = plt.gcf()
    display(figure, metadata={"image/png": {"alt": " ".join(alt.split())}})
    plt.close(figure)


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """Return the reported steps of a run folder, in order."""
    text = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def loss_curve(
    metrics: list[dict[str, Any]], vocabulary: int | None = None, ax: Axes | None = None
) -> Axes:
    """Draw the training and held-out loss in nats over the steps.

    Args:
        metrics: Reported steps, as returned by `read_metrics`.
        vocabulary: Vocabulary size; adds the loss of uniform guessing.
        ax: Axes to draw on.
    """
    ax = _prepare_axes(ax, (7, 3.6))
    steps = [m["step"] for m in metrics]
    ax.plot(steps, [m["loss"] for m in metrics], color=LINES[0], lw=1.6, label="training")
    held_out = [(m["step"], m["eval_loss"]) for m in metrics if "eval_loss" in m]
    if held_out:
        ax.plot(*zip(*held_out, strict=True), "s-", color=LINES[1], ms=5, label="held out")
    if vocabulary:
        level = float(np.log(vocabulary))
        ax.axhline(level, color=MUTED, lw=1, ls="--")
        ax.annotate(f"guessing: ln({vocabulary})", (steps[-1], level), (0, 2), ha="right",
                    va="bottom", textcoords="offset points", color=MUTED, fontsize=9)  # fmt: skip
        ax.margins(y=0.12)
    ax.set(xlabel="optimizer step", ylabel="cross-entropy, nats")
    ax.locator_params(axis="x", integer=True)
    ax.legend(frameon=False)
    return ax


def save_loss_curve(folder: str | Path) -> Path:
    """Save the loss curve as ``loss.png`` in a run folder and return its path."""
    return _save_figure(loss_curve(read_metrics(folder)), Path(folder) / "loss.png")


def memory(report: dict[str, Any], ax: Axes | None = None) -> Axes:
    """Draw the memory of a step by category.

    Args:
        report: Contents of ``memory.json``, or ``report.as_dict()`` of `nearlinear.memory_report`.
        ax: Axes to draw on. Bars show this rank, vertical lines the maximum over all ranks.
    """
    from .memory import PARTS

    rows = [(name, report["mine"][key], report["most"][key])
            for key, name in PARTS.items() if key in report["mine"]]  # fmt: skip
    ax = _prepare_axes(ax, (8, 0.9 + 0.32 * len(rows)))
    for place, (_, size, most) in enumerate(rows):
        ax.barh(place, size / 2**20, color=PALETTE[0], alpha=0.85)
        ax.plot([most / 2**20] * 2, [place - 0.4, place + 0.4], color=INK, lw=1.6)
    ax.set_yticks(range(len(rows)), [name for name, *_ in rows])
    ax.invert_yaxis()
    ax.set(xlabel="MiB")
    return ax


def save_memory(folder: str | Path) -> Path:
    """Save the memory of a step as ``memory.png`` in a run folder and return its path."""
    ax = memory(json.loads((Path(folder) / "memory.json").read_text(encoding="utf-8")))
    return _save_figure(ax, Path(folder) / "memory.png")


def document_lengths(lengths: Sequence[int] | np.ndarray, ax: Axes | None = None) -> Axes:
    """Draw a histogram of tokens per document on a logarithmic axis, with the median."""
    lengths = np.asarray(lengths)
    ax = _prepare_axes(ax, (7, 3.2))
    bins = np.geomspace(max(1, lengths.min()), lengths.max() + 1, 40)
    ax.hist(lengths, bins=bins, color=PALETTE[0], alpha=0.85)
    median = float(np.median(lengths))
    ax.axvline(median, color=PALETTE[1], lw=2)
    ax.annotate(f" median {median:.0f}", (median, ax.get_ylim()[1] * 0.92), color=INK)
    ax.set(xscale="log", xlabel="tokens per document", ylabel="documents")
    return ax


def text_on(color: str) -> str:
    """Return the color of legible text on an area of ``color``: white, or ink on light areas."""
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 100 else "white"


def rank_map(mesh: Mesh, ax: Axes | None = None) -> Axes:
    """Draw the shards of the model states by rank, with a row per replica.

    Cells of equal color hold equal values. Thick lines separate nodes.
    """
    from matplotlib.patches import Rectangle

    cells = mesh.grid.reshape(mesh.pipeline * mesh.replicate, -1)
    rows, columns = cells.shape
    ax = _prepare_axes(ax, (min(11, max(5, 1.4 + 0.8 * columns)), 1.1 + 0.75 * rows))
    for (row, column), rank in np.ndenumerate(cells):
        shard = mesh.state_rank(int(rank))
        color = PALETTE[shard % len(PALETTE)]
        ax.add_patch(Rectangle((column + 0.06, row + 0.1), 0.88, 0.8, color=color, alpha=0.85))
        if columns <= 32:
            ax.text(
                column + 0.5, row + 0.5, str(rank), color=text_on(color), ha="center", va="center"
            )
        starts_node = mesh.ranks_per_node and int(rank) % mesh.ranks_per_node == 0
        if starts_node and columns > 1 and 0 < column:
            ax.plot([column, column], [row, row + 1], color=INK, lw=2)
    ax.set(xlim=(0, columns), ylim=(rows, 0), xticks=np.arange(columns) + 0.5)
    shards = [mesh.state_rank(int(rank)) for rank in cells[0]]
    shown = [str(s) if columns <= 16 or i % 16 == 0 else "" for i, s in enumerate(shards)]
    ax.set_xticklabels(shown)
    ax.set_yticks(np.arange(rows) + 0.5, [f"replica {r % mesh.replicate}" for r in range(rows)])
    ax.set_xlabel("shard of the model states\n(numbers in the cells: ranks)")
    ax.tick_params(length=0)
    ax.grid(False)
    for side in ax.spines.values():
        side.set_visible(False)
    return ax


def slices(shape: Sequence[int], held: list[Any], title: str = "", ax: Axes | None = None) -> Axes:
    """Draw the blocks of a matrix, labeled with the ranks that hold them.

    Args:
        shape: Shape of the matrix.
        held: For every rank its blocks of the matrix, as returned by `nearlinear.local_shards`.
        title: Title of the figure.
        ax: Axes to draw on. Blocks with the same ranks have the same color.
    """
    from matplotlib.patches import Rectangle

    owners: dict[tuple, list[int]] = {}
    for rank, blocks in enumerate(held):
        for block in blocks:
            owners.setdefault((block.offset, block.shape), []).append(rank)
    rows, columns = shape
    ax = _prepare_axes(ax, (1.6 + 4 * columns / max(shape), 1.2 + 4 * rows / max(shape)))
    groups = sorted({tuple(ranks) for ranks in owners.values()})
    for ((row, column), (height, width)), ranks in owners.items():
        color = PALETTE[groups.index(tuple(ranks)) % len(PALETTE)]
        place = {"facecolor": color, "edgecolor": "white", "lw": 2, "alpha": 0.85}
        ax.add_patch(Rectangle((column, row), width, height, **place))
        middle, label = (column + width / 2, row + height / 2), ", ".join(map(str, ranks))
        ax.text(*middle, label, color=text_on(color), ha="center", va="center")
    ax.set(xlim=(0, columns), ylim=(rows, 0), ylabel="rows", title=title)
    ax.set_xlabel("columns (numbers in the blocks: ranks)")
    ax.tick_params(length=0)
    for side in ax.spines.values():
        side.set_visible(False)
    return ax


def step_streams(step: Any, ax: Axes | None = None) -> Axes:
    """Draw the timeline of one training step, with a row per stream.

    Args:
        step: A `nearlinear.planner.timeline.StepTime`. Long steps have only their first
            micro-batches in the timeline.
        ax: Axes to draw on.
    """
    tasks = [task for task in step.timeline.tasks if task.seconds]
    names = [_legend_name(task) for task in tasks]
    streams, kinds = list(dict.fromkeys(task.stream for task in tasks)), list(dict.fromkeys(names))
    ax = _prepare_axes(ax, (9, 1.4 + 0.42 * len(streams)))
    for number, kind in enumerate(kinds):
        color = PALETTE[number % len(PALETTE)]
        for row, stream in enumerate(streams):
            spans = [
                (task.start, task.seconds)
                for task, name in zip(tasks, names, strict=True)
                if name == kind and task.stream == stream
            ]
            ax.broken_barh(spans, (row - 0.38, 0.76), color=color, edgecolor="white", lw=0.1)
        ax.plot([], [], "s", color=color, label=kind)
    ax.set_yticks(range(len(streams)), streams)
    ax.invert_yaxis()
    left_out = step.simulated < step.work.micro_batches
    shown = f" ({step.simulated} of {step.work.micro_batches} micro-batches)" if left_out else ""
    ax.set(xlabel=f"seconds{shown}")
    ax.legend(frameon=False, fontsize=8, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
    return ax


def _legend_name(task: Any) -> str:
    words = task.label.split()
    return f"{task.kind}: {words[0]}" if task.kind == "compute" and words else task.kind


def save_step_streams(step: Any, path: str | Path) -> Path:
    """Save `step_streams` to ``path`` and return it."""
    return _save_figure(step_streams(step), Path(path))


def predicted_against_published(found: Any, ax: Axes | None = None) -> Axes:
    """Draw predicted over published step times, with bands of 10 % and 25 %.

    Args:
        found: Validation against published runs, see `nearlinear.planner.validate`.
        ax: Axes to draw on.
    """
    ax = _prepare_axes(ax, (6.4, 5.6))
    for number, (source, scored) in enumerate(found.sources.items()):
        style = {"color": PALETTE[number % len(PALETTE)], "ms": 4, "alpha": 0.75}
        style |= {"mec": INK, "mew": 0.3}
        mark = MARKERS[(number + number // len(PALETTE)) % len(MARKERS)]
        _draw_times(ax, scored, mark, label=source, **style)
    _draw_times(ax, found.held_out, "x", label="H100, held out", color=INK, ms=4)
    published = [each.run.value for each in (*found.scored, *found.held_out)]
    ends = [min(published) / 1.3, max(published) * 1.3]
    ax.plot(ends, ends, color=INK, lw=1)
    for share in (0.10, 0.25):
        low, high = ([end * (1 + sign * share) for end in ends] for sign in (-1, 1))
        ax.fill_between(ends, low, high, color=MUTED, alpha=0.12, lw=0)
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    ax.set(xlabel="published, seconds per step", ylabel="predicted, seconds per step")
    ax.legend(frameon=False, fontsize=8)
    return ax


def _draw_times(ax: Axes, scored: Sequence[Any], mark: str, **style: Any) -> None:
    times = [(each.run.value, each.predicted) for each in scored]
    ax.plot(*zip(*times, strict=True), mark, **style)


def save_predicted_against_published(found: Any, path: str | Path) -> Path:
    """Save `predicted_against_published` to ``path`` and return it."""
    return _save_figure(predicted_against_published(found), Path(path))


def _prepare_axes(ax: Axes | None, size: tuple[float, float]) -> Axes:
    if ax is None:
        import matplotlib.pyplot as plt

        ax = plt.subplots(figsize=size, layout="constrained")[1]
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    ax.grid(color=GRID, lw=0.8)
    ax.set_axisbelow(True)
    return ax


def _save_figure(ax: Axes, path: Path) -> Path:
    import matplotlib.pyplot as plt

    figure: Any = ax.figure
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)
    return path
