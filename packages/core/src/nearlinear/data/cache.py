"""A folder of this node for what can be made again: packing plans, and blocks of remote shards."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import logging
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from ..errors import DataError
from ..storage import disk

logger = logging.getLogger("nearlinear.data")


class Full(DataError):
    """The file system of a cache has no room, or its user has none left there."""


def cache_folder(folder: str | Path | None = None) -> Path:
    """`folder`, or the one that XDG says: ~/.cache/nearlinear. Made if need be; DataError."""
    default = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    found = Path(folder or Path(default) / "nearlinear").expanduser()
    try:
        found.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"{found} cannot be made ({error.strerror}): set data.cache to a folder of this node"
        ) from None
    return found


def put(path: Path, data: bytes, lasting: bool = True) -> None:
    """A file that is there whole or not at all, for all of this node.

    `lasting`: after a power cut, too. Raises `Full`, or another `DataError`.
    """
    with _told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        disk.write(path, [memoryview(data)], f"{uuid.uuid4().hex}.partial", lasting)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Alone among the threads and processes of this node that ask for `path`, a file.

    Raises as `put`.
    """
    with _told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        number = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with _told(path):  # which is not around the caller's own work
            fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)  # which gives the lock back


@functools.cache
def tell_full(folder: Path) -> None:
    """Say, once in a process, that what does not go into the cache `folder` is made again."""
    logger.warning(
        "%s has no room left: what is not there is fetched or made again whenever it is read; make "
        "room, or set data.cache to another folder of this node",
        folder,
    )


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """What the file system says no to, as `DataError`."""
    try:
        yield
    except OSError as error:
        kind = Full if error.errno in (errno.ENOSPC, errno.EDQUOT) else DataError
        raise kind(
            f"{path.parent} cannot be written ({error.strerror}): set data.cache to another folder "
            "of this node"
        ) from None
