"""The checkpoints of a run in one folder: the newest that is whole, and no more than wanted."""

from __future__ import annotations

import re

from .. import storage
from ..errors import CheckpointError
from ..storage import Place, Unreachable
from . import index, saving
from .agree import everyone, together
from .save import begin, remove
from .saving import Saving

LATEST = "latest"
_NAME = re.compile(r"step-(\d+)")


def folder_of(folder, step: int):
    """Where the checkpoint after ``step`` is."""
    return folder / f"step-{step:08d}"


def steps(folder) -> list[int]:
    """The steps that have a whole checkpoint in ``folder``, as far as names and sizes tell."""
    return sorted(step for step, place in _all(storage.at(folder)).items() if _whole(place))


def _all(folder: Place) -> dict[int, Place]:
    """What is there of every step, whole or not."""
    named = {place: _NAME.fullmatch(place.name) for place in folder.folders()}
    return {int(match[1]): place for place, match in named.items() if match}


def _whole(place: Place) -> bool:
    try:
        return not index.missing(place, index.read(place))
    except Unreachable:  # it may be: who goes back to an older one would lose it
        raise
    except CheckpointError:
        return False


def latest(folder) -> Place | None:
    """The newest checkpoint that all ranks see whole; None: there is none. A collective call.

    Raises CheckpointError on all ranks where one cannot look.
    """
    saving.finish()
    mine = []
    with together():
        folder = storage.at(folder)
        mine = steps(folder)
    seen = everyone(mine)
    common = set(seen[0]).intersection(*seen[1:])
    return folder_of(folder, max(common)) if common else None


def keep(
    folder, newest: int, step: int, model, optimizer=None, *, overlap=False, **others
) -> Saving:
    """`save` the state after ``step`` among the others in ``folder``; keep the ``newest`` ones."""
    folder = storage.at(folder)

    def after() -> None:
        point(folder, step)
        for path in _superseded(folder, newest, step):
            remove(path)

    return begin(folder_of(folder, step), step, model, optimizer, others, after, overlap)


def point(folder: Place, step: int) -> None:
    """Write the name of the newest checkpoint to the file ``latest``, for people and scripts."""
    (folder / LATEST).put(f"{folder_of(folder, step).name}\n".encode())


def _superseded(folder: Place, newest: int, step: int) -> list[Place]:
    """Checkpoints older than the ``newest`` ones, and what was never finished before ``step``."""
    there = {known: place for known, place in _all(folder).items() if known <= step}
    spared = sorted(known for known, place in there.items() if _whole(place))[-newest:]
    return [place for known, place in there.items() if known < step and known not in spared]
