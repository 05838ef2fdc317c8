"""Write a checkpoint: every block of every tensor once, whoever holds it, and then the index."""

from __future__ import annotations

from collections.abc import Callable

from .. import storage
from ..errors import CheckpointError
from ..storage import Place
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
    overlap: bool = False,
    **others,
) -> Saving:
    """Write all that training needs to go on after ``step`` into ``folder``.

    Returns once the state is copied to host memory; the files are written while training goes on,
    and ``.wait()`` on what is returned is when they are there. The next save, `load` and leaving
    the job wait for it. It is a checkpoint from the moment its index is there; a save that fails,
    on whatever rank, leaves none and raises CheckpointError on all, from whatever waits for it.

    ``wait``: return when it is there. ``overlap``: the copy goes on beside the next forward and
    backward pass, too, and ``optimizer.step()`` waits for it: for loops in which nothing else
    changes parameters or the optimizer's state. ``others``: what else has a ``state_dict()`` that
    JSON can carry, the same on all ranks, each saved under its name. ``folder`` must be one that
    all nodes see, or parts that something brings together, or ``s3://bucket/prefix``. A collective
    call, between steps.
    """
    others |= {"loader": loader, "scheduler": scheduler}
    started = begin(storage.at(folder), step, model, optimizer, others, overlap=overlap)
    if wait:
        started.wait()
    return started


def begin(
    folder: Place,
    step: int,
    model,
    optimizer,
    others: dict,
    after: Callable = lambda: None,
    overlap: bool = False,
) -> Saving:
    """`save`, with ``after()`` on the first rank of every node once the checkpoint is there."""
    saving.finish()  # the one before
    if taken := others.keys() & RESERVED:
        raise CheckpointError(f"{min(taken)} is a name of the checkpoint's own: choose another")
    values = values_of(model, others)
    changed_by = optimizer if overlap else None
    return plan(model, optimizer).start(folder, step, values, after, changed_by=changed_by)


def remove(folder: Place) -> None:
    """Delete a checkpoint: its index first, so that nothing half deleted looks whole."""
    (folder / index.NAME).remove()
    folder.clear()
