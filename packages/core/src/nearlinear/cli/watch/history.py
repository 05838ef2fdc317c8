"""Follow a metrics file, a log or a pipe, keep the metrics of the steps in it, and raise alarms.

Alarms tell of stragglers, a diverging loss, a throughput drop and a silent run.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
from array import array
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from statistics import median, median_low
from typing import Any, NamedTuple, TypeGuard

from ...errors import ConfigError
from ...output import format_duration
from ...train.metrics import INTRODUCTION_PATTERN, METRIC_FORMATS, METRIC_PATTERNS

RECENT_REPORTS = 20
"""Number of reports that current rates are computed from."""
PAUSE_FACTOR = 20.0
"""Gaps longer than this multiple of the median gap are pauses, e.g. of a resumed run."""
_PATTERNS = {name: re.compile(pattern) for name, pattern in METRIC_PATTERNS.items()}
_INTRODUCTION = re.compile(INTRODUCTION_PATTERN)

FILE_HEAD_BYTES = 200
"""Bytes compared to detect a replaced file. They contain the time of the first row."""
PIPE_BLOCK_BYTES = 1 << 16


def parse_row(text: str) -> dict[str, Any] | None:
    """Return the metrics in a JSON or key=value line, or None if it does not report a step."""
    if text.lstrip().startswith("{"):
        try:
            row = json.loads(text)
        except ValueError:
            return None
        return row if isinstance(row, dict) and _is_number(row.get("step")) else None
    row: dict[str, Any] = {}
    for name, pattern in _PATTERNS.items():
        if found := pattern.search(text):
            try:
                row[name] = float(found[1])
            except ValueError:
                return None
    return row | {"step": int(row["step"])} if {"step", "loss"} <= row.keys() else None


class History:
    """Columns of `METRIC_FORMATS` and ``time``, and the newest per-rank metrics."""

    def __init__(self):
        self.steps = 0
        """Last step of the run; 0 = unknown."""
        self.tokens_per_step = 0
        """Tokens per optimizer step; 0 = unknown."""
        self.hosts: list[str] = []
        """Host of every rank; empty = unknown."""
        self.clear()

    def clear(self) -> None:
        """Forget all steps."""
        self._columns = {name: array("d") for name in (*METRIC_FORMATS, "time", "replicas")}
        self.ranks: deque[tuple[float, dict[str, Any]]] = deque(maxlen=RECENT_REPORTS)
        self.epochs: dict[str, float] = {}
        """Epochs read of each source of a mixture, from the newest row; empty = no mixture."""

    def __len__(self) -> int:
        return len(self["step"])

    def __getitem__(self, name: str) -> array[float]:
        """Return a metric of all steps, NaN for the steps without it."""
        return self._columns[name]

    def read(self, text: str, now: float = math.nan) -> dict[str, Any] | None:
        """Parse a line that arrived at ``now`` and return its metrics if it reports a step."""
        row = parse_row(text)
        if row is not None:
            self.add({"time": now} | row)
        elif found := _INTRODUCTION.search(text):
            self.steps, self.tokens_per_step = (int(n.replace(",", "")) for n in found.groups())
        return row

    def add(self, row: dict[str, Any]) -> None:
        """Append a step. A repeated step replaces its earlier report and all later ones."""
        step = row["step"]
        while len(self) and self["step"][-1] >= step:
            for column in self._columns.values():
                column.pop()
        while self.ranks and self.ranks[-1][0] >= step:
            self.ranks.pop()
        for name, column in self._columns.items():
            value = row.get(name)
            column.append(float(value) if _is_number(value) else math.nan)
        epochs = row.get("epochs")
        if isinstance(epochs, dict) and all(map(_is_number, epochs.values())):
            self.epochs = epochs
        arrays = {name: value for name, value in row.items() if isinstance(value, list)}
        if arrays:
            self.ranks.append((step, arrays))

    def read_about(self, text: str) -> None:
        """Parse a run's ``about.json``. An incomplete file is ignored."""
        try:
            found = json.loads(text)
            about = int(found["steps"]), int(found["tokens_per_step"]), list(found["hosts"])
        except (ValueError, KeyError, TypeError):
            return
        self.steps, self.tokens_per_step, self.hosts = about

    def last(self, name: str) -> tuple[float, float]:
        """Return the newest value of a metric and its step, or (NaN, NaN)."""
        for step, value in zip(reversed(self["step"]), reversed(self[name]), strict=True):
            if not math.isnan(value):
                return value, step
        return math.nan, math.nan

    def recent(self, name: str, count: int = RECENT_REPORTS) -> list[float]:
        """Return the finite values of a metric among its newest ``count`` values."""
        return [value for value in self[name][-count:] if math.isfinite(value)]

    def by_rank(self, name: str) -> list[float]:
        """Return the median of a metric over the newest rows for every rank; empty if unknown."""
        rows = [arrays[name] for _, arrays in self.ranks if arrays.get(name)]
        rows = [row for row in rows if len(row) == len(rows[-1])]
        return [median(values) for values in zip(*rows, strict=True)]

    @property
    def done(self) -> bool:
        """True if the run has reported its last step."""
        return bool(self.steps and len(self) and self["step"][-1] >= self.steps)

    def seconds_per_step(self) -> float:
        """Return the mean time between steps, with evaluations, without pauses; NaN if unknown."""
        gaps = self.gaps()
        longest = PAUSE_FACTOR * median([seconds for seconds, _ in gaps if seconds] or [0.0])
        steady = [(seconds, steps) for seconds, steps in gaps if seconds <= longest]
        if any(seconds for seconds, _ in steady):
            return sum(seconds for seconds, _ in steady) / sum(steps for _, steps in steady)
        rates = self.recent("tokens_per_s")
        return self.tokens_per_step / median(rates) if self.tokens_per_step and rates else math.nan

    def gaps(self) -> list[tuple[float, float]]:
        """Return (seconds, steps) between the newest reports whose times are known.

        Lines that arrive together, as from a remote log, are zero seconds apart.
        """
        times, steps = self["time"][-RECENT_REPORTS - 1 :], self["step"][-RECENT_REPORTS - 1 :]
        return [
            (times[i + 1] - times[i], steps[i + 1] - steps[i])
            for i in range(len(times) - 1)
            if times[i + 1] >= times[i]  # False if either is NaN
        ]

    def seconds_left(self) -> float:
        """Return the estimated time until the last step; NaN if unknown."""
        if not (self.steps and len(self)):
            return math.nan
        return max(0.0, self.steps - self["step"][-1]) * self.seconds_per_step()


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


class LineSplitter:
    """Split blocks of bytes into complete lines; an incomplete last line is kept."""

    def __init__(self):
        self._rest = b""

    def __call__(self, block: bytes) -> list[str]:
        *complete, self._rest = (self._rest + block).split(b"\n")
        return [line.decode(errors="replace").rstrip("\r") for line in complete]


class FollowedFile:
    """Lines of a file that may grow, be replaced, or not exist yet."""

    ended = False
    """Always False: another writer may append to the file."""

    def __init__(self, path: Path):
        self.path = path
        self._start_over(None)

    def _start_over(self, inode: tuple[int, int] | None) -> None:
        self._inode, self._head, self._offset = inode, b"", 0
        self._split = LineSplitter()

    def read_new(self) -> tuple[bool, list[str]]:
        """Return True if the file was replaced since the last call, and the lines since then.

        Raises ConfigError if the file exists and cannot be read.
        """
        try:
            file = open(self.path, "rb")  # opened again: network file systems then show new data
        except FileNotFoundError:
            return False, []
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be read ({error.strerror})") from None
        with file:
            status = os.fstat(file.fileno())
            inode = (status.st_dev, status.st_ino)
            same = (
                inode == self._inode
                and status.st_size >= self._offset
                and file.read(len(self._head)) == self._head
            )
            replaced = not same and self._inode is not None
            if not same:
                self._start_over(inode)
            if len(self._head) < FILE_HEAD_BYTES:
                file.seek(0)
                self._head = file.read(FILE_HEAD_BYTES)
            file.seek(self._offset)
            block = file.read()
        self._offset += len(block)
        return replaced, self._split(block)


class FollowedPipe:
    """Lines from a file descriptor, read by a thread."""

    def __init__(self, descriptor: int = 0):
        self._descriptor, self._split = descriptor, LineSplitter()
        self._lines: list[str] = []
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read_blocks, daemon=True)
        self._reader.start()

    @property
    def ended(self) -> bool:
        """True if the writer has closed the pipe; `read_new` may still return lines."""
        return not self._reader.is_alive()

    def wait(self) -> None:
        """Wait until the writer closes the pipe."""
        self._reader.join()

    def read_new(self) -> tuple[bool, list[str]]:
        """Return False, because a pipe is never replaced, and the lines since the last call."""
        with self._lock:
            lines, self._lines = self._lines, []
        return False, lines

    def _read_blocks(self) -> None:
        while block := os.read(self._descriptor, PIPE_BLOCK_BYTES):
            self._append(block)
        self._append(b"\n")  # completes a last line without a newline

    def _append(self, block: bytes) -> None:
        lines = self._split(block)
        with self._lock:
            self._lines += lines


STRAGGLER_FACTOR = 1.25
"""A straggler's own time is more than this multiple of the median rank's."""
STRAGGLER_STEP_SHARE = 0.05
"""A straggler costs more than this share of a step."""
MIN_REPORTS = 3
"""Reports needed before ranks are compared."""
THROUGHPUT_DROP = 0.8
"""Alarm if the throughput falls below this multiple of the median."""
LOSS_SPIKE = 6.0
"""Alarm if the loss exceeds its median by this multiple of its median absolute deviation."""
SILENCE_FACTOR = 5.0
"""Alarm if no report arrives for this multiple of the median gap between reports."""
MIN_SILENCE_SECONDS = 10.0


@dataclass(frozen=True)
class Straggler:
    """A rank that takes longer than the other ranks for the same work."""

    rank: int
    host: str
    """Host name; empty = unknown."""
    seconds: float
    """Seconds per step that the rank spends on its own work."""
    median_seconds: float
    """The same for the median rank."""
    loading: bool
    """True if the rank is slow in loading batches, False if it is slow in computing."""

    def __str__(self) -> str:
        where = f" on {self.host}" if self.host else ""
        work = "loads its batch" if self.loading else "computes"
        late = self.seconds - self.median_seconds
        if self.median_seconds:
            ratio = f"{self.seconds / self.median_seconds:.1f}x the median"
        else:
            ratio = "others: none"
        return f"rank {self.rank}{where} {work} {late:.3g} s longer a step ({ratio})"


def find_stragglers(history: History) -> list[Straggler]:
    """Return the ranks that delay the others in the newest steps, slowest first.

    Ranks are compared by the time they spend on their own
    (`nearlinear.train.callbacks.rank_monitor`). Step times cannot tell ranks apart, because all
    ranks wait for the slowest.
    """
    loading, computing = history.by_rank("load_seconds"), history.by_rank("compute_seconds")
    steps = history.by_rank("step_seconds")
    if len(history.ranks) < MIN_REPORTS or not steps or len(loading) != len(computing):
        return []
    own = [sum(parts) for parts in zip(loading, computing, strict=True)]
    typical, min_cost = median_low(own), STRAGGLER_STEP_SHARE * median(steps)
    typical_loading, typical_computing = median_low(loading), median_low(computing)
    found = [
        Straggler(
            rank,
            history.hosts[rank] if rank < len(history.hosts) else "",
            seconds,
            typical,
            loading[rank] - typical_loading > computing[rank] - typical_computing,
        )
        for rank, seconds in enumerate(own)
        if seconds > STRAGGLER_FACTOR * typical and seconds - typical > min_cost
    ]
    return sorted(found, key=lambda straggler: -straggler.seconds)


class RunAlarm(NamedTuple):
    """A sign that a run has a problem."""

    kind: str
    """loss, speed or silence"""
    text: str


def find_alarms(history: History, silence: float = 0.0) -> list[RunAlarm]:
    """Return the alarms of a run.

    Args:
        history: Steps reported so far.
        silence: Seconds since the newest report; 0 if the source has ended.
    """
    found = (
        ("loss", _check_loss(history)),
        ("speed", _check_throughput(history)),
        ("replicas", _check_replicas(history)),
        ("silence", _check_silence(history, silence)),
    )
    return [RunAlarm(kind, text) for kind, text in found if text]


def _check_loss(history: History) -> str:
    if not len(history):
        return ""
    step, loss = history["step"][-1], history["loss"][-1]
    if not math.isfinite(loss):
        return f"the loss of step {step:.0f} is not finite: the run has diverged"
    before = [value for value in history["loss"][-21:-1] if math.isfinite(value)]
    if len(before) < 10:
        return ""
    typical = median(before)
    deviation = median(abs(value - typical) for value in before)
    if loss - typical > LOSS_SPIKE * deviation and loss > 1.1 * typical:
        return f"the loss jumped to {loss:.4g} at step {step:.0f}, from {typical:.4g} before"
    return ""


def _check_throughput(history: History) -> str:
    rates = history.recent("tokens_per_s", 100)
    if len(rates) < 15:
        return ""
    now, typical = median(rates[-5:]), median(rates[:-5])
    if now >= THROUGHPUT_DROP * typical:
        return ""
    less = 1 - now / typical
    return f"throughput has dropped to {now:.4g} tokens/s, from {typical:.4g} ({less:.0%} less)"


def _check_replicas(history: History) -> str:
    """Describe the replicas of an elastic run that are missing."""
    counts = [count for count in history["replicas"] if not math.isnan(count)]
    if not counts or counts[-1] == max(counts):
        return ""
    steps = [step for step, n in zip(history["step"], history["replicas"], strict=True)
             if n == max(counts)]  # fmt: skip
    return (
        f"{max(counts) - counts[-1]:.0f} of {max(counts):.0f} replicas are missing since step "
        f"{steps[-1]:.0f}: the others compute their batches"
    )


def _check_silence(history: History, silence: float) -> str:
    gaps = [seconds for seconds, _ in history.gaps() if seconds]
    if history.done or len(gaps) < MIN_REPORTS - 1:
        return ""
    typical = median(gaps)
    if silence <= max(SILENCE_FACTOR * typical, 2 * max(gaps[-10:]), MIN_SILENCE_SECONDS):
        return ""
    return (
        f"no new line for {format_duration(silence)}, usually one every {typical:.2g} s: the run "
        f"may hang or have ended; last step {history['step'][-1]:.0f}"
    )
