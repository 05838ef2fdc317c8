"""What is there now, by category, and what was there when there was most."""

from __future__ import annotations

from collections import Counter

Bytes = dict[str, int]
"""By category."""


class Ledger:
    """Bytes that come and go, in the order of a step."""

    def __init__(self):
        self.now: Counter[str] = Counter()
        self.moment = ""
        """where the step is, in words"""
        self.peak = 0
        self.at_peak: Bytes = {}
        self.moment_of_peak = ""

    def add(self, category: str, size: int) -> None:
        """``size`` bytes more, from now on; less, if it is negative."""
        self.now[category] += size
        if size > 0:
            self.look()

    def enter(self, sizes: Bytes, sign: int = 1) -> None:
        """Bytes that come, or go, with something else that is looked at."""
        for category, size in sizes.items():
            self.now[category] += sign * size

    def look(self, **more: int) -> None:
        """Bytes ``more`` of some categories, at this moment only."""
        total = sum(self.now.values()) + sum(more.values())
        if total > self.peak:
            self.peak, self.moment_of_peak = total, self.moment
            self.at_peak = dict(self.now)
            for category, size in more.items():
                self.at_peak[category] = self.at_peak.get(category, 0) + size
