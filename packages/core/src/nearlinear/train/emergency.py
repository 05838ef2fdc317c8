"""A last checkpoint, when one rank has met with a fault and the others can do no more than wait.

The state of a run changes in the optimizer's step alone. So what every rank has in memory, whatever
it is stuck in, is the state after the last whole step, and a thread of each can write it: the ranks
agree through the job's store, for a collective would wait for what is stuck. What moves on within a
step (the place in the data, random generators) is remembered at the end of each.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .. import runtime
from ..checkpoint import index, kept, state
from ..checkpoint.meeting import Deserted, Meeting
from ..checkpoint.plan import Plan, plan, values_of
from ..errors import CheckpointError
from ..watchdog.alarm import Alarm
from .keeper import Keeper

PATIENCE, WRITING = 60.0, 300.0
"""seconds that ranks wait for each other's words, and for each other's files"""


@dataclass(frozen=True)
class Boundary:
    """The end of a step, as far as the next one changes it before its own end."""

    step: int
    values: dict
    """of loader, loss scaler and the like"""
    groups: list[dict]
    """the optimizer's settings, without parameters"""
    random: dict[str, torch.Tensor]
    buffers: list[int]
    """versions of the model's, which a forward pass must not have changed"""
    computed: torch.cuda.Event | None
    """when the accelerator has come to it"""


class Emergency:
    """Knows the last whole step of a run, and how to save it. Without a folder it does nothing."""

    def __init__(self, keeper: Keeper):
        self.keeper = keeper
        self.active = bool(keeper.folder and keeper.config.emergency)
        if not self.active:
            return
        now = runtime.current()
        self._rank, self._device = now.rank, now.device
        parameters = set(state.parameter_names(keeper.model).values())
        parts = state.parts_of(keeper.model).items()
        self._buffers = [part.tensor for name, part in parts if name not in parameters]
        self._updates: int | None = None
        self._times = 0
        self._plan: Plan | None = None
        self._states: list[torch.Tensor] = []
        self._boundary: Boundary | None = None

    def prepare(self, updates: int) -> None:
        """Work out who writes what, once this process has changed the model. A collective call.

        ``updates``: how often a step has; the first of an optimizer makes its state.
        """
        if not self.active or self._plan is not None:
            return
        if self._updates is None:
            self._updates = updates
        elif updates > self._updates:
            self._states = self._states_now()
            self._plan = plan(self.keeper.model, self.keeper.optimizer)

    def note(self, step: int) -> None:
        """``step`` is whole."""
        if not self.active:
            return
        computed = torch.cuda.Event() if self._device.type == "cuda" else None
        if computed is not None:
            computed.record()
        self._boundary = Boundary(
            step,
            values_of(self.keeper.model, self.keeper.others),
            [dict(group, params=None) for group in self.keeper.optimizer.param_groups],
            {name: p.tensor for name, p in state.random_state(self._rank, self._device).items()},
            [buffer._version for buffer in self._buffers],
            computed,
        )

    def save(self, alarm: Alarm, steady: bool) -> str:
        """Save the last whole step, with the other ranks; what came of it, in words.

        Called on every rank by a thread of the watchdog. Checkpoints that there are stay.
        """
        if not self.active:
            return ""
        if alarm.kind in ("silent", "left", "store"):
            return "the state is not saved once more, for not all ranks are there to save it"
        if self._plan is None:
            return "there is no state to save: this run has not finished a step"
        try:
            where = self._save(self._plan, self._why_not(steady))
        except (Deserted, CheckpointError) as error:
            why = "other ranks do not answer" if isinstance(error, Deserted) else error
            return f"the state could not be saved: {why}"
        return f"the state after step {self._boundary.step} is saved in {where}"

    def _why_not(self, steady: bool) -> str:
        """Why this rank's state cannot be saved; empty: it can."""
        me = f"rank {self._rank}"
        if not steady:
            return f"{me} is inside of the optimizer's step"
        now = self._states_now()
        if [id(value) for value in now] != [id(value) for value in self._states]:
            return f"the optimizer of {me} has replaced its state since the first step"
        if self._boundary.buffers != [buffer._version for buffer in self._buffers]:
            return f"buffers of the model have changed on {me} within the step"
        return ""

    def _save(self, planned: Plan, why_not: str) -> str:
        """The checkpoint of the boundary. Raises CheckpointError and Deserted."""
        saves, step = planned.saves, self._boundary.step
        if saves.newest is not None:
            saves.newest.abandon(seconds=WRITING)
        with contextlib.suppress(CheckpointError):  # of an earlier step, and known by now
            saves.finish()
        folder = kept.folder_of(self.keeper.folder, step)
        end = time.monotonic() + PATIENCE + WRITING  # others may wait for their files, too

        def patient(rank: int) -> bool:
            return time.monotonic() < end

        self._times += 1
        name = f"emergency/{planned.name}/{self._times}"
        meeting = Meeting(saves.store, name, saves.rank, saves.world)
        mine = [step, why_not, index.NAME in folder.sizes()]
        refused, there = meeting.agree("ready", mine, patient, _agreed)
        if refused:
            raise CheckpointError(refused)
        if there:
            return str(folder)
        with self._on_accelerator():
            started = planned.start(
                folder,
                step,
                self._boundary.values | {"optimizer": self._settings(planned)},
                lambda: kept.point(self.keeper.folder, step),
                self._boundary.random,
            )
        started.abandon(seconds=WRITING)
        return str(started.wait())

    @contextlib.contextmanager
    def _on_accelerator(self) -> Iterator[None]:
        """Copies go beside a collective that is stuck, and after the step that is whole."""
        if self._boundary.computed is None:
            yield
            return
        with torch.cuda.device(self._device):
            beside = torch.cuda.Stream()
            beside.wait_event(self._boundary.computed)
            with torch.cuda.stream(beside):
                yield

    def _settings(self, planned: Plan) -> dict:
        """Of the optimizer at the boundary: the schedule moves the learning rate in a step."""
        saved = planned.values["optimizer"]
        groups = zip(saved["groups"], self._boundary.groups, strict=True)
        return saved | {"groups": [was | now | {"params": was["params"]} for was, now in groups]}

    def _states_now(self) -> list[torch.Tensor]:
        return [value for each in self.keeper.optimizer.state.values() for value in each.values()]


def _agreed(answers: list[tuple[int, str, bool]]) -> tuple[str, bool]:
    """Why there will be no checkpoint, or empty; and whether it is there already."""
    steps, refusals, there = zip(*answers, strict=True)
    refused = next(filter(None, refusals), "")
    if len(set(steps)) > 1:
        refused = refused or f"ranks have finished different steps, {sorted(set(steps))}"
    return refused, any(there)
