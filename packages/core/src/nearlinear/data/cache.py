"""Node-local cache for reproducible files: packing plans and blocks of remote shards.

Ranks of a node share the cache. Files are written atomically, and file locks ensure that one rank
creates a file while others wait for it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import logging
import math
import os
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from ..errors import DataError
from ..storage.local import write_atomically

logger = logging.getLogger("nearlinear.data")


class CacheFull(DataError):
    """The file system or the user's quota is full."""


def cache_folder(folder: str | Path | None = None) -> Path:
    """Create and return the cache folder; defaults to $XDG_CACHE_HOME/nearlinear, or ~/.cache."""
    default = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    found = Path(folder or Path(default) / "nearlinear").expanduser()
    try:
        found.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"cannot create the cache folder {found} ({error.strerror}): set data.cache to a "
            "writable folder of this node"
        ) from None
    return found


def write_cached(path: Path, data: bytes, durable: bool = True) -> None:
    """Write a file atomically, as seen by all processes of this node.

    Args:
        path: File to write. Parent folders are created.
        data: Contents.
        durable: Sync to disk, so that the file also survives a power failure.

    Raises:
        CacheFull: If the file system or the quota is full.
        DataError: If the file cannot be written for another reason.
    """
    with _data_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, [memoryview(data)], f"{uuid.uuid4().hex}.partial", durable)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file `path` among all threads and processes of this node.

    Raises the same errors as `write_cached`.
    """
    with _data_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        number = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with _data_errors(path):  # the caller's own errors pass through unchanged
            fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)  # releases the lock


@functools.cache
def warn_full(folder: Path) -> None:
    """Warn once per process that the cache `folder` is full."""
    logger.warning(
        "the cache %s has no room left: files missing from it are downloaded or computed on every "
        "read; free some space, or set data.cache to another folder of this node",
        folder,
    )


@contextlib.contextmanager
def _data_errors(path: Path) -> Iterator[None]:
    """Convert file system errors to `DataError`."""
    try:
        yield
    except OSError as error:
        kind = CacheFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else DataError
        raise kind(
            f"{path.parent} cannot be written ({error.strerror}): set data.cache to another folder "
            "of this node"
        ) from None


_STRIPES = 64
"""Number of download locks. Blocks that share a lock are downloaded one at a time."""
_ROOM = 64
"""Maximum number of old blocks to delete when the disk is full."""
_ABANDONED = 600
"""Age in seconds after which a partial file is considered abandoned by a killed process."""


@dataclass(frozen=True)
class BlockId:
    """Identity of a block: its shard, position, size and checksum."""

    shard: str
    """sha256 of the shard file."""
    number: int
    bytes: int
    xxh3: str


class BlockCache:
    """Cache of remote blocks as files in `folder`, shared by the ranks of a node.

    Blocks are evicted in least recently used order. A block may be deleted while other processes
    have it mapped; their mappings stay valid. Each process checks the limit after downloading 1/64
    of it, so the cache may exceed the limit by that much per rank. On a full disk, a block is
    returned from memory and the oldest blocks are deleted.

    Args:
        folder: Folder of the cache.
        limit: Approximate size limit in bytes, or 0 for no limit.
    """

    def __init__(self, folder: Path, limit: int):
        self.folder, self.limit = folder, limit
        self._bytes_until_check = 0  # bytes; 0 checks the files of earlier runs first

    def block(self, block_id: BlockId, fetch: Callable[[], bytes], name: str) -> np.ndarray:
        """Return the memory-mapped bytes of a block, uint8, after fetching it if it is absent.

        Errors mention `name`. Raises `DataError` if the fetched bytes do not match.
        """
        path = self.folder / block_id.shard[:32] / f"{block_id.number}.block"
        if (found := _map(path, block_id)) is not None:
            return found
        stripe, raw = int(block_id.xxh3, 16) % _STRIPES, None
        try:
            with locked(self.folder / "locks" / str(stripe)):
                if (found := _map(path, block_id)) is not None:
                    return found
                raw = _check_block(fetch(), block_id, name)
                write_cached(path, raw, durable=False)  # the checksum detects a power failure
                found = _map(path, block_id)
            self._enforce_limit(block_id.bytes)
        except CacheFull:
            warn_full(self.folder)
            raw = raw or _check_block(fetch(), block_id, name)
            with contextlib.suppress(CacheFull):  # no room for a lock file: nothing to delete
                self._drop_oldest(_ROOM * block_id.bytes)
        return np.frombuffer(raw, dtype=np.uint8) if found is None else found

    def _enforce_limit(self, brought: int) -> None:
        self._bytes_until_check -= brought
        if self._bytes_until_check < 0:
            self._drop_oldest()
            self._bytes_until_check = self.limit // 64 or math.inf

    def _drop_oldest(self, room: int = 0) -> None:
        """Delete abandoned files, and the oldest blocks until the limit and `room` are met.

        `room` is the number of bytes to free, at most an eighth of the cache.
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


def _check_block(raw: bytes, block_id: BlockId, name: str) -> bytes:
    """Return `raw` if it matches the checksum of the block, else raise `DataError`."""
    if len(raw) != block_id.bytes or xxhash.xxh3_64_hexdigest(raw) != block_id.xxh3:
        raise DataError(
            f"{name} is altered: its checksum differs from the manifest; copy the file again, or "
            "prepare the data again"
        )
    return raw


def _map(path: Path, block_id: BlockId) -> np.ndarray | None:
    """Map the block at `path`, or return None if it is absent. A damaged file is deleted."""
    try:
        found = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
        if len(found) == block_id.bytes and xxhash.xxh3_64_hexdigest(found.data) == block_id.xxh3:
            os.utime(path)  # mark as recently used
            return found
    except FileNotFoundError:
        return None
    except ValueError:  # an empty file
        pass
    path.unlink(missing_ok=True)
    return None
