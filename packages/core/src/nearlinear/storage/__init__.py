"""Storage of checkpoints and data: local directories, or prefixes of an S3 bucket.

Callers read and write a `StoragePath` without knowing its backend. This package does not import
torch, so that a run can validate its folders before it starts.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..errors import StorageError
from .local import LocalPath
from .path import StoragePath, StorageUnreachable

__all__ = ["StoragePath", "StorageUnreachable", "as_path", "is_remote", "require_local"]

_URL = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]+):/+(?P<rest>.*)")
"""Matches one slash too: pathlib collapses the two of ``s3://bucket``."""


def as_path(folder: str | os.PathLike[str] | StoragePath) -> StoragePath:
    """Convert a path or an ``s3://bucket/prefix`` URL to a `StoragePath`.

    Raises:
        StorageError: The URL has another scheme, names no bucket, or boto3 is missing.
    """
    if isinstance(folder, StoragePath):
        return folder
    url = _URL.fullmatch(os.fspath(folder))
    if url is None:
        return LocalPath(Path(folder))
    if url["scheme"] != "s3":
        raise StorageError(
            f"{folder}: unsupported scheme {url['scheme']!r}. Give a directory or "
            "s3://bucket/prefix; mount other storage as a directory"
        )
    from .s3 import S3Path

    return S3Path.parse(url["rest"])


def is_remote(folder: str | os.PathLike[str]) -> bool:
    """Return True for a URL such as ``s3://bucket/prefix``, False for a local path."""
    return _URL.fullmatch(os.fspath(folder)) is not None


def require_local(folder: str | os.PathLike[str]) -> Path:
    """Return ``folder`` as a local path. Raises StorageError for a URL."""
    if is_remote(folder):
        raise StorageError(
            f"{folder} is not a local directory, which is required here. Name a directory; copy "
            "remote files to it first (aws s3 sync)"
        )
    return Path(folder)
