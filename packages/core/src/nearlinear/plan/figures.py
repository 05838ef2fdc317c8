"""Figures of the planner: predicted against published step times, and the streams of one step.

matplotlib is imported on first use only, by `plots`.
"""

from pathlib import Path

from .. import plots
from .step import Step
from .validate import Validation


def predicted_against_published(found: Validation, ax=None):
    """Step times of every run, in seconds, on logarithmic axes; bands of 10 and 25 %."""
    ax = plots._axes(ax, (6.4, 5.6))
    for index, (source, scored) in enumerate(found.sources.items()):
        colour = plots.PALETTE[index % len(plots.PALETTE)]
        mark = "o" if index < len(plots.PALETTE) else "^"
        times = [(each.run.seconds, each.predicted) for each in scored]
        ax.plot(*zip(*times, strict=True), mark, color=colour, ms=4, alpha=0.75, label=source)
    if found.held_out:
        times = [(each.run.seconds, each.predicted) for each in found.held_out]
        ax.plot(*zip(*times, strict=True), "x", color=plots.INK, ms=4, label="H100, never fitted")
    published = [each.run.seconds for each in (*found.scored, *found.held_out)]
    ends = [min(published) / 1.3, max(published) * 1.3]
    ax.plot(ends, ends, color=plots.INK, lw=1)
    for share in (0.10, 0.25):
        low, high = ([end * (1 + sign * share) for end in ends] for sign in (-1, 1))
        ax.fill_between(ends, low, high, color=plots.MUTED, alpha=0.12, lw=0)
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    ax.set(xlabel="published, seconds per step", ylabel="predicted, seconds per step")
    ax.legend(frameon=False, fontsize=8)
    return ax


def timeline(step: Step, ax=None):
    """What runs when in one step, a row per stream; of the first pass where there are several."""
    lanes = list(dict.fromkeys(task.lane for task in step.timeline.tasks if task.seconds))
    kinds = list(dict.fromkeys(task.kind for task in step.timeline.tasks if task.seconds))
    ax = plots._axes(ax, (9, 1.2 + 0.42 * len(lanes)))
    for kind in kinds:
        colour = plots.PALETTE[kinds.index(kind) % len(plots.PALETTE)]
        for lane in lanes:
            spans = [
                (task.start, task.seconds)
                for task in step.timeline.tasks
                if task.kind == kind and task.lane == lane and task.seconds
            ]
            if spans:
                place = (lanes.index(lane) - 0.38, 0.76)
                ax.broken_barh(spans, place, color=colour, edgecolor="white", lw=0.2)
        ax.plot([], [], "s", color=colour, label=kind)
    ax.set_yticks(range(len(lanes)), lanes)
    ax.invert_yaxis()
    passes = f"{step.laid_out} of {step.work.passes} passes"
    ax.set(xlabel=f"seconds ({passes} shown)" if step.laid_out < step.work.passes else "seconds")
    ax.legend(frameon=False, fontsize=8, ncols=len(kinds), loc="lower left", bbox_to_anchor=(0, 1))
    return ax


def save(ax, path) -> Path:
    """Write the figure of ``ax`` to ``path``."""
    return plots._saved(ax, Path(path))
