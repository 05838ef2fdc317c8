"""Save the last complete step when a rank fails or hangs while the others wait for it.

Only the optimizer's update changes the model. Between two updates, every rank therefore holds the
state of the last complete step, and a thread can save it whatever the main thread is stuck in. The
ranks agree through the job's store, because a collective would wait for the stuck one. Values that
change within a step (the position in the data, random generators) are copied at the end of each.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ...checkpoint import index, save, state
from ...checkpoint.save import SavePlan, collect_values, make_save_plan
from ...distributed import runtime
from ...distributed.consensus import RankUnreachable, StoreBarrier
from ...distributed.heartbeat import Fault
from ...errors import CheckpointError
from ..checkpoint_manager import CheckpointManager
from . import Callback, TrainStep

ANSWER_TIMEOUT, WRITE_TIMEOUT = 60.0, 300.0
"""Seconds that ranks wait for each other's messages and for each other's files."""


@dataclass(frozen=True)
class StepBoundary:
    """Values at the end of a step that the next step changes before its own end."""

    step: int
    values: dict[str, Any]
    """State of the loader, the loss scaler and the like."""
    groups: list[dict[str, Any]]
    """Settings of the optimizer's parameter groups, without the parameters."""
    random: dict[str, torch.Tensor]
    """States of the random generators."""
    buffers: list[int]
    """Versions of the model's buffers, to detect a forward pass that changed one."""
    computed: torch.cuda.Event | None
    """Event on the accelerator at the end of the step."""


class EmergencyCheckpoint(Callback):
    """Remember the last complete step of a run, and save it when the watchdog reports a fault."""

    def __init__(self, checkpoints: CheckpointManager):
        now = runtime.current()
        self.checkpoints = checkpoints
        self._rank, self._device = now.rank, now.device
        parameters = set(state.parameter_names(checkpoints.model).values())
        parts = state.model_tensors(checkpoints.model).items()
        self._buffers = [part.tensor for name, part in parts if name not in parameters]
        self._first_updates: int | None = None
        self._saves = 0
        self._plan: SavePlan | None = None
        self._optimizer_state: list[torch.Tensor] = []
        self._boundary: StepBoundary | None = None

    def on_step_begin(self, step: TrainStep) -> None:
        """SavePlan the checkpoint after the first update, which creates the optimizer's state.

        A collective call in the step in which the plan is made.
        """
        if self._plan is not None:
            return
        if self._first_updates is None:
            self._first_updates = step.updates
        elif step.updates > self._first_updates:
            self._optimizer_state = self._current_optimizer_state()
            self._plan = make_save_plan(self.checkpoints.model, self.checkpoints.optimizer)

    @contextlib.contextmanager
    def update_context(self, step: TrainStep) -> Iterator[None]:
        """Remember the boundary after the update, still inside of the watchdog's context."""
        yield
        self._remember_boundary(step.number)

    def on_rewind(self, number: int) -> None:
        self._boundary = None  # of a later step

    def _remember_boundary(self, step: int) -> None:
        computed = torch.cuda.Event() if self._device.type == "cuda" else None
        if computed is not None:
            computed.record()
        self._boundary = StepBoundary(
            step,
            collect_values(self.checkpoints.model, self.checkpoints.others),
            [dict(group, params=None) for group in self.checkpoints.optimizer.param_groups],
            {name: p.tensor for name, p in state.random_state(self._rank, self._device).items()},
            [buffer._version for buffer in self._buffers],
            computed,
        )

    def save(self, fault: Fault, consistent: bool) -> str:
        """Save the last complete step together with the other ranks, and return the outcome.

        Called on every rank by a thread of the watchdog. Existing checkpoints are kept.

        Args:
            fault: The fault that ends the run.
            consistent: True if the main thread is not inside of the optimizer's update.
        """
        if fault.kind in ("dead", "exited", "store_lost"):
            return "the state is not saved, because not all ranks are left to save it"
        if self._plan is None or self._boundary is None:
            return "there is no state to save: this run has not finished a step"
        try:
            folder = self._save(self._plan, self._boundary, self._find_obstacle(consistent))
        except (RankUnreachable, CheckpointError) as error:
            reason = "other ranks do not respond" if isinstance(error, RankUnreachable) else error
            return f"the state could not be saved: {reason}"
        return f"the state after step {self._boundary.step} is saved in {folder}"

    def _find_obstacle(self, consistent: bool) -> str:
        """Return the reason why the state of this rank cannot be saved, or ""."""
        if not consistent:
            return f"rank {self._rank} is inside of the optimizer's update"
        now = self._current_optimizer_state()
        if [id(value) for value in now] != [id(value) for value in self._optimizer_state]:
            return f"the optimizer of rank {self._rank} has replaced its state tensors"
        versions = [buffer._version for buffer in self._buffers]
        if self._boundary is not None and self._boundary.buffers != versions:
            return f"buffers of the model have changed on rank {self._rank} within the step"
        return ""

    def _save(self, planned: SavePlan, boundary: StepBoundary, obstacle: str) -> str:
        """Write the checkpoint of ``boundary``. Raises CheckpointError and RankUnreachable."""
        writer, step = planned.writer, boundary.step
        if writer.newest is not None:
            writer.newest.abandon(seconds=WRITE_TIMEOUT)
        with contextlib.suppress(CheckpointError):  # failure of an earlier step, already reported
            writer.finish()
        folder = save.step_folder(self.checkpoints.folder, step)
        end = time.monotonic() + ANSWER_TIMEOUT + WRITE_TIMEOUT  # others may wait for their files

        def keep_waiting(rank: int) -> bool:
            return time.monotonic() < end

        self._saves += 1
        name = f"emergency/{planned.name}/{self._saves}"
        barrier = StoreBarrier(writer.store, name, writer.rank, writer.world)
        # A folder that an earlier process left may be damaged: `resume` did not load it.
        complete = self.checkpoints.saved == step and index.NAME in folder.file_sizes()
        own = [step, obstacle, complete]
        refused, exists = barrier.agree("ready", own, keep_waiting, _decide)
        if refused:
            raise CheckpointError(refused)
        if exists:
            return str(folder)
        with self._on_accelerator(boundary):
            started = planned.start(
                folder,
                step,
                boundary.values | {"optimizer": self._optimizer_settings(planned, boundary)},
                lambda: save.write_latest(self.checkpoints.folder, step),
                boundary.random,
            )
        started.abandon(seconds=WRITE_TIMEOUT)
        return str(started.wait())

    @contextlib.contextmanager
    def _on_accelerator(self, boundary: StepBoundary) -> Iterator[None]:
        """Copy on a stream of its own, past a stuck collective and after the complete step."""
        if boundary.computed is None:
            yield
            return
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream()
            stream.wait_event(boundary.computed)
            with torch.cuda.stream(stream):
                yield

    def _optimizer_settings(self, planned: SavePlan, boundary: StepBoundary) -> dict[str, Any]:
        """Return the optimizer's settings at the boundary: a step changes the learning rate."""
        saved = planned.values["optimizer"]
        groups = zip(saved["groups"], boundary.groups, strict=True)
        return saved | {"groups": [was | now | {"params": was["params"]} for was, now in groups]}

    def _current_optimizer_state(self) -> list[torch.Tensor]:
        states = self.checkpoints.optimizer.state.values()
        return [value for each in states for value in each.values()]


def _decide(answers: list[tuple[int, str, bool]]) -> tuple[str, bool]:
    """Return the reason not to write a checkpoint, or "", and True if it exists already."""
    steps, obstacles, exists = zip(*answers, strict=True)
    refused = next(filter(None, obstacles), "")
    if len(set(steps)) > 1:
        refused = refused or f"ranks have finished different steps: {sorted(set(steps))}"
    return refused, any(exists)
