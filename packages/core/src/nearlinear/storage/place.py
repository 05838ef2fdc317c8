"""What checkpoints and data need of the place where they lie, whatever keeps it."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from ..errors import StorageError


class Unreachable(StorageError):
    """A place that cannot be asked, or says no: nothing is known of what is there."""


class Reader(Protocol):
    """What a file opened without a buffer is."""

    def readinto(self, into: memoryview, /) -> int:
        """Fill ``into`` from its beginning, if not to its end; how many bytes: 0 at the end."""

    def close(self) -> None: ...


class _Joined:
    """A `Reader` of chunks."""

    def __init__(self, chunks: Iterator[bytes]):
        self._chunks, self._left = chunks, memoryview(b"")

    def readinto(self, into: memoryview, /) -> int:
        self._left = self._left or memoryview(next(self._chunks, b""))
        some, self._left = self._left[: len(into)], self._left[len(into) :]
        into[: len(some)] = some
        return len(some)

    def close(self) -> None:
        """Chunks need no closing."""


class Place(abc.ABC):
    """The name of a folder or of a file; ``place / name`` is what it holds under that name.

    Methods raise OSError (FileNotFoundError: there is no such file) or Unreachable.
    """

    path: Path | None
    """where this machine has it in a file system; None: nowhere"""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The last part of its name."""

    @property
    @abc.abstractmethod
    def parent(self) -> Place:
        """What it is in."""

    @property
    def told(self) -> Path | str:
        """Itself for those who do not know places: a path, or its address."""
        return self.path or str(self)

    @abc.abstractmethod
    def __truediv__(self, name: str) -> Place: ...

    def __fspath__(self) -> str:
        return str(self)

    @abc.abstractmethod
    def exists(self) -> bool:
        """Whether there is such a folder, with something in it."""

    # A file.

    @abc.abstractmethod
    def size(self) -> int:
        """Bytes of the file."""

    @abc.abstractmethod
    def stream(self, begin: int = 0, end: int | None = None) -> Iterator[bytes]:
        """The bytes of the file from ``begin`` to ``end``, in order."""

    def reader(self) -> Reader:
        """The bytes of the file, in order, into memory that is there."""
        return _Joined(self.stream())

    def read(self) -> bytes:
        """All of a small file."""
        return b"".join(self.stream())

    @abc.abstractmethod
    def write(self, chunks: Iterable[memoryview], size: int) -> None:
        """The file of these ``size`` bytes: there from one moment on, or as it was before."""

    def put(self, data: bytes) -> None:
        """`write` of a small file, which outlives a crash once this returns."""
        self.write([memoryview(data)], len(data))
        self.parent.settle()

    @abc.abstractmethod
    def remove(self) -> None:
        """Delete the file, if it is there."""

    # A folder.

    @abc.abstractmethod
    def sizes(self) -> dict[str, int]:
        """The files in it and their bytes; none where there is no such folder."""

    @abc.abstractmethod
    def folders(self) -> list[Place]:
        """Those in it, by name."""

    @abc.abstractmethod
    def make(self) -> None:
        """Have the folder be there, where one has to be made."""

    @abc.abstractmethod
    def settle(self) -> None:
        """Have names in the folder outlive a crash, where that is not so by itself."""

    @abc.abstractmethod
    def clear(self) -> None:
        """Delete all of it."""

    @abc.abstractmethod
    def try_out(self) -> None:
        """Make the folder, write in it and leave nothing; raises where that cannot be."""
