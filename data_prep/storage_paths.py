"""Files and folders of a preparation, on a disk or in a bucket (`s3://bucket/prefix`).

On a disk, a rename publishes a finished folder. In a bucket, the object that is written last does.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from nearlinear import storage
from nearlinear.storage import StoragePath, is_remote, require_local, threads

__all__ = ["StoragePath", "absolute_path", "append_to_name", "download", "is_remote",
           "link_or_copy", "map_concurrent", "read_json", "require_local", "upload", "workdir",
           "write_json"]  # fmt: skip

T = TypeVar("T")
R = TypeVar("R")

REQUESTS_IN_FLIGHT = 16
"""Concurrent requests to a bucket, whose latency does not depend on their number."""
_CHUNK_BYTES = 1 << 20


def absolute_path(name: str | Path | StoragePath) -> StoragePath:
    """Convert a name to a `StoragePath`; a local path becomes absolute."""
    path = storage.as_path(name)
    return path if path.path is None else storage.as_path(Path(os.path.abspath(path.path)))


def append_to_name(path: StoragePath, suffix: str) -> StoragePath:
    """Return the sibling of `path` with `suffix` appended to its name."""
    return path.parent / (path.name + suffix)


def map_concurrent(path: StoragePath, work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yield `work(item)` in order; run several at a time if `path` is in a bucket."""
    if path.path:
        return map(work, items)
    return threads.map_concurrent(work, items, REQUESTS_IN_FLIGHT)


@contextmanager
def workdir(path: StoragePath) -> Iterator[Path]:
    """Yield a local folder to work in: `path` itself, or a temporary one if `path` is remote."""
    if path.path:
        yield path.path
        return
    with tempfile.TemporaryDirectory(prefix="nearlinear-") as folder:
        yield Path(folder)


def upload(folder: Path, target: StoragePath, last: str) -> None:
    """Write all files of a folder to `target`; the file named `last` follows the others."""
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    for name in [name for name in files if str(name) != last]:
        _write_file(folder / name, target / name.as_posix())
    _write_file(folder / last, target / last)


def download(source: StoragePath, path: Path) -> None:
    """Copy a remote file to `path` atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    storage.as_path(path).write(map(memoryview, source.stream()), -1)


def link_or_copy(source: StoragePath, target: StoragePath) -> None:
    """Give a file a second name: a hard link on a disk, otherwise a copy.

    A local file that is copied into a bucket is temporary, so it is deleted afterwards.
    """
    if source.path is None:
        _copy_in_bucket(source, target)
    elif target.path is None:
        _write_file(source.path, target)
        source.remove()
    else:
        try:
            os.link(source.path, target.path)
        except OSError:  # the file system has no hard links
            shutil.copyfile(source.path, target.path)
            with open(target.path, "rb") as file:
                os.fsync(file.fileno())


def write_json(path: Path | StoragePath, document: dict[str, Any]) -> None:
    """Write a JSON file atomically."""
    absolute_path(path).put(json.dumps(document, ensure_ascii=False).encode())


def read_json(path: Path | StoragePath) -> dict[str, Any] | None:
    """Read a JSON file. Return None if it is missing or incomplete."""
    try:
        return json.loads(absolute_path(path).read())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def _write_file(path: Path, target: StoragePath) -> None:
    with open(path, "rb") as file:
        chunks = iter(lambda: file.read(_CHUNK_BYTES), b"")
        target.write(map(memoryview, chunks), path.stat().st_size)


def _copy_in_bucket(source: StoragePath, target: StoragePath) -> None:
    from nearlinear.storage.s3 import S3Path

    assert isinstance(source, S3Path) and isinstance(target, S3Path)
    source.copy_to(target)
