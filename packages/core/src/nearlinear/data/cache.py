"""A folder of this node for what can be made again: packing plans, and blocks of remote shards."""

from __future__ import annotations

import contextlib
import fcntl
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from ..errors import DataError


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


def put(path: Path, data: bytes) -> None:
    """A file that is there whole or not at all, for all of this node."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        partial.write_bytes(data)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Alone among the threads and processes of this node that ask for `path`, a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)  # which gives the lock back
