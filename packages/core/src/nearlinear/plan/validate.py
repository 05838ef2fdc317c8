"""How far the time model is from published runs, source by source: nothing is left out silently.

An error is the predicted step time over the published one, less one. The fit has seen these runs;
the column of what each source gets from parameters fitted without it says what to expect of others.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import combinations

from ..columns import table
from . import parameters, published
from .parameters import Parameters
from .published import Listed, Run
from .step import step

SOFTWARE = ("direct", "message", "prefetch", "overlapped_tensor")
"""What differs between libraries, and is no layout."""
CLEAR = 0.05  # a published difference that is worth ranking by
NEARLY = 0.9  # of the pairs that are in the wrong order


@dataclass(frozen=True)
class Scored:
    """A run, and what the model says of it."""

    run: Run
    predicted: float
    """seconds of a step"""

    @property
    def error(self) -> float:
        return self.predicted / self.run.seconds - 1.0


@dataclass(frozen=True)
class Errors:
    """Of several runs: shares of the published time."""

    count: int
    median: float
    """of their sizes"""
    ninetieth: float
    """percentile of their sizes"""
    bias: float
    """median with its sign: above 0 is too slow"""


@dataclass(frozen=True)
class Validation:
    """All there is to say."""

    scored: list[Scored]
    listed: list[Listed]
    left_out: dict[str, Errors]
    """by source, with parameters fitted without it"""
    ranked: tuple[int, int]
    """pairs that differ only in layout and clearly in time: in the right order, and in all"""
    held_out: list[Scored] = field(default_factory=list)
    """runs that were never fitted"""

    @property
    def sources(self) -> dict[str, list[Scored]]:
        found: dict[str, list[Scored]] = {}
        for each in self.scored:
            found.setdefault(each.run.source, []).append(each)
        return found

    @property
    def all(self) -> Errors:
        return errors(self.scored)

    @property
    def ranking(self) -> float:
        right, total = self.ranked
        return right / total

    def as_dict(self) -> dict:
        """Numbers by name; every run and every row that is not modelled."""
        return {
            "all": asdict(self.all),
            "sources": {name: asdict(errors(each)) for name, each in self.sources.items()},
            "left_out": {name: asdict(each) for name, each in self.left_out.items()},
            "held_out": asdict(errors(self.held_out)),
            "ranking": self.ranking,
            "runs": [_as_dict(each) for each in (*self.scored, *self.held_out)],
            "not_modelled": [
                {"file": each.row.file, "line": each.row.line, "reason": each.reason}
                for each in self.listed
            ],
        }

    def __str__(self) -> str:
        return _text(self)


def validate() -> Validation:
    """Predict every published run."""
    scored = score(published.runs(), parameters.load())
    without = {}
    for source, fitted in parameters.left_out().items():
        runs = [each.run for each in scored if each.run.source == source]
        if runs:
            without[source] = errors(score(runs, fitted))
    held_out = score(published.held_out(), parameters.load())
    return Validation(scored, published.listed(), without, rank(scored), held_out)


def score(runs: Iterable[Run], fitted: Parameters) -> list[Scored]:
    return [Scored(run, step(run.work, run.cluster, fitted).seconds) for run in runs]


def errors(scored: list[Scored]) -> Errors:
    sizes = sorted(abs(each.error) for each in scored)
    at = math.ceil(0.9 * len(sizes)) - 1
    bias = statistics.median(each.error for each in scored)
    return Errors(len(sizes), statistics.median(sizes), sizes[at], bias)


def rank(scored: list[Scored]) -> tuple[int, int]:
    """Of pairs whose published times differ by more than `CLEAR`: right ones, all."""
    pairs = list(_pairs_of(scored))
    return len(pairs) - len(_wrong(pairs)), len(pairs)


def misplaced(scored: list[Scored]) -> list[Scored]:
    """The few runs that `NEARLY` all wrong pairs have one of in them, the most frequent first."""
    left, found = _wrong(_pairs_of(scored)), []
    most = (1 - NEARLY) * len(left)
    while len(left) > most:
        [(worst, _)] = Counter(id(each) for pair in left for each in pair).most_common(1)
        found += [each for each in scored if id(each) == worst]
        left = [pair for pair in left if worst not in map(id, pair)]
    return found


def _pairs_of(scored: list[Scored]) -> Iterator[tuple[Scored, Scored]]:
    """Alike runs of clearly different times, the slower one first."""
    for first, second in combinations(scored, 2):
        if alike(first.run, second.run):
            slower, faster = sorted((first, second), key=lambda each: -each.run.seconds)
            if slower.run.seconds / faster.run.seconds - 1.0 > CLEAR:
                yield slower, faster


def _wrong(pairs: Iterable[tuple[Scored, Scored]]) -> list[tuple[Scored, Scored]]:
    return [pair for pair in pairs if pair[0].predicted <= pair[1].predicted]


def alike(first: Run, second: Run) -> bool:
    """Whether they differ in nothing but how the same step is laid out over the same machines."""
    one, other = first.work, second.work
    same = ("shape", "sequence", "step_tokens", "precision", "fp8", "compiled", *SOFTWARE)
    return (
        first.source == second.source
        and first.cluster == second.cluster
        and all(getattr(one, name) == getattr(other, name) for name in same)
    )


def _text(found: Validation) -> str:
    head = ("source", "runs", "median", "90th", "bias", "median, left out", "pairs in order")
    rows = [head]
    for source, scored in found.sources.items():
        left = found.left_out.get(source)
        out = f"{left.median:.1%}" if left else "-"
        rows.append((source, *_cells(errors(scored)), out, _pairs(*rank(scored))))
    rows.append(("all", *_cells(found.all), "", _pairs(*found.ranked)))
    lines = ["error of predicted step times, against published ones", *table(rows)]
    right, total = found.ranked
    lines.append(
        f"ranking: of {total} pairs of runs that differ only in layout, and by more than "
        f"{CLEAR:.0%}, {right} in the right order ({found.ranking:.0%})"
    )
    lines += _why_wrong(found.scored)
    if found.held_out:
        held = errors(found.held_out)
        lines.append(
            f"never fitted: {held.count} runs of llm-foundry on H100, median {held.median:.1%}, "
            f"90th percentile {held.ninetieth:.1%}, bias {held.bias:+.1%}"
        )
    lines.append(f"not modelled: {len(found.listed)} rows")
    lines += [f"  {reason}: {where}" for reason, where in _reasons(found.listed).items()]
    return "\n".join(lines)


def _why_wrong(scored: list[Scored]) -> list[str]:
    """The runs that most wrong pairs come from, how far each is off, and what is without them."""
    few = misplaced(scored)
    if not few:
        return []
    names: dict[str, list[str]] = {}
    for each in few:
        names.setdefault(each.run.row.file, []).append(f"{each.run.row.line} ({each.error:+.0%})")
    where = "; ".join(f"{file} {', '.join(lines)}" for file, lines in names.items())
    ids = set(map(id, few))
    right, total = rank([each for each in scored if id(each) not in ids])
    return [
        f"  most of the others have one of {len(few)} runs in them: {where}",
        f"  without these, {right} of {total} are in the right order ({right / total:.0%})",
    ]


def _as_dict(each: Scored) -> dict:
    run = each.run
    return {
        "file": run.row.file,
        "line": run.row.line,
        "source": run.source,
        "model": run.title,
        "published_seconds": run.seconds,
        "predicted_seconds": each.predicted,
    }


def _pairs(right: int, total: int) -> str:
    return f"{right} of {total}" if total else "-"


def _cells(found: Errors) -> tuple[str, ...]:
    return (
        str(found.count),
        f"{found.median:.1%}",
        f"{found.ninetieth:.1%}",
        f"{found.bias:+.1%}",
    )


def _reasons(listed: list[Listed]) -> dict[str, str]:
    """Where rows are, by why they are not modelled: ``framework_posts.csv 6, 8-10``."""
    found: dict[tuple[str, str], list[int]] = {}
    for each in listed:
        found.setdefault((each.reason, each.row.file), []).append(each.row.line)
    return {reason: f"{file} {_spans(lines)}" for (reason, file), lines in found.items()}


def _spans(lines: list[int]) -> str:
    spans: list[list[int]] = []
    for line in lines:
        if spans and line == spans[-1][1] + 1:
            spans[-1][1] = line
        else:
            spans.append([line, line])
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in spans)
