"""Error of the time model against published runs, by source; skipped rows are listed.

An error is predicted over published step time, minus one. The fit has seen these runs; the column
``median, left out``, from constants fitted without each source, estimates the error for new
sources.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import Any

from ..output import format_table
from .fitted_constants import FittedConstants, leave_one_out_constants, load_constants
from .published.runs import (
    PublishedRun,
    SkippedRow,
    held_out_runs,
    published_runs,
    skipped_rows,
)
from .step_time import step_time

SOFTWARE = ("direct_all_gather", "max_message", "prefetch", "async_tensor_parallel")
"""Workload fields that differ between libraries, not between layouts."""
CLEAR = 0.05  # relative difference of published times from which a pair is ranked
MOST_WRONG = 0.9  # share of the misordered pairs that `outliers` explains


@dataclass(frozen=True)
class ScoredRun:
    """A published run and its prediction."""

    run: PublishedRun
    predicted: float
    """Seconds per step."""

    @property
    def error(self) -> float:
        return self.predicted / self.run.seconds - 1.0


@dataclass(frozen=True)
class ErrorSummary:
    """Errors of several runs, as fractions of the published time."""

    count: int
    median: float
    """Median of absolute errors."""
    ninetieth: float
    """90th percentile of absolute errors."""
    bias: float
    """Median of signed errors; above 0 means predictions are too slow."""


@dataclass(frozen=True)
class Validation:
    """Predictions of all published runs."""

    scored: list[ScoredRun]
    skipped: list[SkippedRow]
    left_out: dict[str, ErrorSummary]
    """By source, with constants fitted without the source."""
    ranked: tuple[int, int]
    """Pairs that differ only in layout and clearly in time: correctly ordered, and all."""
    held_out: list[ScoredRun] = field(default_factory=list)
    """Runs outside the fit."""

    @property
    def sources(self) -> dict[str, list[ScoredRun]]:
        by_source: dict[str, list[ScoredRun]] = {}
        for each in self.scored:
            by_source.setdefault(each.run.source, []).append(each)
        return by_source

    @property
    def all(self) -> ErrorSummary:
        return summarize_errors(self.scored)

    @property
    def ranking(self) -> float:
        """Share of correctly ordered pairs."""
        right, total = self.ranked
        return right / total

    def as_dict(self) -> dict[str, Any]:
        """Return all numbers by name, every run and every skipped row."""
        return {
            "all": asdict(self.all),
            "sources": {
                name: asdict(summarize_errors(each)) for name, each in self.sources.items()
            },
            "left_out": {name: asdict(each) for name, each in self.left_out.items()},
            "held_out": asdict(summarize_errors(self.held_out)),
            "ranking": self.ranking,
            "runs": [_run_as_dict(each) for each in (*self.scored, *self.held_out)],
            "not_modelled": [
                {"file": each.row.file, "line": each.row.line, "reason": each.reason}
                for each in self.skipped
            ],
        }

    def __str__(self) -> str:
        return _format(self)


def validate() -> Validation:
    """Predict every published run."""
    scored = score(published_runs(), load_constants())
    without = {source: summarize_errors(runs) for source, runs in score_left_out().items()}
    return Validation(scored, skipped_rows(), without, rank_pairs(scored), score_held_out())


def score_left_out() -> dict[str, list[ScoredRun]]:
    """Predict the runs of each source with constants fitted without the source."""
    published = published_runs()
    by_source = {
        source: score((run for run in published if run.source == source), constants)
        for source, constants in leave_one_out_constants().items()
    }
    return {source: runs for source, runs in by_source.items() if runs}


def score_held_out() -> list[ScoredRun]:
    """Predict the runs outside the fit."""
    return score(held_out_runs(), load_constants())


def score(runs: Iterable[PublishedRun], constants: FittedConstants) -> list[ScoredRun]:
    """Predict ``runs`` with ``constants``."""
    return [ScoredRun(run, step_time(run.work, run.cluster, constants).seconds) for run in runs]


def summarize_errors(scored: list[ScoredRun]) -> ErrorSummary:
    """Return count, median, 90th percentile and bias of the errors."""
    sizes = sorted(abs(each.error) for each in scored)
    at = math.ceil(0.9 * len(sizes)) - 1
    bias = statistics.median(each.error for each in scored)
    return ErrorSummary(len(sizes), statistics.median(sizes), sizes[at], bias)


def rank_pairs(scored: list[ScoredRun]) -> tuple[int, int]:
    """Return correctly ordered pairs and all pairs whose published times differ by `CLEAR`."""
    pairs = list(_pairs(scored))
    return len(pairs) - len(_misordered(pairs)), len(pairs)


def outliers(scored: list[ScoredRun]) -> list[ScoredRun]:
    """Return the few runs that take part in `MOST_WRONG` of the misordered pairs, worst first."""
    left, found = _misordered(_pairs(scored)), []
    most = (1 - MOST_WRONG) * len(left)
    while len(left) > most:
        [(worst, _)] = Counter(id(each) for pair in left for each in pair).most_common(1)
        found += [each for each in scored if id(each) == worst]
        left = [pair for pair in left if worst not in map(id, pair)]
    return found


def _pairs(scored: list[ScoredRun]) -> Iterator[tuple[ScoredRun, ScoredRun]]:
    """Yield comparable runs of clearly different times, the slower one first."""
    for first, second in combinations(scored, 2):
        if comparable(first.run, second.run):
            slower, faster = sorted((first, second), key=lambda each: -each.run.seconds)
            if slower.run.seconds / faster.run.seconds - 1.0 > CLEAR:
                yield slower, faster


def _misordered(
    pairs: Iterable[tuple[ScoredRun, ScoredRun]],
) -> list[tuple[ScoredRun, ScoredRun]]:
    return [pair for pair in pairs if pair[0].predicted <= pair[1].predicted]


def comparable(first: PublishedRun, second: PublishedRun) -> bool:
    """True if two runs differ only in the layout of the same step on the same machines."""
    one, other = first.work, second.work
    same = ("shape", "sequence", "step_tokens", "precision", "fp8", "compiled", *SOFTWARE)
    return (
        first.source == second.source
        and first.cluster == second.cluster
        and all(getattr(one, name) == getattr(other, name) for name in same)
    )


def _format(validation: Validation) -> str:
    head = ("source", "runs", "median", "90th", "bias", "median, left out", "pairs in order")
    rows: list[tuple[str, ...]] = [head]
    for source, scored in validation.sources.items():
        left = validation.left_out.get(source)
        out = f"{left.median:.1%}" if left else "-"
        cells = _cells(summarize_errors(scored))
        rows.append((source, *cells, out, _format_pairs(*rank_pairs(scored))))
    rows.append(("all", *_cells(validation.all), "", _format_pairs(*validation.ranked)))
    lines = ["error of predicted step times against published ones", *format_table(rows)]
    right, total = validation.ranked
    lines.append(
        f"ranking: {right} of {total} pairs of runs that differ only in layout, and by more than "
        f"{CLEAR:.0%}, are in the correct order ({validation.ranking:.0%})"
    )
    lines += _format_outliers(validation.scored)
    if validation.held_out:
        held = summarize_errors(validation.held_out)
        lines.append(
            f"outside the fit: {held.count} runs of llm-foundry on H100, median {held.median:.1%}, "
            f"90th percentile {held.ninetieth:.1%}, bias {held.bias:+.1%}"
        )
    lines.append(f"not modelled: {len(validation.skipped)} rows")
    lines += [f"  {reason}: {where}" for reason, where in _reasons(validation.skipped).items()]
    return "\n".join(lines)


def _format_outliers(scored: list[ScoredRun]) -> list[str]:
    """Name the runs behind most misordered pairs, their errors, and the ranking without them."""
    few = outliers(scored)
    if not few:
        return []
    names: dict[str, list[str]] = {}
    for each in few:
        names.setdefault(each.run.row.file, []).append(f"{each.run.row.line} ({each.error:+.0%})")
    where = "; ".join(f"{file} {', '.join(lines)}" for file, lines in names.items())
    ids = set(map(id, few))
    right, total = rank_pairs([each for each in scored if id(each) not in ids])
    return [
        f"  most misordered pairs contain one of {len(few)} runs: {where}",
        f"  without these runs, {right} of {total} pairs are in the correct order "
        f"({right / total:.0%})",
    ]


def _run_as_dict(each: ScoredRun) -> dict[str, Any]:
    run = each.run
    return {
        "file": run.row.file,
        "line": run.row.line,
        "source": run.source,
        "model": run.title,
        "published_seconds": run.seconds,
        "predicted_seconds": each.predicted,
    }


def _format_pairs(right: int, total: int) -> str:
    return f"{right} of {total}" if total else "-"


def _cells(summary: ErrorSummary) -> tuple[str, ...]:
    return (
        str(summary.count),
        f"{summary.median:.1%}",
        f"{summary.ninetieth:.1%}",
        f"{summary.bias:+.1%}",
    )


def _reasons(skipped: list[SkippedRow]) -> dict[str, str]:
    """Group skipped rows by reason: ``framework_posts.csv 6, 8-10``."""
    lines: dict[tuple[str, str], list[int]] = {}
    for each in skipped:
        lines.setdefault((each.reason, each.row.file), []).append(each.row.line)
    return {reason: f"{file} {_line_ranges(found)}" for (reason, file), found in lines.items()}


def _line_ranges(lines: list[int]) -> str:
    ranges: list[list[int]] = []
    for line in lines:
        if ranges and line == ranges[-1][1] + 1:
            ranges[-1][1] = line
        else:
            ranges.append([line, line])
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in ranges)
