"""Progress of a preparation: a bar on a terminal's stderr, else a plain line every few seconds.

Plain lines suit papermill, CI and CloudWatch, where a bar would be noise.
"""

import sys
import time

_SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """Counts documents, bytes and tokens. `total` is what the named `unit` will reach, if known."""

    def __init__(self, label: str, unit: str = "documents", total: int | None = None,
                 show: bool = True):  # fmt: skip
        self.label, self.unit, self.total, self.show = label, unit, total, show
        self.counts = dict.fromkeys(("documents", "bytes", "tokens"), 0)
        self._bar = None

    def __enter__(self) -> "Progress":
        self._start = self._last_line = time.monotonic()
        if self.show and sys.stderr.isatty():
            self._open_bar()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self.show and kind is None:
            self._print(f"{self.label}: {self._status()} in {self._seconds():.1f} s")

    def advance(self, bytes: int, tokens: int) -> None:
        """Count one more document, of so many bytes of text and so many tokens."""
        for name, count in (("documents", 1), ("bytes", bytes), ("tokens", tokens)):
            self.counts[name] += count
        if self._bar is not None:
            self._bar.update(self._task, completed=self.counts[self.unit], status=self._status())
        elif self.show and time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            self._print(f"{self.label}: {self._status()}{self._remaining()}")

    def note(self, line: str) -> None:
        """One line for the reader that is not progress."""
        if self.show:
            self._bar.console.print(line) if self._bar is not None else self._print(line)

    def _open_bar(self) -> None:
        from rich import progress
        from rich.console import Console

        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.TextColumn("{task.fields[status]}"),
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task(self.label, total=self.total, status="")
        self._bar.start()

    def _seconds(self) -> float:
        return max(time.monotonic() - self._start, 1e-9)

    def _status(self) -> str:
        rate = self.counts["tokens"] / self._seconds()
        documents, tokens = self.counts["documents"], self.counts["tokens"]
        return f"{documents:,} documents, {tokens / 1e6:.2f} M tokens, {rate / 1e6:.2f} M tokens/s"

    def _remaining(self) -> str:
        done = self.counts[self.unit]
        if not self.total or not done:
            return ""
        seconds = self._seconds() * max(self.total / done - 1, 0)
        return f", about {seconds:.0f} s left"

    def _print(self, line: str) -> None:
        print(line, flush=True)
