"""Rank 0's account of a run, in three sinks: a line, ``metrics.jsonl``, and TensorBoard events.

The line is ``step=12 loss=6.0312 lr=3.00e-04 ...``; `METRIC_PATTERNS` are the regular expressions
that read it back, in the form CloudWatch metric definitions take. On a terminal a progress bar
stands below the lines; elsewhere (papermill, CI, CloudWatch) there are lines only. All three are
written through at once, for those who watch.
"""

import json
import logging
import math
import os
import sys
import time
from pathlib import Path

log = logging.getLogger(__name__)

FORMATS = {
    "step": "d",
    "loss": ".4f",
    "lr": ".2e",
    "grad_norm": ".3f",
    "tokens_per_s": ".0f",
    "tflops_per_gpu": ".4g",
    "mfu": ".3f",
    "mem_gib": ".2f",
    "loss_scale": ".4g",
    "skipped": ".0f",
    "eval_loss": ".4f",
}
"""How each metric is written in the line, in this order."""

METRIC_PATTERNS = {name: rf"(?:^|\s){name}=(\S+)" for name in FORMATS}

METRICS = "metrics.jsonl"
ABOUT = "about.json"
"""In a run's folder: its last step, tokens of a step, and the host of every rank."""

MEMORY = "memory.json"
"""In a run's folder: the bytes of a step, by part, and what knobs would save."""

INTRODUCTION = r"(\d+) steps of ([\d,]+) tokens"
"""How the line that `Reporter.begin` says is read back."""


def line(metrics: dict) -> str:
    """``metrics`` as one line of key=value, in the order of `FORMATS`."""
    return " ".join(
        f"{name}={metrics[name]:{form}}" for name, form in FORMATS.items() if name in metrics
    )


class Reporter:
    """The sinks of rank 0; on other ranks (``active=False``) every call does nothing.

    A run that goes on after ``first_step`` keeps what was reported up to it, and no more.
    """

    def __init__(self, folder, steps: int, *, active: bool, tensorboard: bool, first_step: int = 0):
        self._jsonl = self._events = self._bar = None
        self.active = active
        if not active:
            return
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        _cut(self.folder / METRICS, first_step)
        self._jsonl = open(self.folder / METRICS, "a", encoding="utf-8")
        if tensorboard:
            self._events = _events(self.folder / "tensorboard", first_step)
        if sys.stdout.isatty():
            self._bar = _Bar(steps, first_step)

    def begin(self, last_step: int, tokens: int, hosts: list[str]) -> None:
        """Say how much there is to do, and where: ``tokens`` a step, the host of every rank."""
        if not self.active:
            return
        places = hosts[0] if len(set(hosts)) == 1 else f"{len(set(hosts))} hosts"
        self.say(f"{last_step} steps of {tokens:,} tokens by {len(hosts)} ranks on {places}")
        about = {"steps": last_step, "tokens_per_step": tokens, "hosts": hosts}
        (self.folder / ABOUT).write_text(json.dumps(about), encoding="utf-8")

    def step(self, metrics: dict) -> None:
        """Record one step's metrics: ``step`` and any of `FORMATS`, and more for the JSON lines."""
        if not self.active:
            return
        self.say(line(metrics))
        row = {"step": 0, "time": round(time.time(), 3)} | _json_numbers(metrics)
        self._jsonl.write(json.dumps(row) + "\n")
        self._jsonl.flush()
        if self._events:
            self._events.step(metrics)
        if self._bar:
            self._bar.move(metrics["step"], metrics.get("loss"))

    def memory(self, report) -> None:
        """Say where the memory of a step went, a `nearlinear.memory.report.Report`, and keep it."""
        if not self.active:
            return
        self.say(str(report))
        text = json.dumps(report.as_dict(), indent=1)
        (self.folder / MEMORY).write_text(text, encoding="utf-8")

    def say(self, text: str) -> None:
        """Show a line on the terminal or the log."""
        if self._bar:
            self._bar.say(text)
        elif self.active:
            print(text, flush=True)

    def close(self) -> None:
        for sink in (self._bar, self._jsonl, self._events):
            if sink:
                sink.close()


def _cut(path: Path, first_step: int) -> None:
    """Keep what ``path`` says of steps up to ``first_step``: later ones are taken again."""
    if not first_step or not path.exists():
        path.write_text("")
        return
    kept = [
        row for row in path.read_text(encoding="utf-8").splitlines() if _within(row, first_step)
    ]
    partial = path.with_suffix(".partial")
    partial.write_text("".join(f"{row}\n" for row in kept), encoding="utf-8")
    os.replace(partial, path)


def _within(row: str, last: int) -> bool:
    try:
        return json.loads(row)["step"] <= last
    except (ValueError, KeyError, TypeError):  # half a line, of a run that was killed
        return False


def _json_numbers(metrics: dict) -> dict:
    """``metrics`` with null where a number is not finite: JSON has no NaN."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in metrics.items()
    }


class _Bar:
    """A progress bar below the lines, on a terminal."""

    def __init__(self, steps: int, done: int):
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self.progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TimeRemainingColumn(),
        )
        self.task = self.progress.add_task("training", total=steps, completed=done, loss="-")
        self.progress.start()

    def move(self, step: int, loss: float | None) -> None:
        text = "-" if loss is None else f"{loss:.3f}"
        self.progress.update(self.task, completed=step, loss=text)

    def say(self, text: str) -> None:
        self.progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self.progress.stop()


def _events(folder: Path, first_step: int):
    """TensorBoard's events from ``first_step`` on, where it is installed."""
    try:
        from .events import Events
    except ImportError:
        log.warning('no TensorBoard events: pip install "nearlinear[monitor]" to have them')
        return None
    return Events(folder, first_step)
