"""When a run saves itself, and from where it goes on."""

from __future__ import annotations

import time

from .. import storage
from ..checkpoint import index, kept
from ..checkpoint.agree import together
from ..checkpoint.load import load
from ..checkpoint.saving import Saving
from .tables import CheckpointConfig


class Keeper:
    """The checkpoints of one run. Without a folder in the config it does nothing."""

    def __init__(self, config: CheckpointConfig, model, optimizer, **others):
        self.config, self.model, self.optimizer, self.others = config, model, optimizer, others
        self.folder = storage.at(config.folder) if config.folder else None
        self.saved = 0
        """the step of the newest checkpoint, which may be on its way; 0: there is none"""
        self.saving: Saving | None = None
        self.time_is_up = False
        """what ranks have agreed on of `waited_long`"""
        self._since = time.monotonic()

    def resume(self) -> int:
        """Go on from the newest checkpoint; the steps that are done. A collective call."""
        newest = kept.latest(self.folder) if self.folder and self.config.resume else None
        if newest is not None:
            known = {}
            with together():
                known = index.read(newest).values  # an older version may have saved less
            there = {name: part for name, part in self.others.items() if name in known}
            self.saved = load(newest, self.model, self.optimizer, **there)
        return self.saved

    def due(self, step: int, last: int) -> bool:
        """Whether the run should be saved after ``step`` of ``last``."""
        if self.folder is None or step == self.saved:
            return False
        by_steps = self.config.every > 0 and step % self.config.every == 0
        return step == last or by_steps or self.time_is_up

    @property
    def waited_long(self) -> bool:
        """Whether ``every_minutes`` are over, by this rank's clock."""
        minutes = self.config.every_minutes
        return minutes > 0 and time.monotonic() - self._since >= 60 * minutes

    def save(self, step: int) -> None:
        """Begin to save the run after ``step``, unless it is saved. A collective call."""
        if step != self.saved:
            self.saving = kept.keep(
                self.folder,
                self.config.keep,
                step,
                self.model,
                self.optimizer,
                overlap=True,  # a trainer's steps are all that changes its state
                **self.others,
            )
            self.saved = step
        self.time_is_up, self._since = False, time.monotonic()
        if not self.config.asynchronous:
            self.finish()

    @property
    def failed(self) -> bool:
        """Whether the checkpoint that was begun last will not be there."""
        return self.saving is not None and self.saving.done and bool(self.saving.error)

    def finish(self) -> storage.Place | None:
        """Where the newest checkpoint is, once it is there. Raises CheckpointError on all ranks."""
        if self.saving is not None:
            self.saving.wait()
        return kept.folder_of(self.folder, self.saved) if self.saved else None

    def abandon(self, why: BaseException) -> None:
        """Do not wait long for other ranks: this one has met with an error."""
        if self.saving is not None:
            self.saving.abandon(why)
