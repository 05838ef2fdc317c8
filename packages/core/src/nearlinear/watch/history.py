"""What a run has reported so far, step by step, from JSON lines or from the text of a log."""

from __future__ import annotations

import json
import math
import re
from array import array
from collections import deque
from statistics import median

from ..train.report import FORMATS, INTRODUCTION, METRIC_PATTERNS

RECENT = 20  # reported steps that "now" is taken over
LONG = 20.0  # times the usual gap between reports: a pause, as of a run that was resumed
_PATTERNS = {name: re.compile(pattern) for name, pattern in METRIC_PATTERNS.items()}
_INTRODUCTION = re.compile(INTRODUCTION)


def parse(text: str) -> dict | None:
    """The metrics in one line, as JSON or as key=value; None where it is no report of a step."""
    if text.lstrip().startswith("{"):
        try:
            row = json.loads(text)
        except ValueError:
            return None
        return row if isinstance(row, dict) and _is_number(row.get("step")) else None
    row: dict = {}
    for name, pattern in _PATTERNS.items():
        if found := pattern.search(text):
            try:
                row[name] = float(found[1])
            except ValueError:
                return None
    return row | {"step": int(row["step"])} if {"step", "loss"} <= row.keys() else None


class History:
    """Columns of the metrics in `FORMATS` and of ``time``, and the latest rows of all ranks."""

    def __init__(self):
        self.steps = 0
        """the last step that the run is to do; 0 = unknown"""
        self.tokens_per_step = 0
        self.hosts: list[str] = []
        """of every rank; empty = unknown"""
        self.clear()

    def clear(self) -> None:
        """Forget the steps."""
        self._columns = {name: array("d") for name in (*FORMATS, "time")}
        self.ranks: deque[tuple[float, dict]] = deque(maxlen=RECENT)
        self.epochs: dict[str, float] = {}
        """how often each source of a blend has been read, by the latest row; empty = no blend"""

    def __len__(self) -> int:
        return len(self["step"])

    def __getitem__(self, name: str) -> array:
        """A metric of all steps, NaN where a step has none."""
        return self._columns[name]

    def read(self, text: str, now: float = math.nan) -> dict | None:
        """Take in a line, which came at ``now``; the row, if it is a report of a step."""
        row = parse(text)
        if row is not None:
            self.add({"time": now} | row)
        elif found := _INTRODUCTION.search(text):
            self.steps, self.tokens_per_step = (int(n.replace(",", "")) for n in found.groups())
        return row

    def add(self, row: dict) -> None:
        """A step; one that was reported before voids that report and all after it."""
        step = row["step"]
        while len(self) and self["step"][-1] >= step:
            for column in self._columns.values():
                column.pop()
        while self.ranks and self.ranks[-1][0] >= step:
            self.ranks.pop()
        for name, column in self._columns.items():
            value = row.get(name)
            column.append(value if _is_number(value) else math.nan)
        epochs = row.get("epochs")
        if isinstance(epochs, dict) and all(map(_is_number, epochs.values())):
            self.epochs = epochs
        arrays = {name: value for name, value in row.items() if isinstance(value, list)}
        if arrays:
            self.ranks.append((step, arrays))

    def about(self, text: str) -> None:
        """Take in a run's ``about.json``; one that is being written is ignored."""
        try:
            found = json.loads(text)
            about = int(found["steps"]), int(found["tokens_per_step"]), list(found["hosts"])
        except (ValueError, KeyError, TypeError):
            return
        self.steps, self.tokens_per_step, self.hosts = about

    def last(self, name: str) -> tuple[float, float]:
        """The latest value of a metric and its step; NaN before there is one."""
        for step, value in zip(reversed(self["step"]), reversed(self[name]), strict=True):
            if not math.isnan(value):
                return value, step
        return math.nan, math.nan

    def recent(self, name: str, count: int = RECENT) -> list[float]:
        """The latest values of a metric, without those that are no numbers."""
        return [value for value in self[name][-count:] if math.isfinite(value)]

    def by_rank(self, name: str) -> list[float]:
        """For every rank the median of a metric over the latest rows; empty where unknown."""
        rows = [arrays[name] for _, arrays in self.ranks if arrays.get(name)]
        rows = [row for row in rows if len(row) == len(rows[-1])]
        return [median(values) for values in zip(*rows, strict=True)]

    @property
    def done(self) -> bool:
        """Whether the run has come to its last step."""
        return bool(self.steps and len(self) and self["step"][-1] >= self.steps)

    def pace(self) -> float:
        """Seconds from one step to the next, evaluations included, pauses not; NaN if unknown."""
        gaps = self.gaps()
        longest = LONG * median([seconds for seconds, _ in gaps if seconds] or [0.0])
        steady = [(seconds, steps) for seconds, steps in gaps if seconds <= longest]
        if any(seconds for seconds, _ in steady):
            return sum(seconds for seconds, _ in steady) / sum(steps for _, steps in steady)
        rates = self.recent("tokens_per_s")
        return self.tokens_per_step / median(rates) if self.tokens_per_step and rates else math.nan

    def gaps(self) -> list[tuple[float, float]]:
        """Between the latest reports: seconds and steps, where their times are known.

        No seconds between those that came together, as lines from afar do.
        """
        times, steps = self["time"][-RECENT - 1 :], self["step"][-RECENT - 1 :]
        return [
            (times[i + 1] - times[i], steps[i + 1] - steps[i])
            for i in range(len(times) - 1)
            if times[i + 1] >= times[i]  # not where one of them is NaN
        ]

    def seconds_left(self) -> float:
        """Until the last step; NaN if unknown."""
        if not (self.steps and len(self)):
            return math.nan
        return max(0.0, self.steps - self["step"][-1]) * self.pace()


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
