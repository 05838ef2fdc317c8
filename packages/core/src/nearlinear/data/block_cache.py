"""Blocks of remote shards as files of this node, shared by its ranks, the oldest dropped first."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from ..errors import DataError
from .cache import locked, put

_STRIPES = 64
"""locks that ranks fetch under; two blocks of one wait for each other"""


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
    64th of it, so that much for each rank may be above it.
    """

    def __init__(self, folder: Path, limit: int):
        self.folder, self.limit = folder, limit
        self._brought = limit  # look at once at what earlier runs have left

    def block(self, wanted: Wanted, fetch: Callable[[], bytes], name: str) -> np.ndarray:
        """The bytes of a block, uint8, mapped. Raises `DataError`, which says its ``name``."""
        path = self.folder / wanted.shard[:32] / f"{wanted.number}.block"
        if (found := _mapped(path, wanted)) is not None:
            return found
        stripe = int(wanted.xxh3, 16) % _STRIPES
        with locked(self.folder / "locks" / str(stripe)):
            if (found := _mapped(path, wanted)) is not None:
                return found
            raw = fetch()
            if len(raw) != wanted.bytes or xxhash.xxh3_64_hexdigest(raw) != wanted.xxh3:
                raise DataError(
                    f"{name} is altered: its checksum differs; copy the file again, or prepare the "
                    "data again"
                )
            put(path, raw)
            found = _mapped(path, wanted)
        self._brought += wanted.bytes
        if self.limit and self._brought > self.limit // 64:
            self._brought = 0
            self._drop_oldest()
        return np.frombuffer(raw, dtype=np.uint8) if found is None else found

    def _drop_oldest(self) -> None:
        with locked(self.folder / "locks" / "drop"):
            files = []
            for path in self.folder.glob("*/*.block"):
                with contextlib.suppress(FileNotFoundError):
                    told = path.stat()
                    files.append((told.st_mtime_ns, told.st_size, path))
            above = sum(size for _, size, _ in files) - self.limit
            for _, size, path in sorted(files):
                if above <= 0:
                    break
                path.unlink(missing_ok=True)
                above -= size


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
