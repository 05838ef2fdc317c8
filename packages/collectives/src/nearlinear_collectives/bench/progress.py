"""A progress bar on stderr where that is a terminal; elsewhere nothing but the tables' lines."""

import sys
import time

WIDTH = 24


class Progress:
    """Counts steps; `line` prints to stdout without tearing the bar."""

    def __init__(self, steps: int, shown: bool):
        self.steps, self.done = steps, 0
        self.bar = shown and sys.stderr.isatty()
        self.shown = shown
        self.start = time.monotonic()

    def step(self, what: str) -> None:
        """Say what is measured now; call before each step."""
        if self.bar:
            full = WIDTH * self.done // self.steps
            spent = time.monotonic() - self.start
            text = f"[{'#' * full}{'.' * (WIDTH - full)}] {self.done}/{self.steps}"
            print(f"\r\x1b[K{text} {spent:.0f} s  {what}", end="", file=sys.stderr, flush=True)
        self.done += 1

    def line(self, text: str = "") -> None:
        if self.bar:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        if self.shown:
            print(text, flush=True)
