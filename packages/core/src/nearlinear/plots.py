"""Figures for notebooks and runs: loss curves, memory, documents, who holds what, planned steps.

Every function draws on the given matplotlib axes, or on new ones, and returns them. matplotlib is
imported here only, on first use.
"""

import json
from pathlib import Path

import numpy as np

from .mesh import Mesh

INK, MUTED, GRID = "#1f2a37", "#6b7280", "#e5e7eb"
PALETTE = ("#2563eb", "#f59e0b", "#059669", "#db2777", "#7c3aed", "#0891b2", "#dc2626", "#65a30d")


def read_metrics(folder) -> list[dict]:
    """The steps of a run folder's ``metrics.jsonl``, in order."""
    text = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def loss_curve(metrics: list[dict], vocabulary: int | None = None, ax=None):
    """Training and held-out loss (nats) over steps; ``vocabulary`` adds the level of guessing."""
    ax = _axes(ax, (7, 3.6))
    steps = [m["step"] for m in metrics]
    ax.plot(steps, [m["loss"] for m in metrics], color=PALETTE[0], lw=1.6, label="training")
    held_out = [(m["step"], m["eval_loss"]) for m in metrics if "eval_loss" in m]
    if held_out:
        ax.plot(*zip(*held_out, strict=True), "o-", color=PALETTE[1], ms=5, label="held out")
    if vocabulary:
        level = float(np.log(vocabulary))
        ax.axhline(level, color=MUTED, lw=1, ls="--")
        ax.annotate(f"guessing: ln({vocabulary})", (steps[-1], level), ha="right", va="bottom",
                    color=MUTED, fontsize=9)  # fmt: skip
    ax.set(xlabel="optimizer step", ylabel="cross-entropy, nats")
    ax.legend(frameon=False)
    return ax


def save_loss_curve(folder) -> Path:
    """Draw ``loss.png`` beside ``metrics.jsonl`` in a run folder; its path."""
    return _saved(loss_curve(read_metrics(folder)), Path(folder) / "loss.png")


def memory(report: dict, ax=None):
    """Where the memory of a step went, a bar per part, and below what each knob would save of it.

    ``report``: as in ``memory.json``, or ``nl.memory_report``'s ``report.as_dict()``. A line at a
    bar is the most of any rank.
    """
    from .memory.report import NAMES

    parts = [(name, report["mine"][key], report["most"][key], PALETTE[0])
             for key, name in NAMES.items() if key in report["mine"]]  # fmt: skip
    saved = [(f"saved by: {each['knob']}", each["bytes"], None, PALETTE[2])
             for each in report["savings"]]  # fmt: skip
    rows = [*parts, *saved]
    ax = _axes(ax, (8, 0.9 + 0.32 * len(rows)))
    for place, (_, size, most, colour) in enumerate(rows):
        ax.barh(place, size / 2**20, color=colour, alpha=0.85)
        if most is not None:
            ax.plot([most / 2**20] * 2, [place - 0.4, place + 0.4], color=INK, lw=1.6)
    ax.set_yticks(range(len(rows)), [name for name, *_ in rows])
    ax.invert_yaxis()
    ax.set(xlabel="MiB")
    return ax


def save_memory(folder) -> Path:
    """Draw ``memory.png`` beside ``memory.json`` in a run folder; its path."""
    ax = memory(json.loads((Path(folder) / "memory.json").read_text(encoding="utf-8")))
    return _saved(ax, Path(folder) / "memory.png")


def document_lengths(lengths, ax=None):
    """A histogram of tokens per document on a logarithmic axis, with the median marked."""
    lengths = np.asarray(lengths)
    ax = _axes(ax, (7, 3.2))
    bins = np.geomspace(max(1, lengths.min()), lengths.max() + 1, 40)
    ax.hist(lengths, bins=bins, color=PALETTE[0], alpha=0.85)
    median = float(np.median(lengths))
    ax.axvline(median, color=PALETTE[1], lw=2)
    ax.annotate(f" median {median:.0f}", (median, ax.get_ylim()[1] * 0.92), color=INK)
    ax.set(xscale="log", xlabel="tokens per document", ylabel="documents")
    return ax


def rank_map(mesh: Mesh, ax=None):
    """Which rank holds which part of the model: a row per replica, a cell per rank.

    A colour is a shard of the model states; equal colours hold equal values. Thin frames are nodes.
    """
    from matplotlib.patches import Rectangle

    cells = mesh.grid.reshape(mesh.pipeline * mesh.replicate, -1)
    rows, columns = cells.shape
    ax = _axes(ax, (min(11, 1.4 + 0.8 * columns), 0.9 + 0.75 * rows))
    for (row, column), rank in np.ndenumerate(cells):
        shard = mesh.state_rank(int(rank))
        colour = PALETTE[shard % len(PALETTE)]
        ax.add_patch(Rectangle((column + 0.06, row + 0.1), 0.88, 0.8, color=colour, alpha=0.85))
        if columns <= 32:
            ax.text(column + 0.5, row + 0.5, str(rank), color="white", ha="center", va="center")
        starts_node = mesh.ranks_per_node and int(rank) % mesh.ranks_per_node == 0
        if starts_node and columns > 1 and 0 < column:
            ax.plot([column, column], [row, row + 1], color=INK, lw=2)
    ax.set(xlim=(0, columns), ylim=(rows, 0), xticks=np.arange(columns) + 0.5)
    shards = [mesh.state_rank(int(rank)) for rank in cells[0]]
    shown = shards if columns <= 16 else [s if i % 16 == 0 else "" for i, s in enumerate(shards)]
    ax.set_xticklabels(shown)
    ax.set_yticks(np.arange(rows) + 0.5, [f"replica {r % mesh.replicate}" for r in range(rows)])
    ax.set_xlabel("shard of the model states (numbers in the cells: ranks)")
    ax.tick_params(length=0)
    ax.grid(False)
    for side in ax.spines.values():
        side.set_visible(False)
    return ax


def slices(shape, held: list[dict], title: str = "", ax=None):
    """Which rank holds which part of a matrix of ``shape``: a rectangle per part, with its ranks.

    ``held``: for every rank the blocks it has of this matrix, as `nearlinear.held` gives them.
    Parts with the same ranks have the same colour.
    """
    from matplotlib.patches import Rectangle

    owners: dict[tuple, list[int]] = {}
    for rank, blocks in enumerate(held):
        for block in blocks:
            owners.setdefault((block.offset, block.shape), []).append(rank)
    rows, columns = shape
    ax = _axes(ax, (1.6 + 4 * columns / max(shape), 1.2 + 4 * rows / max(shape)))
    groups = sorted({tuple(ranks) for ranks in owners.values()})
    for ((row, column), (height, width)), ranks in owners.items():
        colour = PALETTE[groups.index(tuple(ranks)) % len(PALETTE)]
        place = {"facecolor": colour, "edgecolor": "white", "lw": 2, "alpha": 0.85}
        ax.add_patch(Rectangle((column, row), width, height, **place))
        middle, label = (column + width / 2, row + height / 2), ", ".join(map(str, ranks))
        ax.text(*middle, label, color="white", ha="center", va="center")
    ax.set(xlim=(0, columns), ylim=(rows, 0), xlabel="columns", ylabel="rows", title=title)
    ax.tick_params(length=0)
    for side in ax.spines.values():
        side.set_visible(False)
    return ax


def step_streams(step, ax=None):
    """What runs when in one training step, a row per stream: a `nearlinear.plan.step.Step`.

    Of the first passes, where a step has more than were laid out; computation by what it is for.
    """
    tasks = [task for task in step.timeline.tasks if task.seconds]
    names = [_name(task) for task in tasks]
    lanes, kinds = list(dict.fromkeys(task.lane for task in tasks)), list(dict.fromkeys(names))
    ax = _axes(ax, (9, 1.4 + 0.42 * len(lanes)))
    for number, kind in enumerate(kinds):
        colour = PALETTE[number % len(PALETTE)]
        for row, lane in enumerate(lanes):
            spans = [
                (task.start, task.seconds)
                for task, name in zip(tasks, names, strict=True)
                if name == kind and task.lane == lane
            ]
            ax.broken_barh(spans, (row - 0.38, 0.76), color=colour, edgecolor="white", lw=0.1)
        ax.plot([], [], "s", color=colour, label=kind)
    ax.set_yticks(range(len(lanes)), lanes)
    ax.invert_yaxis()
    left_out = step.laid_out < step.work.passes
    shown = f" ({step.laid_out} of {step.work.passes} passes)" if left_out else ""
    ax.set(xlabel=f"seconds{shown}")
    ax.legend(frameon=False, fontsize=8, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
    return ax


def _name(task) -> str:
    """Of a task, for a legend."""
    words = task.label.split()
    return f"{task.kind}: {words[0]}" if task.kind == "compute" and words else task.kind


def save_step_streams(step, path) -> Path:
    """Draw `step_streams` to ``path``."""
    return _saved(step_streams(step), Path(path))


def predicted_against_published(found, ax=None):
    """Step times of published runs, on logarithmic axes with bands of 10 and 25 %.

    ``found``: a `nearlinear.plan.validate.Validation`.
    """
    ax = _axes(ax, (6.4, 5.6))
    for number, (source, scored) in enumerate(found.sources.items()):
        style = {"color": PALETTE[number % len(PALETTE)], "ms": 4, "alpha": 0.75}
        _times(ax, scored, "o" if number < len(PALETTE) else "^", label=source, **style)
    _times(ax, found.held_out, "x", label="H100, never fitted", color=INK, ms=4)
    published = [each.run.seconds for each in (*found.scored, *found.held_out)]
    ends = [min(published) / 1.3, max(published) * 1.3]
    ax.plot(ends, ends, color=INK, lw=1)
    for share in (0.10, 0.25):
        low, high = ([end * (1 + sign * share) for end in ends] for sign in (-1, 1))
        ax.fill_between(ends, low, high, color=MUTED, alpha=0.12, lw=0)
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    ax.set(xlabel="published, seconds per step", ylabel="predicted, seconds per step")
    ax.legend(frameon=False, fontsize=8)
    return ax


def _times(ax, scored, mark: str, **style) -> None:
    times = [(each.run.seconds, each.predicted) for each in scored]
    ax.plot(*zip(*times, strict=True), mark, **style)


def save_predicted_against_published(found, path) -> Path:
    """Draw `predicted_against_published` to ``path``."""
    return _saved(predicted_against_published(found), Path(path))


def _axes(ax, size):
    if ax is None:
        import matplotlib.pyplot as plt

        ax = plt.subplots(figsize=size, layout="constrained")[1]
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    ax.grid(color=GRID, lw=0.8)
    ax.set_axisbelow(True)
    return ax


def _saved(ax, path: Path) -> Path:
    import matplotlib.pyplot as plt

    ax.figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(ax.figure)
    return path
