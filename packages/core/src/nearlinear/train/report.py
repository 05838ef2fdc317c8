"""Rank 0's account of a run, in three sinks: a line, ``metrics.jsonl``, and TensorBoard events.

The line is ``step=12 loss=6.0312 lr=3.00e-04 ...``; `METRIC_PATTERNS` are the regular expressions
that read it back, in the form CloudWatch metric definitions take. On a terminal a progress bar
stands below the lines; elsewhere (papermill, CI, CloudWatch) there are lines only.
"""

import json
import logging
import math
import sys
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
    "eval_loss": ".4f",
}
"""How each metric is written in the line, in this order."""

METRIC_PATTERNS = {name: rf"(?:^|\s){name}=(\S+)" for name in FORMATS}


def line(metrics: dict) -> str:
    """``metrics`` as one line of key=value, in the order of `FORMATS`."""
    return " ".join(
        f"{name}={metrics[name]:{form}}" for name, form in FORMATS.items() if name in metrics
    )


class Reporter:
    """The sinks of rank 0; on other ranks (``active=False``) every call does nothing."""

    def __init__(self, folder, steps: int, *, active: bool, tensorboard: bool, first_step: int = 0):
        self._jsonl = self._events = self._bar = None
        self.active = active
        if not active:
            return
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._jsonl = open(folder / "metrics.jsonl", "a" if first_step else "w", encoding="utf-8")
        if tensorboard:
            self._events = _event_writer(folder / "tensorboard", first_step)
        if sys.stdout.isatty():
            self._bar = _Bar(steps, first_step)

    def step(self, metrics: dict) -> None:
        """Record one step's metrics: ``step`` and any of `FORMATS`, and more for the JSON lines."""
        if not self.active:
            return
        self.say(line(metrics))
        self._jsonl.write(json.dumps(_json_numbers(metrics)) + "\n")
        self._jsonl.flush()
        if self._events:
            for name in FORMATS:
                if name in metrics and name != "step":
                    self._events.add_scalar(name, metrics[name], metrics["step"])
        if self._bar:
            self._bar.move(metrics["step"], metrics.get("loss"))

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


def _event_writer(folder: Path, first_step: int):
    """Events after ``first_step``; those of an earlier run in the same folder are superseded."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        log.warning('no TensorBoard events: pip install "nearlinear[monitor]" to have them')
        return None
    return SummaryWriter(str(folder), purge_step=first_step)
