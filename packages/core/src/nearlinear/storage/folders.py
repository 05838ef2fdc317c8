"""Folders of a disk that are whole or not there: filled under another name, then renamed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from .disk import settle

_OF_THIS_HOST = re.compile(rf".*\.{re.escape(socket.gethostname())}-(\d+)\.tmp", re.DOTALL)
_HERE, _EXCHANGE = -100, 2
"""AT_FDCWD and RENAME_EXCHANGE of Linux"""


@contextlib.contextmanager
def making(path: Path) -> Iterator[Path]:
    """A new folder beside ``path``, which gets that name, all of it on disk, when the block ends.

    A block that raises leaves nothing. Raises OSError (ENOTEMPTY) where the name is then that of a
    folder with something in it.
    """
    work = path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}.tmp")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        yield work
        settle_all(work)
        os.rename(work, path)
        settle(path.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def abandoned(folder: Path) -> list[Path]:
    """The folders in ``folder`` that processes of this host were `making` when they were killed.

    Those of other hosts may be in the making: nobody here can know.
    """
    found = [(path, _OF_THIS_HOST.fullmatch(path.name)) for path in folder.glob("*.tmp")]
    return [path for path, named in found if named and not _runs(int(named[1]))]


def settle_all(folder: Path) -> None:
    """Have the disk know every file below ``folder``, and the names."""
    for place, _, files in os.walk(folder):
        for name in files:
            number = os.open(os.path.join(place, name), os.O_RDONLY)
            try:
                os.fsync(number)
            finally:
                os.close(number)
        settle(Path(place))


def exchange(one: Path, other: Path) -> bool:
    """Have two names change what they name, at one moment; False where the system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)  # Linux, glibc 2.28
    if rename is None:
        return False
    return not rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True
