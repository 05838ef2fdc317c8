"""Tasks on streams: each stream runs its tasks in the order they were given, when what they wait
for is done. One pass over the tasks finds every start and end.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class Task:
    """Something that takes time."""

    kind: str
    """what a reader calls it, as in ``all-gather``"""
    start: float
    end: float
    lane: str
    label: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Timeline:
    """Tasks as they are added, with their times."""

    def __init__(self, tasks: Iterable[Task] = ()):
        self.tasks: list[Task] = list(tasks)
        self._free: dict[str, float] = {}

    def add(self, kind: str, seconds: float, after: Iterable[Task | None] = (), lane: str = "",
            label: str = "") -> Task:  # fmt: skip
        """A task at the end of ``lane`` (its kind's own, unless named), after all of ``after``."""
        lane = lane or kind
        start = self._free.get(lane, 0.0)
        for task in after:
            if task is not None and task.end > start:
                start = task.end
        return self.place(Task(kind, start, start + seconds, lane, label))

    def place(self, task: Task) -> Task:
        """Add a task whose times are known; its lane is free when it ends."""
        self._free[task.lane] = task.end
        self.tasks.append(task)
        return task

    @property
    def end(self) -> float:
        return max(self._free.values(), default=0.0)

    def busy(self) -> dict[str, float]:
        """Seconds of every kind of task."""
        found: dict[str, float] = {}
        for task in self.tasks:
            found[task.kind] = found.get(task.kind, 0.0) + task.seconds
        return found

    def exposed(self, behind: str, first: Iterable[str] = ()) -> dict[str, float]:
        """Seconds of every other kind during which no task of kind ``behind`` runs.

        Where several kinds run at such a moment one counts: of ``first``, or that was added first.
        """
        spans: dict[str, list[tuple[float, float]]] = {kind: [] for kind in (behind, *first)}
        for task in self.tasks:
            spans.setdefault(task.kind, []).append((task.start, task.end))
        covered, found = _merged(spans.pop(behind)), {}
        for kind, own in spans.items():
            together = _merged([*covered, *own])
            if own:
                found[kind] = _length(together) - _length(covered)
            covered = together
        return found


def _merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _length(spans: list[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans)
