"""Progress of a preparation: a bar on a terminal's stderr, else a plain line every few seconds.

Plain lines suit papermill, CI and CloudWatch, where a bar would be noise; with "json" each line is
an object on stdout, for programs.
"""

import json
import sys
import threading
import time

from data_prep.job import Job

_SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """Counts documents, bytes and tokens of a job; of splits that were done before, too.

    `show` is whether to show anything, or "json". Threads may tell it at the same time.
    """

    def __init__(self, label: str, job: Job, show: bool | str = True):
        self.label, self.show, self._job = label, show, job
        self.unit, self.total = _goal(job)
        self.counts = dict.fromkeys(("documents", "bytes", "tokens", "splits"), 0)
        self._input = self._text = self._before = 0
        self._bar, self._turn = None, threading.Lock()

    def __enter__(self) -> "Progress":
        self._start = self._last_line = time.monotonic()
        if self.show is True and sys.stderr.isatty():
            self._open_bar()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self.show and kind is None:
            self._line("done", f"{self._status()} in {self._seconds():.1f} s")

    def advance(self, documents: int, bytes: int, tokens: int) -> None:
        """Count documents, with so many bytes of text and so many tokens."""
        with self._turn:
            self._count(documents, bytes, tokens)
            if self._bar is not None:
                self._bar.update(self._task, completed=self._reached(), status=self._status())
            elif self.show and time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES:
                self._last_line = time.monotonic()
                self._line("progress", self._status() + self._remaining())

    def finish_split(self, number: int, record: dict | None = None) -> None:
        """A split is done; with its `record` it was done before, by an earlier preparation."""
        with self._turn:
            self.counts["splits"] += 1
            if record is not None:
                self._count(record["documents"], record["bytes"], record["tokens"])
                self._before += record["tokens"]
            self._input += self._job.splits[number].bytes or 0
            self._text = self.counts["bytes"]

    def note(self, line: str) -> None:
        """One line for the reader that is not progress."""
        if self.show == "json":
            self._line("note", line)
        elif self.show:
            self._bar.console.print(line) if self._bar is not None else print(line, flush=True)

    def _count(self, documents: int, bytes: int, tokens: int) -> None:
        for name, count in (("documents", documents), ("bytes", bytes), ("tokens", tokens)):
            self.counts[name] += count

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

    def _rate(self) -> float:
        return (self.counts["tokens"] - self._before) / self._seconds()

    def _status(self) -> str:
        documents, tokens = self.counts["documents"], self.counts["tokens"]
        return (
            f"{documents:,} documents, {tokens / 1e6:.2f} M tokens, "
            f"{self._rate() / 1e6:.2f} M tokens/s"
        )

    def _reached(self) -> float:
        """How far it is, in the unit: bytes of text stand for those of the input around them."""
        if self.unit != "bytes":
            return self.counts[self.unit]
        ratio = self._input / self._text if self._input and self._text else 1.0
        return self.counts["bytes"] * ratio

    def _left(self) -> float | None:
        done = self._reached()
        if not self.total or not done or not self._rate():
            return None
        share = self.counts["tokens"] * max(self.total / done - 1, 0)
        return share / self._rate()

    def _remaining(self) -> str:
        left = self._left()
        return "" if left is None else f", about {left:.0f} s left"

    def _line(self, event: str, words: str) -> None:
        if self.show != "json":
            print(f"{self.label}: {words}", flush=True)
            return
        document = {"event": event, "source": self.label, **self.counts,
                    "of_splits": len(self._job.splits), "seconds": round(self._seconds(), 3),
                    "seconds_left": self._left()}  # fmt: skip
        if event == "note":
            document = {"event": event, "source": self.label, "note": words}
        print(json.dumps(document), flush=True)


def _goal(job: Job) -> tuple[str, int | None]:
    """What is counted towards: a unit and its total, None when unknown."""
    for unit in ("tokens", "documents"):
        if job.settings[f"max_{unit}"] is not None:
            return unit, job.settings[f"max_{unit}"]
    if job.source.expected_documents is not None:
        return "documents", job.source.expected_documents
    sizes = [split.bytes for split in job.splits]
    return "bytes", None if None in sizes else sum(sizes)
