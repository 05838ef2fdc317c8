"""Write a checkpoint: every shard of every tensor once, and then the index."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .. import storage
from ..errors import CheckpointError
from ..storage import StoragePath
from . import async_writer, index, metadata
from .async_writer import PendingSave
from .save_plan import collect_values, make_save_plan

RESERVED = {metadata.KEY, "optimizer", "loss_scaler"}


def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    loader: Any = None,
    scheduler: Any = None,
    *,
    step: int = 0,
    wait: bool = False,
    overlap: bool = False,
    **others: Any,
) -> PendingSave:
    """Write the state needed to resume training after ``step`` into ``folder``.

    Returns once the state is copied to host memory. Files are written while training continues;
    call ``.wait()`` on the result to block until the checkpoint is complete. The next save, `load`,
    and leaving the job wait for it as well. The folder becomes a checkpoint when its index is
    written. A save that fails on any rank leaves no checkpoint, and raises CheckpointError on all
    ranks from the first call that waits for it.

    A collective call, between steps.

    Args:
        folder: A folder shared by all nodes, a local folder per node that is collected later, or
            an address as in ``s3://bucket/prefix``.
        model: The model, of any layout.
        optimizer: The optimizer of the model's parameters.
        loader: Data loader with a ``state_dict()``.
        scheduler: Learning-rate scheduler with a ``state_dict()``.
        step: Step number stored in the index.
        wait: Return only when the checkpoint is complete.
        overlap: Continue the copy during the next forward and backward pass; ``optimizer.step()``
            waits for it. Only valid if nothing else changes parameters or optimizer state.
        others: Objects with a JSON-serializable ``state_dict()``, equal on all ranks, each saved
            under its name.
    """
    others |= {"loader": loader, "scheduler": scheduler}
    started = start_save(storage.as_path(folder), step, model, optimizer, others, overlap=overlap)
    if wait:
        started.wait()
    return started


def start_save(
    folder: StoragePath,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    others: dict,
    on_complete: Callable[[], None] = lambda: None,
    overlap: bool = False,
) -> PendingSave:
    """Start `save`; call ``on_complete`` on the first rank of every node once it is complete."""
    async_writer.finish()
    if taken := others.keys() & RESERVED:
        raise CheckpointError(
            f"{min(taken)} = ... is a name that checkpoints use themselves ("
            f"{', '.join(sorted(RESERVED))}): pass this object under another name"
        )
    values = collect_values(model, others)
    plan = make_save_plan(model, optimizer)
    return plan.start(folder, step, values, on_complete, changed_by=optimizer if overlap else None)


def delete_checkpoint(folder: StoragePath) -> None:
    """Delete a checkpoint, its index first: a partly deleted folder never looks complete."""
    (folder / index.NAME).remove()
    folder.rmtree()
