"""Folders of a file system: a local disk, or one that several nodes have mounted."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .place import Place, Reader, Unreachable

READ = 2**18
"""bytes at a time: memory that is used again from one read to the next"""


@dataclass(frozen=True)
class Disk(Place):
    """``path`` of this machine."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def __truediv__(self, name: str) -> Disk:
        return Disk(self.path / name)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def parent(self) -> Disk:
        return Disk(self.path.parent)

    def exists(self) -> bool:
        return self.path.exists()

    def size(self) -> int:
        return self.path.stat().st_size

    def stream(self, begin: int = 0, end: int | None = None) -> Iterator[bytes]:
        with self.path.open("rb", buffering=0) as file:
            file.seek(begin)
            while chunk := file.read(READ if end is None else min(READ, end - file.tell())):
                yield chunk

    def reader(self) -> Reader:
        return self.path.open("rb", buffering=0)

    def write(self, chunks: Iterable[memoryview], size: int) -> None:
        write(self.path, chunks, "partial")

    def put(self, data: bytes) -> None:
        write(self.path, [memoryview(data)], uuid.uuid4().hex)  # several nodes may put the same
        self.parent.settle()

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def sizes(self) -> dict[str, int]:
        found = {}
        for path in self._entries():
            with contextlib.suppress(FileNotFoundError):  # gone meanwhile
                if path.is_file():
                    found[path.name] = path.stat().st_size
        return found

    def folders(self) -> list[Place]:
        return [Disk(path) for path in self._entries() if path.is_dir()]

    def _entries(self) -> list[Path]:
        try:
            return sorted(self.path.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise Unreachable(
                f"{self} cannot be listed ({error.strerror}): mend its permissions or its mount"
            ) from None

    def make(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)

    def settle(self) -> None:
        settle(self.path)

    def clear(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def try_out(self) -> None:
        self.make()
        with tempfile.TemporaryFile(dir=self.path):
            pass


def write(path: Path, chunks: Iterable[memoryview], suffix: str, lasting: bool = True) -> None:
    """The file ``path`` of these chunks: there from one moment on, or as it was before.

    What a process that is killed leaves is named with ``suffix``. ``lasting``: a power cut does not
    undo it.
    """
    partial = path.with_name(f".{path.name}.{suffix}")
    try:
        with partial.open("wb", buffering=0) as file:
            for chunk in chunks:
                while chunk:  # one call may write less
                    chunk = chunk[file.write(chunk) :]
            if lasting:
                os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def settle(folder: Path) -> None:
    """Have the disk know the names in ``folder``, where it can be told to."""
    try:
        number = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(number)
    except OSError:
        pass  # not on every file system
    finally:
        os.close(number)
