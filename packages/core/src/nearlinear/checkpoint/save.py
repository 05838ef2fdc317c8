"""Write a checkpoint: every block of every tensor once, whoever holds it, and then the index."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from ..errors import CheckpointError
from . import about, index, saving
from .plan import plan, values_of
from .saving import Saving

RESERVED = {about.KEY, "optimizer", "loss_scaler"}


def save(
    folder,
    model,
    optimizer=None,
    loader=None,
    scheduler=None,
    *,
    step: int = 0,
    wait: bool = False,
    **others,
) -> Saving:
    """Write all that training needs to go on after ``step`` into ``folder``.

    Returns once the state is copied to host memory; the files are written while training goes on,
    and ``.wait()`` on what is returned is when they are there. The next save, `load` and leaving
    the job wait for it. It is a checkpoint from the moment its index is there; a save that fails,
    on whatever rank, leaves none and raises CheckpointError on all, from whatever waits for it.
    ``wait``: return when it is there. ``others``: what else has a ``state_dict()`` that JSON can
    carry, the same on all ranks, each saved under its name. ``folder`` must be one that all nodes
    see, or parts that something brings together. A collective call, between steps.
    """
    others |= {"loader": loader, "scheduler": scheduler}
    started = begin(Path(folder), step, model, optimizer, others)
    if wait:
        started.wait()
    return started


def begin(
    folder: Path, step: int, model, optimizer, others: dict, after: Callable = lambda: None
) -> Saving:
    """`save`, with ``after()`` on the first rank of every node once the checkpoint is there."""
    saving.finish()  # the one before
    if taken := others.keys() & RESERVED:
        raise CheckpointError(f"{min(taken)} is a name of the checkpoint's own: choose another")
    values = values_of(model, others)
    return plan(model, optimizer).start(folder, step, values, after)


def remove(folder: Path) -> None:
    """Delete a checkpoint: its index first, so that nothing half deleted looks whole."""
    (folder / index.NAME).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
