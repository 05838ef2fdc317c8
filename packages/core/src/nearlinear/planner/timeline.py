"""Timelines: tasks on streams, the kinds of task, and the time of one optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from .block_time import BlockTimes
from .workload import Workload

COMPUTE, ALL_GATHER, REDUCE_SCATTER = "compute", "all-gather", "reduce-scatter"
ALL_REDUCE = "second hop"  # all-reduce of gradient shards over the replicas (MiCS)
TENSOR, CONTEXT, EXPERT, PIPELINE = "tensor", "context", "expert", "pipeline"
OFFLOAD, UPDATE, BUBBLE = "offload", "optimizer", "bubble"

Seconds = dict[str, float]
"""Seconds by kind of task."""


@dataclass(slots=True)
class Task:
    """A task with known start and end, in seconds."""

    kind: str
    """Kind of work, for example ``all-gather``."""
    start: float
    end: float
    stream: str
    label: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Timeline:
    """Tasks on streams.

    A stream runs its tasks in insertion order, each as soon as its dependencies are done.
    """

    def __init__(self, tasks: Iterable[Task] = ()):
        self.tasks: list[Task] = list(tasks)
        self._free: dict[str, float] = {}

    def add(
        self,
        kind: str,
        seconds: float,
        after: Iterable[Task | None] = (),
        stream: str = "",
        label: str = "",
    ) -> Task:
        """Append a task to ``stream`` (default: the stream of its kind), after all of ``after``."""
        stream = stream or kind
        start = self._free.get(stream, 0.0)
        for task in after:
            if task is not None and task.end > start:
                start = task.end
        return self.place(Task(kind, start, start + seconds, stream, label))

    def place(self, task: Task) -> Task:
        """Append a task with known times; its stream is free from the end of the task on."""
        self._free[task.stream] = task.end
        self.tasks.append(task)
        return task

    @property
    def end(self) -> float:
        return max(self._free.values(), default=0.0)

    def busy(self) -> Seconds:
        """Total seconds of every kind of task."""
        total: Seconds = {}
        for task in self.tasks:
            total[task.kind] = total.get(task.kind, 0.0) + task.seconds
        return total

    def exposed(self, behind: str, first: Iterable[str] = ()) -> Seconds:
        """Seconds of every other kind during which no task of kind ``behind`` runs.

        A moment shared by several kinds is counted once: for a kind in ``first``, or else for the
        kind that was added first.
        """
        spans: dict[str, list[tuple[float, float]]] = {kind: [] for kind in (behind, *first)}
        for task in self.tasks:
            spans.setdefault(task.kind, []).append((task.start, task.end))
        covered, exposed = _merged(spans.pop(behind)), {}
        for kind, own in spans.items():
            together = _merged([*covered, *own])
            if own:
                exposed[kind] = _length(together) - _length(covered)
            covered = together
        return exposed


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


@dataclass(frozen=True)
class StepTime:
    """Time of one optimizer step, and its breakdown by kind of task."""

    seconds: float
    draw: Callable[[], Timeline]
    simulated: int
    """Micro-batches in the timeline; the others repeat one of them."""
    work: Workload
    blocks: BlockTimes
    account: Callable[[StepTime], tuple[Seconds, Seconds]]
    """Computes `busy` and `exposed`."""

    @cached_property
    def timeline(self) -> Timeline:
        """Timeline of the simulated micro-batches."""
        return self.draw()

    @cached_property
    def busy(self) -> Seconds:
        """Total seconds per kind of task in a whole step; in a pipeline, on the slowest rank."""
        return self._accounts[0]

    @cached_property
    def exposed(self) -> Seconds:
        """Seconds per kind not overlapped with compute; ``bubble`` is pipeline idle time."""
        return self._accounts[1]

    @cached_property
    def _accounts(self) -> tuple[Seconds, Seconds]:
        return self.account(self)
