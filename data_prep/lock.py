"""The lock of the folder of an unfinished output: only who holds it removes anything there.

It is a file in the folder, locked by flock: it is free when the last process that has it open
ends, however it ends. The folder may be removed with it; who waited for that file takes another.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from data_prep.places import Place
from nearlinear.errors import DataError

LOCK_FILE = "lock"
_SECONDS_TO_WAIT = 3.0


class Busy(DataError):
    """Another process holds the lock."""


class Lock:
    """A file that is open and locked, at `path`."""

    def __init__(self, path: Path, file):
        self._path, self._file = path, file

    @property
    def descriptor(self) -> int:
        """What a child process keeps open to hold the lock, too."""
        return self._file.fileno()

    def holds(self) -> bool:
        """Whether the file still has its name: a file that was removed locks nothing."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._path))
        except FileNotFoundError:
            return False


@contextmanager
def held(folder: Place, out: Place, patient: bool = True) -> Iterator[Lock | None]:
    """The lock of `folder`, where `out` is prepared; the folder is made. None in a bucket.

    Raises `Busy` when others have it, `patient` after some time: workers end after who started
    them. Raises `DataError` on a file system without locks.
    """
    if folder.path is None:
        yield None
        return
    path = folder.path / LOCK_FILE
    deadline = time.monotonic() + _SECONDS_TO_WAIT * patient
    while True:
        folder.make()
        try:
            file = open(path, "w")
        except FileNotFoundError:  # the folder was removed meanwhile
            continue
        with file:
            lock = Lock(path, file)
            if _taken(file, folder) and lock.holds():
                yield lock
                return
        if time.monotonic() > deadline:
            raise Busy(f"another process is preparing {out}: wait for it, or choose another --out")
        time.sleep(0.05)


def remove(folder: Place) -> None:
    """Remove a folder whose lock is held; the lock goes last."""
    clear(folder)
    if folder.path is not None:
        (folder.path / LOCK_FILE).unlink(missing_ok=True)
        with suppress(OSError):  # the next one is in it already
            folder.path.rmdir()


def clear(folder: Place) -> None:
    """Remove all but the lock from a folder whose lock is held."""
    if folder.path is None:
        folder.clear()
        return
    for stale in folder.path.iterdir():
        if stale.is_dir() and not stale.is_symlink():
            shutil.rmtree(stale, ignore_errors=True)
        elif stale.name != LOCK_FILE:
            stale.unlink(missing_ok=True)


def _taken(file, folder: Place) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        remove(folder)
        raise DataError(
            f"{folder} is on a file system that has no locks ({error.strerror}): mount it with "
            "them (Lustre: -o flock; NFS: without nolock), or prepare on a local disk and copy "
            "the folder"
        ) from None
    return True
