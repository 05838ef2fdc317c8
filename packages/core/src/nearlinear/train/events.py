"""Scalars for TensorBoard, by its own writer, the one inside of torch's `SummaryWriter`."""

import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from .report import FORMATS

TAGS = {
    name: f"{'learning' if name in ('loss', 'eval_loss', 'lr', 'grad_norm') else 'machine'}/{name}"
    for name in FORMATS
    if name != "step"
}
"""In two groups, for TensorBoard opens the first two and folds up all others."""


class Events:
    """An event file in ``folder``; what earlier ones say of steps after ``first_step`` is void."""

    def __init__(self, folder: Path, first_step: int):
        self._writer = EventFileWriter(str(folder))
        restart = SessionLog(status=SessionLog.START)
        self._add(Event(step=first_step + 1, session_log=restart))

    def step(self, metrics: dict) -> None:
        """The metrics of one step, on disk when this returns."""
        values = [
            Summary.Value(tag=tag, simple_value=metrics[name])
            for name, tag in TAGS.items()
            if name in metrics
        ]
        self._add(Event(step=metrics["step"], summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        self._writer.add_event(event)
