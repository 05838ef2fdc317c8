"""Checkpoints of a run in one folder: find the newest complete one, and delete old ones."""

from __future__ import annotations

import re

from torch import nn

from .. import storage
from ..distributed.consensus import all_gather_json, raise_on_all_ranks
from ..errors import CheckpointError
from ..storage import StoragePath, StorageUnreachable
from . import async_writer, index
from .async_writer import PendingSave
from .save import delete_checkpoint, start_save

LATEST = "latest"
_NAME = re.compile(r"step-(\d+)")


def step_folder(folder, step: int):
    """Return the folder of the checkpoint after ``step``: a path of the type of ``folder``."""
    return folder / f"step-{step:08d}"


def steps(folder) -> list[int]:
    """Return the steps with a complete checkpoint in ``folder``, judged by file names and sizes."""
    folders = _step_folders(storage.as_path(folder))
    return sorted(step for step, place in folders.items() if _is_complete(place))


def _step_folders(folder: StoragePath) -> dict[int, StoragePath]:
    """Return the folder of every step, complete or not."""
    named = {place: _NAME.fullmatch(place.name) for place in folder.subfolders()}
    return {int(match[1]): place for place, match in named.items() if match}


def _is_complete(place: StoragePath) -> bool:
    try:
        return not index.find_missing_file(place, index.read(place))
    except StorageUnreachable:  # unknown: resuming from an older checkpoint would lose steps
        raise
    except CheckpointError:
        return False


def latest(folder) -> StoragePath | None:
    """Return the newest checkpoint that is complete on all ranks, or None. A collective call.

    Raises CheckpointError on all ranks if one of them cannot list the folder.
    """
    async_writer.finish()
    local: list[int] = []
    with raise_on_all_ranks():
        folder = storage.as_path(folder)
        local = steps(folder)
    seen = all_gather_json(local)
    common = set(seen[0]).intersection(*seen[1:])
    return step_folder(folder, max(common)) if common else None


def save_and_prune(
    folder, newest: int, step: int, model: nn.Module, optimizer=None, *, overlap=False, **others
) -> PendingSave:
    """Save the state after ``step`` in ``folder``, and keep the ``newest`` checkpoints there."""
    folder = storage.as_path(folder)

    def on_complete() -> None:
        write_latest(folder, step)
        for path in _superseded(folder, newest, step):
            delete_checkpoint(path)

    return start_save(
        step_folder(folder, step), step, model, optimizer, others, on_complete, overlap
    )


def write_latest(folder: StoragePath, step: int) -> None:
    """Write the name of the newest checkpoint to the file ``latest``, for people and scripts."""
    (folder / LATEST).put(f"{step_folder(folder, step).name}\n".encode())


def _superseded(folder: StoragePath, newest: int, step: int) -> list[StoragePath]:
    """Return checkpoints older than the ``newest`` ones, and unfinished ones before ``step``."""
    present = {known: place for known, place in _step_folders(folder).items() if known <= step}
    spared = sorted(known for known, place in present.items() if _is_complete(place))[-newest:]
    return [place for known, place in present.items() if known < step and known not in spared]
