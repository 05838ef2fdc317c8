"""Where checkpoints and data lie: folders of this machine's disks, or prefixes in a bucket of S3.

Everything above reads and writes a `Place` and does not ask which it is. No torch here, so that a
run finds out at once what is wrong with its folder.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..errors import StorageError
from .disk import Disk
from .place import Place, Unreachable

__all__ = ["Place", "Unreachable", "at", "elsewhere", "on_disk"]

_SCHEME = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]+):/+(?P<rest>.*)")
"""of an address like s3://bucket/prefix; a Path makes one slash of two"""


def at(folder) -> Place:
    """The place of that name: a path, or ``s3://bucket/prefix``. Raises StorageError."""
    if isinstance(folder, Place):
        return folder
    address = _SCHEME.fullmatch(os.fspath(folder))
    if address is None:
        return Disk(Path(folder))
    if address["scheme"] != "s3":
        raise StorageError(
            f"{folder}: what is kept lies in folders or under s3://bucket/prefix; mount what you "
            "have, or name one of these"
        )
    from .s3 import S3

    return S3.named(address["rest"])


def elsewhere(folder) -> bool:
    """Whether that is the name of no folder of this machine, as ``s3://bucket/prefix``."""
    return _SCHEME.fullmatch(os.fspath(folder)) is not None


def on_disk(folder) -> Path:
    """A folder that must be one of this machine's file systems. Raises StorageError."""
    if elsewhere(folder):
        raise StorageError(
            f"{folder} is no folder of this machine's, which this must be: name one, and copy it "
            "from there (aws s3 sync)"
        )
    return Path(folder)
