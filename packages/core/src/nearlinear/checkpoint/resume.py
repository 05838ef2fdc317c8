"""Resume from the newest intact checkpoint of a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn

from .. import storage
from ..distributed.consensus import all_gather_json, raise_on_all_ranks
from ..errors import CheckpointDamaged
from ..storage import StoragePath
from . import async_writer, index, save
from .load import load

log = logging.getLogger(__name__)

OnDamage = Literal["fallback", "fail"]


def resume(
    folder: StoragePath,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    others: Mapping[str, Any],
    on_damage: OnDamage = "fallback",
) -> int:
    """Load the newest intact checkpoint in ``folder``; return its step, or 0 if there is none.

    A folder without an index is an unfinished save, and no checkpoint. A checkpoint counts as
    damaged on all ranks if it is damaged on one. A collective call.

    Args:
        folder: Folder of a run's ``step-*`` folders.
        model: The sharded model.
        optimizer: The optimizer.
        others: Further objects with ``load_state_dict``, by name. Objects that the checkpoint does
            not contain, because an older version saved it, are left as they are.
        on_damage: Fall back to older checkpoints with a warning, or fail.

    Raises:
        CheckpointDamaged: The newest checkpoint is damaged and ``on_damage`` is "fail", or all
            checkpoints are damaged.
        CheckpointError: A checkpoint cannot be accessed, or belongs to another run.
    """
    async_writer.finish()
    local: list[int] = []
    with raise_on_all_ranks():
        local = save.indexed_steps(storage.as_path(folder))
    damaged: list[tuple[int, str]] = []
    for step in sorted(set().union(*all_gather_json(local)), reverse=True):
        place = save.step_folder(folder, step)
        try:
            loaded = _load_known(place, model, optimizer, others)
        except CheckpointDamaged as error:
            if on_damage == "fail":
                raise CheckpointDamaged(
                    f'{error}; checkpoint.on_damage = "fallback" resumes from the newest intact '
                    "checkpoint instead"
                ) from None
            damaged.append((step, str(error)))
            continue
        if damaged and torch.distributed.get_rank() == 0:
            for bad, reason in damaged:
                log.warning("the checkpoint after step %d is damaged: %s", bad, reason)
            lost = damaged[0][0] - loaded
            steps = "1 step" if lost == 1 else f"{lost} steps"
            log.warning(
                "resuming from the checkpoint after step %d: %s lost, to be trained again",
                loaded, steps,
            )  # fmt: skip
        return loaded
    if damaged:
        raise CheckpointDamaged(
            f"no checkpoint in {folder} is intact (newest: {damaged[0][1]}): restore a copy of "
            "one, or set checkpoint.folder to an empty folder to train from the start"
        )
    return 0


def _load_known(
    place: StoragePath, model: nn.Module, optimizer: torch.optim.Optimizer, others: Mapping
) -> int:
    known: Mapping = {}
    with raise_on_all_ranks():
        known = index.read(place).values
    return load(
        place, model, optimizer, **{name: part for name, part in others.items() if name in known}
    )
