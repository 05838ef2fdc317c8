"""Lines as they are written: of a file that grows, is replaced or is yet to come, or of a pipe."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from ..errors import ConfigError

HEAD = 200  # bytes that tell a file from the next of its name; a row's time is among them
BLOCK = 1 << 16


class Splitter:
    """Whole lines out of blocks of bytes; what is written of the next one is kept until it ends."""

    def __init__(self):
        self._rest = b""

    def __call__(self, block: bytes) -> list[str]:
        *whole, self._rest = (self._rest + block).split(b"\n")
        return [line.decode(errors="replace").rstrip("\r") for line in whole]


class File:
    """The lines of the file at ``path``."""

    ended = False  # someone may write to it again

    def __init__(self, path: Path):
        self.path = path
        self._begin_again(None)

    def _begin_again(self, node) -> None:
        self._node, self._head, self._read, self._split = node, b"", 0, Splitter()

    def new(self) -> tuple[bool, list[str]]:
        """Whether the file is another one than at the last call, and its lines since.

        Raises ConfigError if it is there and cannot be read.
        """
        try:
            file = open(self.path, "rb")  # anew each time: network file systems look again then
        except FileNotFoundError:
            return False, []
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be read ({error.strerror})") from None
        with file:
            status = os.fstat(file.fileno())
            node = (status.st_dev, status.st_ino)
            same = (
                node == self._node
                and status.st_size >= self._read
                and file.read(len(self._head)) == self._head
            )
            another = not same and self._node is not None
            if not same:
                self._begin_again(node)
            if len(self._head) < HEAD:
                file.seek(0)
                self._head = file.read(HEAD)
            file.seek(self._read)
            block = file.read()
        self._read += len(block)
        return another, self._split(block)


class Pipe:
    """The lines that come through a file descriptor, read beside."""

    def __init__(self, descriptor: int = 0):
        self._descriptor, self._split = descriptor, Splitter()
        self._lines: list[str] = []
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._serve, daemon=True)
        self._reader.start()

    @property
    def ended(self) -> bool:
        """Whether all has come; `new` may still have to give it."""
        return not self._reader.is_alive()

    def wait(self) -> None:
        """Until all has come."""
        self._reader.join()

    def new(self) -> tuple[bool, list[str]]:
        """As of a `File`: it is always the same one."""
        with self._lock:
            lines, self._lines = self._lines, []
        return False, lines

    def _serve(self) -> None:
        while block := os.read(self._descriptor, BLOCK):
            self._take(block)
        self._take(b"\n")  # the last line may end without

    def _take(self, block: bytes) -> None:
        lines = self._split(block)
        with self._lock:
            self._lines += lines
