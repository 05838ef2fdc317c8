"""Skip and count steps with non-finite or spiking gradients; stop a run after too many in a row.

Source: skipping the batches of a spike, Chowdhery et al. 2022, "PaLM", section 5.1. A norm is
compared with the median of recent norms, because spikes do not move the median.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

from ...errors import NearlinearError
from . import Callback, TrainStep

NORM_WINDOW = 64
"""Number of gradient norms that are remembered."""
MIN_NORMS = 16
"""Norms needed before one can be called a spike."""


class TooManyBadSteps(NearlinearError):
    """Too many consecutive steps were skipped."""

    everywhere = True


class BadStepDetector(Callback):
    """Decide by the loss and the gradient norm whether a step updates the model.

    Both numbers are equal on all ranks, so all ranks skip the same steps.
    """

    def __init__(self, max_consecutive: int, spike_factor: float):
        """
        Args:
            max_consecutive: Steps that may be skipped in a row.
            spike_factor: Skip steps whose gradient norm exceeds this multiple of the median of
                recent norms. 0 skips only non-finite steps.
        """
        self.max_consecutive: int = max_consecutive
        self.spike_factor: float = spike_factor
        self.skipped: int = 0
        """Skipped steps."""
        self.consecutive: int = 0
        """Skipped steps since the last step that was not skipped."""
        self.norms: deque[float] = deque(maxlen=NORM_WINDOW)

    def on_gradients_ready(self, step: TrainStep) -> None:
        if step.skip_reason:  # by another callback
            self.skipped += 1
        elif not step.overflow:  # the loss scaler counts overflows
            step.skip_reason = self.check_step(step.number, step.loss, step.grad_norm)

    def check_step(self, number: int, loss: float, norm: float) -> str:
        """Return the reason to skip step ``number``, or "" if it may update the model.

        Raises TooManyBadSteps if too many steps in a row were bad.
        """
        reason = self._find_reason(loss, norm)
        if not reason:
            self.consecutive = 0
            self.norms.append(norm)
            return ""
        self.skipped, self.consecutive = self.skipped + 1, self.consecutive + 1
        if self.consecutive > self.max_consecutive:
            before = ""
            if self.max_consecutive:
                before = (
                    f", and {self.max_consecutive} steps before it were skipped, the limit of "
                    "train.bad_steps_in_a_row"
                )
            raise TooManyBadSteps(
                f"step {number}: {reason}{before}. The run stops before this step updates the "
                "model: lower optimizer.lr, raise optimizer.warmup_steps, or resume from an older "
                "checkpoint with another data.seed"
            )
        return reason

    def _find_reason(self, loss: float, norm: float) -> str:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return f"the loss is {loss:.4g} and the gradient norm {norm:.4g}"
        if not self.spike_factor or len(self.norms) < MIN_NORMS:
            return ""
        typical = statistics.median(self.norms)
        if norm <= self.spike_factor * typical:
            return ""
        return f"the gradient norm is {norm:.4g}, {norm / max(typical, 1e-30):.1f} times the median"

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint keeps."""
        return {"skipped": self.skipped, "row": self.consecutive, "norms": list(self.norms)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self.skipped, self.consecutive = int(state["skipped"]), int(state["row"])
        self.norms = deque(map(float, state["norms"]), maxlen=NORM_WINDOW)
