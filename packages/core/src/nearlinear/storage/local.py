"""Local and network file systems: atomic files and atomic directories."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import socket
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .path import Reader, StoragePath, StorageUnreachable

CHUNK_BYTES = 2**18
"""Small enough for the allocator to reuse the buffer of the previous read."""

_MADE_ON_THIS_HOST = re.compile(rf".*\.{re.escape(socket.gethostname())}-(\d+)\.tmp", re.DOTALL)
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # <fcntl.h> and <linux/fs.h>


@dataclass(frozen=True)
class LocalPath(StoragePath):
    """A path in a file system, which other nodes may have mounted too."""

    path: Path  # pyright: ignore[reportIncompatibleVariableOverride] - never None here, frozen

    def __str__(self) -> str:
        return str(self.path)

    def __truediv__(self, name: str) -> LocalPath:
        return LocalPath(self.path / name)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def parent(self) -> LocalPath:
        return LocalPath(self.path.parent)

    def exists(self) -> bool:
        return self.path.exists()

    def size(self) -> int:
        return self.path.stat().st_size

    def stream(self, begin: int = 0, end: int | None = None) -> Iterator[bytes]:
        with self.path.open("rb", buffering=0) as file:
            file.seek(begin)
            while chunk := file.read(
                CHUNK_BYTES if end is None else min(CHUNK_BYTES, end - file.tell())
            ):
                yield chunk

    def reader(self) -> Reader:
        return self.path.open("rb", buffering=0)

    def write(self, chunks: Iterable[memoryview], size: int) -> None:
        write_atomically(self.path, chunks, "partial")

    def put(self, data: bytes) -> None:
        # A unique name: several nodes may write the same file at once.
        write_atomically(self.path, [memoryview(data)], uuid.uuid4().hex)
        self.parent.sync()

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def file_sizes(self) -> dict[str, int]:
        found = {}
        for path in self._entries():
            with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
                if path.is_file():
                    found[path.name] = path.stat().st_size
        return found

    def subfolders(self) -> list[StoragePath]:
        return [LocalPath(path) for path in self._entries() if path.is_dir()]

    def _entries(self) -> list[Path]:
        try:
            return sorted(self.path.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise StorageUnreachable(
                f"{self} cannot be listed ({error.strerror}): fix its permissions or its mount"
            ) from None

    def mkdir(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)

    def sync(self) -> None:
        sync_directory(self.path)

    def rmtree(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def check_writable(self) -> None:
        self.mkdir()
        with tempfile.TemporaryFile(dir=self.path):
            pass


def write_atomically(
    path: Path, chunks: Iterable[memoryview], suffix: str, durable: bool = True
) -> None:
    """Write ``chunks`` to a temporary file beside ``path``, then rename it to ``path``.

    Args:
        suffix: Suffix of the temporary file, which a killed process leaves behind.
        durable: Flush the file to disk before the rename, so that it survives a power failure.
    """
    partial = path.with_name(f".{path.name}.{suffix}")
    try:
        with partial.open("wb", buffering=0) as file:
            for chunk in chunks:
                while chunk:  # a raw write may be short
                    chunk = chunk[file.write(chunk) :]
            if durable:
                os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def sync_directory(folder: Path) -> None:
    """Flush the entries of ``folder`` to disk, where the file system supports it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # some file systems cannot sync a directory
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Flush every file and directory below ``folder`` to disk."""
    for directory, _, files in os.walk(folder):
        for name in files:
            descriptor = os.open(os.path.join(directory, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_directory(Path(directory))


@contextlib.contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield a new directory beside ``path``; flush it and rename it to ``path`` at the end.

    The directory is removed if the block raises. Raises OSError (ENOTEMPTY) if ``path`` is a
    directory with entries.
    """
    work = path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}.tmp")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        yield work
        sync_tree(work)
        os.rename(work, path)
        sync_directory(path.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def abandoned_directories(folder: Path) -> list[Path]:
    """Return the unfinished `atomic_directory` folders in ``folder`` of dead local processes.

    Folders of other hosts are left out: this host cannot tell if their processes still run.
    """
    found = [(path, _MADE_ON_THIS_HOST.fullmatch(path.name)) for path in folder.glob("*.tmp")]
    return [path for path, match in found if match and not _is_running(int(match[1]))]


def exchange_paths(first: Path, second: Path) -> bool:
    """Swap two paths atomically. Return False if the system does not support it."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)  # Linux, glibc 2.28
    if rename is None:
        return False
    return not rename(
        _AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE
    )


def _is_running(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # the process belongs to another user
        return True
    return True
