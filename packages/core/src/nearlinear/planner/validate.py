"""Error of the planner against published runs, by source; skipped rows are listed.

An error is predicted over published step time, minus one. The fit has seen these runs; the column
``median, left out``, from constants fitted without each source, estimates the error for new
sources. Peaks of memory are compared likewise, without any fit. All runs ran, and so should be
predicted to fit on their GPUs; runs that failed for want of memory are not published.
"""

import hashlib
import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import chain, combinations
from pathlib import Path
from typing import Any

from ..output import format_table
from .fitted_constants import FittedConstants, leave_one_out_constants, load_constants
from .published.memory import estimate_run, fits
from .published.runs import (
    PublishedRow,
    PublishedRun,
    SkippedRow,
    held_out_rows,
    held_out_runs,
    published_peaks,
    published_runs,
    read_table,
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
    """Seconds per step, or bytes of a peak of memory."""

    @property
    def error(self) -> float:
        return self.predicted / self.run.value - 1.0


@dataclass(frozen=True)
class ErrorSummary:
    """Errors of several runs, as fractions of the published numbers."""

    count: int
    median: float
    """Median of absolute errors."""
    ninetieth: float
    """90th percentile of absolute errors."""
    bias: float
    """Median of signed errors; above 0 means predictions are too high."""


@dataclass(frozen=True)
class Validation:
    """Predictions of all published runs."""

    scored: list[ScoredRun]
    skipped: list[SkippedRow]
    left_out: dict[str, list[ScoredRun]]
    """By source, predicted with constants fitted without the source."""
    ranked: tuple[int, int]
    """Pairs that differ only in layout and clearly in time: correctly ordered, and all."""
    held_out: list[ScoredRun] = field(default_factory=list)
    """Runs outside the fit."""
    peaks: list[ScoredRun] = field(default_factory=list)
    """Published peaks of memory."""
    too_large: list[PublishedRun] = field(default_factory=list)
    """Runs that are predicted not to fit on their GPUs."""

    @property
    def sources(self) -> dict[str, list[ScoredRun]]:
        return _grouped(self.scored, _source)

    @property
    def unseen(self) -> list[ScoredRun]:
        """All runs, predicted with constants fitted without their source."""
        return [*chain(*self.left_out.values()), *self.held_out]

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
            "sources": _summaries(self.sources),
            "left_out": _summaries(self.left_out),
            "held_out": _summaries(_grouped(self.held_out, _source)),
            "unseen": {
                "all": asdict(summarize_errors(self.unseen)),
                **_summaries(_grouped(self.unseen, _precision_and_gpu)),
                **_summaries(_grouped(self.unseen, _kind)),
            },
            "ranking": self.ranking,
            "peaks": _summaries(_grouped(self.peaks, _source)),
            "too_large": [asdict(run.row) for run in self.too_large],
            "runs": self._runs_as_dicts(),
            "not_modelled": [_skipped_as_dict(each) for each in self.skipped],
        }

    def _runs_as_dicts(self) -> list[dict[str, Any]]:
        left_out = {_place(each.run): each.predicted for each in self.unseen}
        return [
            _run_as_dict(each) | {"predicted_without_source_seconds": left_out[_place(each.run)]}
            for each in (*self.scored, *self.held_out)
        ]

    def __str__(self) -> str:
        return _format(self)


@dataclass(frozen=True)
class BlindScore:
    """Predictions of a table that the project does not contain."""

    digest: str
    """SHA-256 of the predictions. It depends on all columns but ``value``."""
    scored: list[ScoredRun]
    """Runs with a value."""
    skipped: list[SkippedRow]
    without_value: int = 0
    """Number of predicted runs without a value."""

    def as_dict(self) -> dict[str, Any]:
        """Return all numbers by name, every run and every skipped row."""
        return {
            "predictions_sha256": self.digest,
            "all": asdict(summarize_errors(self.scored)) if self.scored else None,
            "sources": _summaries(_grouped(self.scored, _source)),
            "precision_and_gpu": _summaries(_grouped(self.scored, _precision_and_gpu)),
            "runs": [_run_as_dict(each) for each in self.scored],
            "not_modelled": [_skipped_as_dict(each) for each in self.skipped],
        }

    def __str__(self) -> str:
        lines = [
            f"predictions: {len(self.scored) + self.without_value} runs, SHA-256 {self.digest}"
        ]
        if self.without_value:
            lines.append(f"{self.without_value} runs have no value to compare with")
        if self.scored:
            lines += _format_groups("error", {"all": self.scored})
            lines += _format_groups("source", _grouped(self.scored, _source))
            lines += _format_groups("precision and GPU", _grouped(self.scored, _precision_and_gpu))
        return "\n".join([*lines, *_format_skipped(self.skipped)])


def score_blind(path: Path) -> BlindScore:
    """Predict the runs of a table in the documented format (``planner/data/README.md``).

    Raises ConfigError if the file cannot be read or lacks columns.
    """
    rows = read_table(path)
    scored = score((row for row in rows if isinstance(row, PublishedRun)), load_constants())
    predictions = [[each.run.row.line, f"{each.predicted:.6g}"] for each in scored]
    known = [each for each in scored if not math.isnan(each.run.value)]
    return BlindScore(
        hashlib.sha256(json.dumps(predictions).encode()).hexdigest(),
        known,
        [row for row in rows if isinstance(row, SkippedRow)],
        len(scored) - len(known),
    )


def validate() -> Validation:
    """Predict every published run."""
    scored = score(published_runs(), load_constants())
    held_out, peaks = score_held_out(), score_peaks()
    rows = [*skipped_rows(), *(row for row in held_out_rows() if isinstance(row, SkippedRow))]
    predicted = [peak.run.row for peak in peaks]
    skipped = [each for each in rows if each.row not in predicted]
    too_large = [each.run for each in (*scored, *held_out) if not fits(each.run)]
    return Validation(
        scored, skipped, score_left_out(), rank_pairs(scored), held_out, peaks, too_large
    )


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


def score_peaks() -> list[ScoredRun]:
    """Predict the published peaks of memory."""
    return [ScoredRun(run, estimate_run(run).reserved) for run in published_peaks()]


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
            slower, faster = sorted((first, second), key=lambda each: -each.run.value)
            if slower.run.value / faster.run.value - 1.0 > CLEAR:
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
        out = f"{summarize_errors(left).median:.1%}" if left else "-"
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
    lines += _format_groups("outside the fit", _grouped(validation.held_out, _source))
    unseen = validation.unseen
    groups = {**_grouped(unseen, _precision_and_gpu), **_grouped(unseen, _kind), "all": unseen}
    lines += _format_groups("each run predicted without its source", groups)
    lines += _format_memory(validation)
    return "\n".join([*lines, *_format_skipped(validation.skipped)])


def _format_memory(validation: Validation) -> list[str]:
    peaks = {**_grouped(validation.peaks, _source), "all": validation.peaks}
    count = len(validation.scored) + len(validation.held_out)
    right = count - len(validation.too_large)
    wrong = [run.row for run in validation.too_large]
    others = f"; not {_places(wrong)}" if wrong else ""
    return [
        *_format_groups("peak of reserved memory", peaks),
        f"memory: {right} of {count} runs are predicted to fit ({right / count:.0%}){others}",
    ]


def _grouped(
    scored: Iterable[ScoredRun], key: Callable[[ScoredRun], str]
) -> dict[str, list[ScoredRun]]:
    groups: dict[str, list[ScoredRun]] = {}
    for each in scored:
        groups.setdefault(key(each), []).append(each)
    return groups


def _source(each: ScoredRun) -> str:
    return each.run.source


def _precision_and_gpu(each: ScoredRun) -> str:
    work = each.run.work
    return f"{'fp8' if work.fp8 else work.precision} on {each.run.cluster.gpu.model}"


def _kind(each: ScoredRun) -> str:
    return each.run.work.kind


def _format_groups(title: str, groups: dict[str, list[ScoredRun]]) -> list[str]:
    head = (title, "runs", "median", "90th", "bias")
    rows = [(name, *_cells(summarize_errors(runs))) for name, runs in groups.items()]
    return format_table([head, *rows])


def _format_skipped(skipped: list[SkippedRow]) -> list[str]:
    reasons = [f"  {reason}: {where}" for reason, where in _reasons(skipped).items()]
    return [f"not modelled: {len(skipped)} rows", *reasons]


def _summaries(groups: dict[str, list[ScoredRun]]) -> dict[str, Any]:
    return {name: asdict(summarize_errors(runs)) for name, runs in groups.items()}


def _skipped_as_dict(each: SkippedRow) -> dict[str, Any]:
    return {"file": each.row.file, "line": each.row.line, "reason": each.reason}


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


def _place(run: PublishedRun) -> tuple[str, int]:
    return run.row.file, run.row.line


def _run_as_dict(each: ScoredRun) -> dict[str, Any]:
    run = each.run
    return {
        "file": run.row.file,
        "line": run.row.line,
        "source": run.source,
        "model": run.title,
        "published_seconds": run.value,
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
    """Group skipped rows by reason: ``framework_posts.csv 6, 8-10; later_posts.csv 3``."""
    rows: dict[str, list[PublishedRow]] = {}
    for each in skipped:
        rows.setdefault(each.reason, []).append(each.row)
    return {reason: _places(found) for reason, found in rows.items()}


def _places(rows: list[PublishedRow]) -> str:
    lines: dict[str, list[int]] = {}
    for row in rows:
        lines.setdefault(row.file, []).append(row.line)
    return "; ".join(f"{file} {_line_ranges(found)}" for file, found in lines.items())


def _line_ranges(lines: list[int]) -> str:
    ranges: list[list[int]] = []
    for line in lines:
        if ranges and line == ranges[-1][1] + 1:
            ranges[-1][1] = line
        else:
            ranges.append([line, line])
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in ranges)
