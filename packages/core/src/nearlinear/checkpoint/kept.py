"""The checkpoints of a run in one folder: the newest that is whole, and no more than wanted."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..errors import CheckpointError
from . import index, saving
from .agree import everyone
from .save import begin, remove
from .saving import Saving

LATEST = "latest"
_NAME = re.compile(r"step-(\d+)")


def folder_of(folder: Path, step: int) -> Path:
    """Where the checkpoint after ``step`` is."""
    return folder / f"step-{step:08d}"


def steps(folder: Path) -> list[int]:
    """The steps that have a whole checkpoint in ``folder``, as far as names and sizes tell."""
    found = []
    for path in folder.glob("step-*"):
        match = _NAME.fullmatch(path.name)
        if match and _whole(path):
            found.append(int(match[1]))
    return sorted(found)


def _whole(path: Path) -> bool:
    try:
        return not index.missing(path, index.read(path))
    except CheckpointError:
        return False


def latest(folder) -> Path | None:
    """The newest checkpoint that all ranks see whole; None: there is none. A collective call."""
    saving.finish()
    seen = everyone(steps(Path(folder)))
    common = set(seen[0]).intersection(*seen[1:])
    return folder_of(Path(folder), max(common)) if common else None


def keep(folder, newest: int, step: int, model, optimizer=None, **others) -> Saving:
    """`save` the state after ``step`` among the others in ``folder``; keep the ``newest`` ones."""
    folder = Path(folder)

    def after() -> None:
        point(folder, step)
        for path in _superseded(folder, newest, step):
            remove(path)

    return begin(folder_of(folder, step), step, model, optimizer, others, after)


def point(folder: Path, step: int) -> None:
    """Write the name of the newest checkpoint to the file ``latest``, for people and scripts."""
    partial = folder / f".{LATEST}.{os.getpid()}"
    partial.write_text(f"{folder_of(folder, step).name}\n", encoding="utf-8")
    os.replace(partial, folder / LATEST)


def _superseded(folder: Path, newest: int, step: int) -> list[Path]:
    """Checkpoints older than the ``newest`` ones, and what was never finished before ``step``."""
    whole = [known for known in steps(folder) if known <= step]
    spared = {folder_of(folder, known) for known in whole[-newest:]}
    return [
        path
        for path in folder.glob("step-*")
        if (match := _NAME.fullmatch(path.name)) and int(match[1]) < step and path not in spared
    ]
