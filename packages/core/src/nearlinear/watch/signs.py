"""What should worry whoever watches: ranks that hold up the others, and a run that goes wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median, median_low
from typing import NamedTuple

from .draw import duration
from .history import History

SLOWER = 1.25  # times the median rank's own time
OF_A_STEP = 0.05  # how much of it a rank must cost to be named
FEWEST = 3  # reported steps to judge by
DROP = 0.8  # of the usual tokens/s
SPIKE = 6.0  # times what the loss usually differs from its median
SILENCE = 5.0  # times the usual pause between reports
LEAST_SILENCE = 10.0  # seconds


@dataclass(frozen=True)
class Straggler:
    """A rank that takes longer than the others for the same work."""

    rank: int
    host: str
    """empty = unknown"""
    seconds: float
    """of its own work in a step"""
    usual: float
    """of the median rank's"""
    loading: bool
    """whether it is late with its batch, rather than with computing"""

    def __str__(self) -> str:
        where = f" on {self.host}" if self.host else ""
        what = "loads its batch" if self.loading else "computes"
        ratio = f"{self.seconds / self.usual:.1f}x the median" if self.usual else "others: none"
        late = self.seconds - self.usual
        return f"rank {self.rank}{where} {what} {late:.3g} s longer a step ({ratio})"


def stragglers(history: History) -> list[Straggler]:
    """Ranks that hold up the others in the latest steps, the worst first.

    By their own time alone (`train.ranks`): step times are the same everywhere, for all wait.
    """
    loading, computing = history.by_rank("load_seconds"), history.by_rank("compute_seconds")
    steps = history.by_rank("step_seconds")
    if len(history.ranks) < FEWEST or not steps or len(loading) != len(computing):
        return []
    own = [sum(parts) for parts in zip(loading, computing, strict=True)]
    usual, cost = median_low(own), OF_A_STEP * median(steps)
    usual_load, usual_compute = median_low(loading), median_low(computing)
    found = [
        Straggler(
            rank,
            history.hosts[rank] if rank < len(history.hosts) else "",
            seconds,
            usual,
            loading[rank] - usual_load > computing[rank] - usual_compute,
        )
        for rank, seconds in enumerate(own)
        if seconds > SLOWER * usual and seconds - usual > cost
    ]
    return sorted(found, key=lambda straggler: -straggler.seconds)


class Alarm(NamedTuple):
    """Something that looks wrong."""

    kind: str
    """loss, speed or silence"""
    text: str


def alarms(history: History, silence: float = 0.0) -> list[Alarm]:
    """What looks wrong. ``silence``: seconds since the last report, 0 where no more is to come."""
    found = (
        ("loss", _loss(history)),
        ("speed", _speed(history)),
        ("silence", _hang(history, silence)),
    )
    return [Alarm(kind, text) for kind, text in found if text]


def _loss(history: History) -> str:
    if not len(history):
        return ""
    step, loss = history["step"][-1], history["loss"][-1]
    if not math.isfinite(loss):
        return f"the loss of step {step:.0f} is no number: the run has diverged"
    before = [value for value in history["loss"][-21:-1] if math.isfinite(value)]
    if len(before) < 10:
        return ""
    usual = median(before)
    spread = median(abs(value - usual) for value in before)
    if loss - usual > SPIKE * spread and loss > 1.1 * usual:
        return f"the loss jumped to {loss:.4g} at step {step:.0f}, from {usual:.4g} before"
    return ""


def _speed(history: History) -> str:
    rates = history.recent("tokens_per_s", 100)
    if len(rates) < 15:
        return ""
    now, usual = median(rates[-5:]), median(rates[:-5])
    if now >= DROP * usual:
        return ""
    less = 1 - now / usual
    return f"throughput has dropped to {now:.4g} tokens/s, from {usual:.4g} ({less:.0%} less)"


def _hang(history: History, silence: float) -> str:
    gaps = [seconds for seconds, _ in history.gaps() if seconds]
    if history.done or len(gaps) < FEWEST - 1:
        return ""
    usual = median(gaps)
    if silence <= max(SILENCE * usual, 2 * max(gaps[-10:]), LEAST_SILENCE):
        return ""
    return (
        f"no new line for {duration(silence)}, usually one every {usual:.2g} s: the run may hang, "
        f"or be gone; last step {history['step'][-1]:.0f}"
    )
