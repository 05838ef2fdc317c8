"""Steps whose update would do harm: they are skipped and counted, and too many in a row end a run.

Source of skipping what comes with a spike: Chowdhery et al. 2022, "PaLM", 5.1. The median of recent
norms says what is usual, as spikes do not move it.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

from ..errors import NearlinearError

WINDOW = 64
"""gradient norms that are remembered"""
ENOUGH = 16
"""of them, before one can be told from the others"""


class TooManyBadSteps(NearlinearError):
    """The run has stopped before the next."""

    everywhere = True


class BadSteps:
    """Judges every step by numbers that all ranks have alike, so that all skip the same ones."""

    def __init__(self, in_a_row: int, spike_factor: float):
        """``in_a_row`` may be skipped; ``spike_factor``: of the median norm, 0 = no norm is one."""
        self.in_a_row, self.spike_factor = in_a_row, spike_factor
        self.skipped = self.row = 0
        """steps that were skipped: in all, and since the last that was not"""
        self.norms: deque[float] = deque(maxlen=WINDOW)

    def judge(self, step: int, loss: float, norm: float) -> str:
        """Why ``step`` must not change the model; empty: it may.

        Raises TooManyBadSteps where too many have been skipped in a row.
        """
        why = self._why(loss, norm)
        if not why:
            self.row = 0
            self.norms.append(norm)
            return ""
        self.skipped, self.row = self.skipped + 1, self.row + 1
        if self.row > self.in_a_row:
            before = f", as {self.row - 1} before it were" if self.row > 1 else ""
            raise TooManyBadSteps(
                f"step {step}: {why}; the run stops before this step changes the model{before}: "
                "lower optimizer.lr, lengthen optimizer.warmup_steps, or go on from an older "
                "checkpoint with another data.seed"
            )
        return why

    def _why(self, loss: float, norm: float) -> str:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return f"the loss is {loss:.4g} and the gradient norm {norm:.4g}"
        if not self.spike_factor or len(self.norms) < ENOUGH:
            return ""
        usual = statistics.median(self.norms)
        if norm <= self.spike_factor * usual:
            return ""
        return f"the gradient norm is {norm:.4g}, {norm / max(usual, 1e-30):.1f} times the usual"

    def state_dict(self) -> dict:
        return {"skipped": self.skipped, "row": self.row, "norms": list(self.norms)}

    def load_state_dict(self, state: dict) -> None:
        self.skipped, self.row = int(state["skipped"]), int(state["row"])
        self.norms = deque(map(float, state["norms"]), maxlen=WINDOW)
