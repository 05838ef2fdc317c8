"""Progress of a preparation: a bar on a terminal, otherwise a plain line every few seconds.

Plain lines suit papermill, CI and CloudWatch. With "json", each line on stdout is an object.
"""

import json
import sys
import threading
import time
from typing import Any

from data_prep.plan import PreparationPlan

_LINE_INTERVAL = 5.0  # seconds


class Progress:
    """Thread-safe counter of documents, bytes and tokens, including splits of an earlier run.

    Args:
        show: True, False, or "json".
    """

    def __init__(self, label: str, plan: PreparationPlan, show: bool | str = True):
        self.label, self.show, self._plan = label, show, plan
        self.unit, self.total = _find_goal(plan)
        self.counts: dict[str, int] = dict.fromkeys(("documents", "bytes", "tokens", "splits"), 0)
        self._input_bytes = self._text_bytes = self._earlier_tokens = 0
        self._bar: Any = None
        self._lock = threading.Lock()

    def __enter__(self) -> "Progress":
        self._start = self._last_line = time.monotonic()
        if self.show is True and sys.stderr.isatty():
            self._open_bar()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self.show and kind is None:
            self._print_line("done", f"{self._status()} in {self._seconds():.1f} s")

    def advance(self, documents: int, bytes: int, tokens: int) -> None:
        """Count documents with their bytes of text and tokens."""
        with self._lock:
            self._count(documents, bytes, tokens)
            if self._bar is not None:
                self._bar.update(self._task, completed=self._completed(), status=self._status())
            elif self.show and time.monotonic() - self._last_line >= _LINE_INTERVAL:
                self._last_line = time.monotonic()
                self._print_line("progress", self._status() + self._remaining())

    def finish_split(self, number: int, record: dict[str, Any] | None = None) -> None:
        """Count a finished input split; `record` is given for a split of an earlier run."""
        with self._lock:
            self.counts["splits"] += 1
            if record is not None:
                self._count(record["documents"], record["bytes"], record["tokens"])
                self._earlier_tokens += record["tokens"]
            self._input_bytes += self._plan.splits[number].bytes or 0
            self._text_bytes = self.counts["bytes"]

    def note(self, line: str) -> None:
        """Print a message."""
        if self.show == "json":
            self._print_line("note", line)
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

    def _tokens_per_second(self) -> float:
        return (self.counts["tokens"] - self._earlier_tokens) / self._seconds()

    def _status(self) -> str:
        documents, tokens = self.counts["documents"], self.counts["tokens"]
        return (
            f"{documents:,} documents, {tokens / 1e6:.2f} M tokens, "
            f"{self._tokens_per_second() / 1e6:.2f} M tokens/s"
        )

    def _completed(self) -> float:
        """Return the progress in `unit`; input bytes are estimated from bytes of text."""
        if self.unit != "bytes":
            return self.counts[self.unit]
        has_ratio = self._input_bytes and self._text_bytes
        ratio = self._input_bytes / self._text_bytes if has_ratio else 1.0
        return self.counts["bytes"] * ratio

    def _seconds_left(self) -> float | None:
        done = self._completed()
        if not self.total or not done or not self._tokens_per_second():
            return None
        tokens_left = self.counts["tokens"] * max(self.total / done - 1, 0)
        return tokens_left / self._tokens_per_second()

    def _remaining(self) -> str:
        left = self._seconds_left()
        return "" if left is None else f", about {left:.0f} s left"

    def _print_line(self, event: str, text: str) -> None:
        if self.show != "json":
            print(f"{self.label}: {text}", flush=True)
            return
        document = {"event": event, "source": self.label, **self.counts,
                    "of_splits": len(self._plan.splits), "seconds": round(self._seconds(), 3),
                    "seconds_left": self._seconds_left()}  # fmt: skip
        if event == "note":
            document = {"event": event, "source": self.label, "note": text}
        print(json.dumps(document), flush=True)


def _find_goal(plan: PreparationPlan) -> tuple[str, int | None]:
    """Return the unit of progress and its total, None if unknown."""
    for unit in ("tokens", "documents"):
        if plan.settings[f"max_{unit}"] is not None:
            return unit, plan.settings[f"max_{unit}"]
    if plan.source.expected_documents is not None:
        return "documents", plan.source.expected_documents
    sizes = [split.bytes for split in plan.splits]
    known = [size for size in sizes if size is not None]
    return "bytes", sum(known) if len(known) == len(sizes) else None
