"""Report a run's metrics from rank 0: text lines, ``metrics.jsonl``, and TensorBoard events.

A text line is ``step=12 loss=6.0312 lr=3.00e-04 ...``. `METRIC_PATTERNS` are regular expressions
that read it back, in the form of CloudWatch metric definitions. On a terminal a progress bar stands
below the lines; elsewhere (papermill, CI, CloudWatch) only lines are printed. All outputs are
flushed at every step, so that a running job can be watched.

This module imports no torch: the command line reads the files with it.
"""

import io
import json
import logging
import math
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ..memory import MemoryReport

log = logging.getLogger(__name__)

METRIC_FORMATS = {
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
    "reward_accuracy": ".3f",
    "reward_margin": ".4f",
    "eval_loss": ".4f",
    "eval_reward_accuracy": ".3f",
}
"""Format of each metric in a text line, in this order."""

SPECIAL_METRICS = (
    "loss_scale", "skipped",
    "reward_accuracy", "reward_margin", "eval_reward_accuracy",
)  # fmt: skip
"""Metrics that only runs in float16 or on preferences have."""

METRIC_PATTERNS = {name: rf"(?:^|\s){name}=(\S+)" for name in METRIC_FORMATS}

METRICS_FILE = "metrics.jsonl"
"""In a run folder: one JSON object per reported step."""

ABOUT_FILE = "about.json"
"""In a run folder: its last step, the tokens per step, and the host of every rank."""

EVENTS = "TensorBoard's event file"
"""Name of the events in messages."""

MEMORY_FILE = "memory.json"
"""In a run folder: the memory of a step in bytes, by part."""

INTRODUCTION_PATTERN = r"(\d+) steps of ([\d,]+) tokens"
"""Pattern that reads back the line printed by `Reporter.introduce`."""

LEARNING_METRICS = (
    "loss", "eval_loss", "lr", "grad_norm", "reward_accuracy", "reward_margin",
    "eval_reward_accuracy",
)  # fmt: skip
TENSORBOARD_TAGS = {
    name: f"{'learning' if name in LEARNING_METRICS else 'machine'}/{name}"
    for name in METRIC_FORMATS
    if name != "step"
}
"""TensorBoard tags in two groups: TensorBoard expands the first two and collapses all others."""


def format_line(metrics: dict[str, Any]) -> str:
    """Format ``metrics`` as one line of key=value pairs, in the order of `METRIC_FORMATS`."""
    return " ".join(
        f"{name}={metrics[name]:{spec}}" for name, spec in METRIC_FORMATS.items() if name in metrics
    )


class Degradable:
    """Outputs that may fail without ending the run, e.g. on a full disk.

    The first failure of an output is logged as a warning. Later ones are counted.
    """

    def __init__(self):
        self.failures: dict[str, int] = {}
        """Number of failures by output."""

    @contextmanager
    def output(self, name: str) -> Iterator[None]:
        """Run the block; log an error of the file system as a warning instead of raising it."""
        try:
            yield
        except (OSError, ValueError) as error:  # ValueError: an output that is closed
            self.failures[name] = self.failures.get(name, 0) + 1
            if self.failures[name] == 1:
                with suppress(OSError, ValueError):
                    log.warning(
                        "%s cannot be written (%s). The run goes on without it: free space in "
                        "run.folder, or set another run.folder for the next run",
                        name,
                        error,
                    )


class MetricSink(Protocol):
    """Receiver of logged metrics. Errors are OSError."""

    def write(self, metrics: dict[str, Any]) -> None:
        """Receive the metrics of one step."""

    def close(self) -> None:
        """End the run."""


class Reporter(Degradable):
    """Write the metrics of a run on rank 0. On other ranks (``active=False``) nothing happens.

    A resumed run keeps the metrics of the steps up to ``first_step`` and discards later ones. An
    output that cannot be written does not end the run.
    """

    def __init__(
        self,
        folder: str | Path,
        steps: int,
        *,
        active: bool,
        tensorboard: bool,
        first_step: int = 0,
    ):
        """
        Args:
            folder: Run folder, created if needed.
            steps: Number of optimizer steps of the whole run, for the progress bar.
            active: True on rank 0.
            tensorboard: Write TensorBoard events where tensorboard is installed.
            first_step: Last step that is done already.
        """
        super().__init__()
        self._jsonl = self._events = self._bar = None
        self._sinks: dict[str, MetricSink] = {}
        self.active = active
        if not active:
            return
        self.folder: Path = Path(folder)
        with self.output("run.folder"):
            self.folder.mkdir(parents=True, exist_ok=True)
        self._open_outputs(first_step, tensorboard)
        if sys.stdout.isatty():
            self._bar = _ProgressBar(steps, first_step)

    def rewind(self, step: int) -> None:
        """Discard the metrics after ``step``: the run repeats the steps after it."""
        if not self.active:
            return
        with self.output(METRICS_FILE):
            if self._jsonl is not None:
                self._jsonl.close()
        tensorboard = self._events is not None
        with self.output(EVENTS):
            if self._events is not None:
                self._events.close()
        self._jsonl = self._events = None
        self._open_outputs(step, tensorboard)

    def log_if_missing(self, metrics: dict[str, Any]) -> None:
        """Write the metrics of the last step, unless ``metrics.jsonl`` has them; {}: of no step."""
        if not self.active or not metrics:
            return
        rows = (self.folder / METRICS_FILE).read_text(encoding="utf-8").splitlines()
        if not rows or json.loads(rows[-1])["step"] < metrics["step"]:
            self.log_step(metrics)

    def _open_outputs(self, first_step: int, tensorboard: bool) -> None:
        """Open the files of metrics, which then hold the steps up to ``first_step`` only."""
        with self.output(METRICS_FILE):
            _discard_later_rows(self.folder / METRICS_FILE, first_step)
        with self.output(METRICS_FILE):
            self._jsonl = open(self.folder / METRICS_FILE, "ab", buffering=0)
        if tensorboard:
            with self.output(EVENTS):
                self._events = _open_events(self.folder / "tensorboard", first_step)

    def introduce(self, last_step: int, tokens_per_step: int, hosts: list[str]) -> None:
        """Print the extent of the run and write it to ``about.json``.

        Args:
            last_step: Last step of this run.
            tokens_per_step: Tokens of one optimizer step.
            hosts: Host of every rank.
        """
        if not self.active:
            return
        where = hosts[0] if len(set(hosts)) == 1 else f"{len(set(hosts))} hosts"
        self.print(
            f"{last_step} steps of {tokens_per_step:,} tokens by {len(hosts)} ranks on {where}"
        )
        about = {"steps": last_step, "tokens_per_step": tokens_per_step, "hosts": hosts}
        self.write_file(ABOUT_FILE, json.dumps(about))

    def write_file(self, name: str, text: str) -> None:
        """Write a file of the run folder."""
        if self.active:
            with self.output(name):
                (self.folder / name).write_text(text, encoding="utf-8")

    def log_step(self, metrics: dict[str, Any]) -> None:
        """Write the metrics of one step. Names without a format appear in the JSON lines only."""
        if not self.active:
            return
        self.print(format_line(metrics))
        row = {"step": 0, "time": round(time.time(), 3)} | _replace_non_finite(metrics)
        if self._jsonl:
            with self.output(METRICS_FILE):
                _append(self._jsonl, f"{json.dumps(row)}\n".encode())
        if self._events:
            with self.output(EVENTS):
                self._events.write(metrics)
        for name, sink in self._sinks.items():
            with self.output(name):
                sink.write(metrics)
        if self._bar:
            self._bar.update(metrics["step"], metrics.get("loss"))

    def add_sink(self, name: str, sink: MetricSink) -> None:
        """Send the metrics of every logged step to ``sink``, too; ``name`` is for messages."""
        self._sinks[name] = sink

    def log_memory(self, report: "MemoryReport") -> None:
        """Print the memory of a step by category and write it to ``memory.json``."""
        if not self.active:
            return
        self.print(str(report))
        self.write_file(MEMORY_FILE, json.dumps(report.as_dict(), indent=1))

    def print(self, text: str) -> None:
        """Print a line, above the progress bar if there is one."""
        if not self.active:
            return
        with self.output("the standard output"):
            if self._bar:
                self._bar.print(text)
            else:
                print(text, flush=True)

    def close(self) -> None:
        """Close all files and the progress bar."""
        for sink in (self._bar, self._jsonl, self._events):
            if sink:
                with self.output("run.folder"):
                    sink.close()
        for name, sink in self._sinks.items():
            with self.output(name):
                sink.close()


def _append(file: FileIO, data: bytes) -> None:
    """Append ``data`` as a whole: an incomplete part, e.g. on a full disk, is removed again."""
    end, written = file.seek(0, os.SEEK_END), 0
    try:
        while written < len(data):
            written += file.write(data[written:])
    except OSError:
        file.truncate(end)
        raise


def _discard_later_rows(path: Path, first_step: int) -> None:
    """Keep the rows of ``path`` up to ``first_step``; the run repeats later steps."""
    if not first_step or not path.exists():
        path.write_text("")
        return
    kept = [
        row for row in path.read_text(encoding="utf-8").splitlines() if _is_up_to(row, first_step)
    ]
    partial = path.with_suffix(".partial")
    partial.write_text("".join(f"{row}\n" for row in kept), encoding="utf-8")
    os.replace(partial, path)


def _is_up_to(row: str, last: int) -> bool:
    try:
        return json.loads(row)["step"] <= last
    except (ValueError, KeyError, TypeError):  # an incomplete line of a killed run
        return False


def _replace_non_finite(metrics: dict[str, Any]) -> dict[str, Any]:
    """Replace numbers that are not finite by None: JSON has no NaN."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in metrics.items()
    }


class _ProgressBar:
    """A progress bar below the printed lines."""

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

    def update(self, step: int, loss: float | None) -> None:
        text = "-" if loss is None else f"{loss:.3f}"
        self.progress.update(self.task, completed=step, loss=text)

    def print(self, text: str) -> None:
        self.progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self.progress.stop()


def _open_events(folder: Path, first_step: int) -> "_TensorBoardEvents | None":
    """Open TensorBoard events from ``first_step`` on, or return None without tensorboard."""
    try:
        return _TensorBoardEvents(folder, first_step)
    except ImportError:
        log.warning(
            "run.tensorboard = true: tensorboard is not installed, so no events are written; "
            'pip install "nearlinear[monitor]", or set run.tensorboard = false'
        )
        return None


class _TensorBoardEvents:
    """A TensorBoard event file, in tensorboard's own record format.

    Tensorboard's `EventFileWriter` is not used: its thread does not survive a full disk. A restart
    event makes TensorBoard discard earlier events of steps after ``first_step``.
    """

    def __init__(self, folder: Path, first_step: int):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._events: Any = event_pb2  # generated modules: their classes are made at run time
        self._summaries: Any = summary_pb2
        self._record_writer = RecordWriter
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = open(folder / f"{name}.{time.monotonic_ns()}", "ab", buffering=0)
        self._add(file_version="brain.Event:2")
        session = self._events.SessionLog
        restart = session(status=session.START)
        self._add(step=first_step + 1, session_log=restart)

    def write(self, metrics: dict[str, Any]) -> None:
        """Write the metrics of one step."""
        values = [
            self._summaries.Summary.Value(tag=tag, simple_value=metrics[name])
            for name, tag in TENSORBOARD_TAGS.items()
            if name in metrics
        ]
        self._add(step=metrics["step"], summary=self._summaries.Summary(value=values))

    def close(self) -> None:
        self._file.close()

    def _add(self, **fields: Any) -> None:
        event, record = self._events.Event(wall_time=time.time(), **fields), io.BytesIO()
        self._record_writer(record).write(event.SerializeToString())
        _append(self._file, record.getvalue())
