"""Decide when a run is saved, resume it from its newest checkpoint, and react to SIGTERM."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

import torch
from torch import nn

from .. import storage
from ..checkpoint import save
from ..checkpoint.async_writer import PendingSave
from ..checkpoint.resume import resume
from ..config.train import CheckpointConfig
from ..storage import StoragePath


class CheckpointManager:
    """Write the checkpoints of one run to the folder of its config, and resume from them."""

    def __init__(
        self,
        config: CheckpointConfig,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        **others: Any,
    ):
        """
        Args:
            config: The table [checkpoint], with a folder.
            model: The sharded model.
            optimizer: Its optimizer.
            others: Further objects with ``state_dict`` and ``load_state_dict``, by name.
        """
        self.config: CheckpointConfig = config
        self.model: nn.Module = model
        self.optimizer: torch.optim.Optimizer = optimizer
        self.others: dict[str, Any] = others
        self.folder: StoragePath = storage.as_path(config.folder)
        self.saved = 0
        """Step of the newest checkpoint, which may still be in progress; 0: there is none."""
        self.saving: PendingSave | None = None
        self.interval_elapsed: bool = False
        """`clock_elapsed` of any rank, as agreed in the newest step."""
        self._since = time.monotonic()

    def resume(self) -> int:
        """Load the newest intact checkpoint and return its step, or 0. A collective call."""
        if self.config.resume:
            self.saved = resume(
                self.folder, self.model, self.optimizer, self.others, self.config.on_damage
            )
        return self.saved

    def is_due(self, step: int, last: int) -> bool:
        """Return True if the run should be saved after ``step`` of ``last``."""
        if step == self.saved:
            return False
        by_steps = self.config.every > 0 and step % self.config.every == 0
        return step == last or by_steps or self.interval_elapsed

    def flags(self) -> tuple[bool, bool]:
        """Return `failed` and `clock_elapsed` of this rank."""
        return self.failed, self.clock_elapsed

    @property
    def failed(self) -> bool:
        """True if the newest checkpoint has failed."""
        return self.saving is not None and self.saving.done and bool(self.saving.error)

    @property
    def clock_elapsed(self) -> bool:
        """True if ``every_minutes`` have elapsed on this rank's clock."""
        minutes = self.config.every_minutes
        return minutes > 0 and time.monotonic() - self._since >= 60 * minutes

    def save(self, step: int) -> None:
        """Start to save the run after ``step``, unless it is saved. A collective call."""
        if step != self.saved:
            self.saving = save.save_and_prune(
                self.folder,
                self.config.keep,
                step,
                self.model,
                self.optimizer,
                overlap=True,  # only the steps of the trainer change the state
                **self.others,
            )
            self.saved: int = step
        self.interval_elapsed, self._since = False, time.monotonic()
        if not self.config.asynchronous:
            self.finish()

    def finish(self) -> storage.StoragePath | None:
        """Wait for the newest checkpoint and return its folder, or None if there is none.

        Raises CheckpointError on all ranks if it failed.
        """
        if self.saving is not None:
            self.saving.wait()
        return save.step_folder(self.folder, self.saved) if self.saved else None

    def abandon(self, error: BaseException) -> None:
        """Stop waiting for other ranks soon, because this rank has failed with ``error``."""
        if self.saving is not None:
            self.saving.abandon(error)


class StopSignal:
    """Turn SIGTERM into a flag, so that a run can finish its step and save itself.

    A reclaimed spot instance, ``nearlinear stop``, Slurm's time limit and Kubernetes' evictions all
    send SIGTERM and leave some time to act on it.
    """

    def __init__(self):
        self.received = False
        self._previous = None

    def install(self) -> None:
        """Start to catch SIGTERM. Ranks that are threads leave it to their process."""
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._receive)

    def uninstall(self) -> None:
        """Restore the previous handler."""
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received: bool = True
