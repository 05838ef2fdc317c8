"""The interface that every storage backend implements."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from ..errors import StorageError


class StorageUnreachable(StorageError):
    """The backend failed or denied access, so the existence of a file is unknown."""


class Reader(Protocol):
    """A file opened for unbuffered, sequential reading."""

    def readinto(self, buffer: memoryview, /) -> int:
        """Fill ``buffer`` from its start, perhaps in part. Return the byte count, 0 at the end."""
        ...

    def close(self) -> None: ...


class _ChunkReader:
    """A `Reader` over an iterator of chunks."""

    def __init__(self, chunks: Iterator[bytes]):
        self._chunks, self._rest = chunks, memoryview(b"")

    def readinto(self, buffer: memoryview, /) -> int:
        self._rest = self._rest or memoryview(next(self._chunks, b""))
        taken, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
        buffer[: len(taken)] = taken
        return len(taken)

    def close(self) -> None:
        """Do nothing: chunks hold no resources."""


class StoragePath(abc.ABC):
    """A file or directory in some storage backend; ``path / name`` is an entry of a directory.

    Methods raise OSError (FileNotFoundError for a missing file) or StorageUnreachable.
    """

    path: Path | None
    """Path in this machine's file system, or None for remote storage."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Last component of the path."""

    @property
    @abc.abstractmethod
    def parent(self) -> StoragePath:
        """Directory that contains this path."""

    @property
    def path_or_url(self) -> Path | str:
        """A local path, or else the URL as a string."""
        return self.path or str(self)

    @abc.abstractmethod
    def __truediv__(self, name: str) -> StoragePath: ...

    def __fspath__(self) -> str:
        return str(self)

    @abc.abstractmethod
    def exists(self) -> bool:
        """Return True if the path exists. A remote prefix exists if any object has it."""

    # Files

    @abc.abstractmethod
    def size(self) -> int:
        """Return the size of the file in bytes."""

    @abc.abstractmethod
    def stream(self, begin: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Yield the bytes [begin, end) of the file in order, in chunks."""

    def reader(self) -> Reader:
        """Open the file for sequential reading into preallocated buffers."""
        return _ChunkReader(self.stream())

    def read(self) -> bytes:
        """Return the content of a small file."""
        return b"".join(self.stream())

    @abc.abstractmethod
    def write(self, chunks: Iterable[memoryview], size: int) -> None:
        """Write ``size`` bytes atomically: readers see the old content or all of the new."""

    def put(self, data: bytes) -> None:
        """Write a small file atomically. The file survives a crash after this call returns."""
        self.write([memoryview(data)], len(data))
        self.parent.sync()

    @abc.abstractmethod
    def remove(self) -> None:
        """Delete the file if it exists."""

    # Directories

    @abc.abstractmethod
    def file_sizes(self) -> dict[str, int]:
        """Map the name of each file in this directory to its size; empty if there is none."""

    @abc.abstractmethod
    def subfolders(self) -> list[StoragePath]:
        """Return the directories in this directory, sorted by name."""

    @abc.abstractmethod
    def mkdir(self) -> None:
        """Create the directory and its parents, if the backend has directories."""

    @abc.abstractmethod
    def sync(self) -> None:
        """Flush the directory's entries to stable storage, if the backend needs it."""

    @abc.abstractmethod
    def rmtree(self) -> None:
        """Delete the directory and everything in it."""

    @abc.abstractmethod
    def check_writable(self) -> None:
        """Create the directory and a temporary file in it; raise if that fails."""
