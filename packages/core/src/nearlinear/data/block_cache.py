"""Blocks of remote shards as files of this node, shared by its ranks, the oldest dropped first."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from ..errors import DataError
from .cache import Full, locked, put, tell_full

_STRIPES = 64
"""locks that ranks fetch under; two blocks of one wait for each other"""
_ROOM = 64
"""blocks that are dropped at most, the oldest, where one finds the disk full"""
_ABANDONED = 600
"""seconds after which a file that is not finished is of a process that was killed"""


@dataclass(frozen=True)
class Wanted:
    """A block by what it holds."""

    shard: str
    """sha256 of its file"""
    number: int
    bytes: int
    xxh3: str


class BlockCache:
    """Blocks in `folder`, of about `limit` bytes together; 0: as many as there is room for.

    A block is there whole or not at all. One rank fetches it, others wait; it may be dropped while
    others have it mapped, and stays theirs. The limit is looked at when a process has brought a
    64th of it, so that much for each rank may be above it. Where the disk is full a block is in
    memory alone, and the oldest make room for the next.
    """

    def __init__(self, folder: Path, limit: int):
        self.folder, self.limit = folder, limit
        self._until_look = 0  # bytes: at once at what earlier runs have left

    def block(self, wanted: Wanted, fetch: Callable[[], bytes], name: str) -> np.ndarray:
        """The bytes of a block, uint8, mapped. Raises `DataError`, which says its ``name``."""
        path = self.folder / wanted.shard[:32] / f"{wanted.number}.block"
        if (found := _mapped(path, wanted)) is not None:
            return found
        stripe, raw = int(wanted.xxh3, 16) % _STRIPES, None
        try:
            with locked(self.folder / "locks" / str(stripe)):
                if (found := _mapped(path, wanted)) is not None:
                    return found
                raw = _right(fetch(), wanted, name)
                put(path, raw, lasting=False)  # its checksum tells what a power cut makes of it
                found = _mapped(path, wanted)
            self._keep_to_limit(wanted.bytes)
        except Full:
            tell_full(self.folder)
            raw = raw or _right(fetch(), wanted, name)
            with contextlib.suppress(Full):  # not even of a lock: then nothing of ours is there
                self._drop_oldest(_ROOM * wanted.bytes)
        return np.frombuffer(raw, dtype=np.uint8) if found is None else found

    def _keep_to_limit(self, brought: int) -> None:
        self._until_look -= brought
        if self._until_look < 0:
            self._drop_oldest()
            self._until_look = self.limit // 64 or math.inf

    def _drop_oldest(self, room: int = 0) -> None:
        """Drop what is abandoned, and what is above the limit, or so much to make room.

        `room` is in bytes, and of what is there no more than an eighth.
        """
        with locked(self.folder / "locks" / "drop"):
            files, size, abandoned = [], 0, (time.time() - _ABANDONED) * 1e9
            for path in [*self.folder.glob("*/*.block"), *self.folder.glob("*/*.partial")]:
                with contextlib.suppress(FileNotFoundError):
                    told, finished = path.stat(), path.suffix == ".block"
                    size += told.st_size
                    if finished or told.st_mtime_ns < abandoned:
                        files.append((finished, told.st_mtime_ns, told.st_size, path))
            above = max(size - (self.limit or math.inf), min(room, size // 8))
            for finished, _, size, path in sorted(files):
                if finished and above <= 0:
                    break
                path.unlink(missing_ok=True)
                above -= size


def _right(raw: bytes, wanted: Wanted, name: str) -> bytes:
    """What has come for a block. Raises `DataError` if it is something else."""
    if len(raw) != wanted.bytes or xxhash.xxh3_64_hexdigest(raw) != wanted.xxh3:
        raise DataError(
            f"{name} is altered: its checksum differs; copy the file again, or prepare the data "
            "again"
        )
    return raw


def _mapped(path: Path, wanted: Wanted) -> np.ndarray | None:
    """The block in `path` if it is there as it was written; one that is not is removed."""
    try:
        found = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
        if len(found) == wanted.bytes and xxhash.xxh3_64_hexdigest(found) == wanted.xxh3:
            os.utime(path)  # used last
            return found
    except FileNotFoundError:
        return None
    except ValueError:  # an empty file
        pass
    path.unlink(missing_ok=True)
    return None
