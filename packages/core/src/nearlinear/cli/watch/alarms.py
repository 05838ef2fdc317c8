"""Detect stragglers, a diverging loss, a throughput drop and a silent run in a `History`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median, median_low
from typing import NamedTuple

from ...text_table import format_duration
from .history import History

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

    Ranks are compared by the time they spend on their own (`nearlinear.train.callbacks
    .rank_timing`). Step times cannot tell ranks apart, because all ranks wait for the slowest.
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
