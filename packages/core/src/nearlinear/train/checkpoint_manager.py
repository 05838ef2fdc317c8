"""Decide when a run is saved, resume it from its newest checkpoint, and react to signals."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

import torch
from torch import nn

from .. import storage
from ..checkpoint import save
from ..checkpoint.async_writer import PendingSave
from ..checkpoint.hf.writer import TOKENIZER_FOLDER, tokenizer_files
from ..checkpoint.load import load
from ..checkpoint.resume import resume
from ..config.train import CheckpointConfig, TrainConfig
from ..distributed.consensus import raise_on_all_ranks
from ..errors import CheckpointError
from ..storage import StoragePath

CAUGHT_SIGNALS = (signal.SIGTERM, signal.SIGINT)
REPEATED_INTERRUPT = 0.5
"""Seconds within which several SIGINTs are one Ctrl-C: torchrun repeats the terminal's."""
STOPPING = "stopping: the run finishes this step and saves it; Ctrl-C again stops at once"


class CheckpointManager:
    """Write the checkpoints of one run to the folder of its config, and resume from them."""

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        **others: Any,
    ):
        """
        Args:
            config: The config of a run with checkpoints.
            model: The sharded model.
            optimizer: Its optimizer.
            others: Further objects with ``state_dict`` and ``load_state_dict``, by name.
        """
        self.config: CheckpointConfig = config.checkpoint
        self.model: nn.Module = model
        self.optimizer: torch.optim.Optimizer = optimizer
        self.others: dict[str, Any] = others
        self.folder: StoragePath = storage.as_path(config.checkpoint_folder)
        self.saved = 0
        """Step of the newest checkpoint, which may still be in progress; 0: there is none."""
        self.saving: PendingSave | None = None
        self.interval_elapsed: bool = False
        """`clock_elapsed` of any rank, as agreed in the newest step."""
        self._since = time.monotonic()

    def resume(self) -> int:
        """Load the newest intact checkpoint and return its step, or 0. A collective call.

        Raises CheckpointError if ``checkpoint.resume`` is off and there are checkpoints.
        """
        if self.config.resume:
            self.saved = resume(
                self.folder, self.model, self.optimizer, self.others, self.config.on_damage
            )
            return self.saved
        with raise_on_all_ranks():
            if steps := save.indexed_steps(self.folder):
                raise CheckpointError(
                    f"checkpoint.resume = false, and {self.folder} holds the checkpoint of step "
                    f"{steps[-1]} of an earlier run, which would be taken for the newest of this "
                    "run: set another run.folder or checkpoint.folder, or delete the folder"
                )
        return 0

    def write_tokenizer(self, folder: StoragePath) -> None:
        """Copy the tokenizer in ``folder`` beside the checkpoints, where an export finds it."""
        target = self.folder / TOKENIZER_FOLDER
        if files := tokenizer_files(folder):
            target.mkdir()
        for name, data in files.items():
            (target / name).put(data)

    def reload(self) -> int:
        """Load the newest checkpoint of this run again and return its step. A collective call."""
        return load(
            save.step_folder(self.folder, self.saved), self.model, self.optimizer, **self.others
        )

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
    """Turn SIGTERM and the first Ctrl-C into a flag: the run finishes its step and saves itself.

    A reclaimed spot instance, ``nearlinear stop``, Slurm's time limit and Kubernetes' evictions all
    send SIGTERM and leave some time to act on it. A second Ctrl-C ends the process at once, also
    while its main thread waits in a collective.
    """

    def __init__(self):
        self.number: int = 0
        """The first signal, or 0."""
        self._previous: dict[int, Any] = {}
        self._interrupted_at: float = math.inf
        self._pipe: tuple[int, int] | None = None
        self._previous_wakeup = -1

    def install(self) -> None:
        """Start to catch the signals. Ranks that are threads leave them to their process.

        SIGINT is caught also where a shell has started the process with SIGINT ignored.
        """
        if threading.current_thread() is not threading.main_thread() or self._pipe:
            return
        self._previous = {n: signal.signal(n, self._receive) for n in CAUGHT_SIGNALS}
        self._pipe = read, write = os.pipe()
        os.set_blocking(write, False)
        # written by the C handler: a Python handler waits for the main thread
        self._previous_wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        arguments = (read,)
        threading.Thread(target=self._listen, args=arguments, name="signals", daemon=True).start()

    def uninstall(self) -> None:
        """Restore the previous handlers."""
        if self._pipe is None:
            return
        signal.set_wakeup_fd(self._previous_wakeup)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.close(self._pipe[1])  # ends the thread
        self._pipe = None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number

    def _listen(self, pipe: int) -> None:
        """Count interrupts on a thread of its own."""
        with os.fdopen(pipe, "rb", buffering=0) as signals:
            while numbers := signals.read(1):
                if numbers[0] in CAUGHT_SIGNALS:
                    self.number = self.number or numbers[0]
                if numbers[0] == signal.SIGINT:
                    self._interrupt()

    def _interrupt(self) -> None:
        now = time.monotonic()
        if self._interrupted_at == math.inf:
            self._interrupted_at = now
            print(STOPPING, file=sys.stderr, flush=True)
        elif now - self._interrupted_at > REPEATED_INTERRUPT:
            os._exit(128 + signal.SIGINT)
