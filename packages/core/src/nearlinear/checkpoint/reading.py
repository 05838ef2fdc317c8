"""The tensors in a safetensors file: mapped into memory, or by ranges where there is none to map.

`opened` is for who wants some of a file, in any order, and has its content checked elsewhere.
`Mapped` and `Streamed` (`beginning_to_end` knows which) are for who has all of it checked as well:
a file that comes over a network is hashed and cut up in one pass.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator

import torch
from safetensors import SafetensorError, safe_open

from . import index, stream
from .storage import Place
from .threads import begun


def opened(path: Place):
    """The tensors of a file, as safetensors' `safe_open` offers them: a context manager.

    Raises OSError, Unreachable, and SafetensorError for what is no such file.
    """
    if path.path is not None:
        return safe_open(path.path, "pt")

    def fetch(begin: int, into: memoryview) -> None:
        at = 0
        for chunk in path.stream(begin, begin + len(into)):
            into[at : at + len(chunk)] = chunk
            at += len(chunk)

    return contextlib.nullcontext(Tensors(fetch))


def beginning_to_end(path: Place) -> Mapped | Streamed:
    """A file that is read and hashed at once: its tensors, and what it looks like."""
    return Mapped(path) if path.path is not None else Streamed(path)


class Mapped:
    """A file that memory can be mapped to; a thread hashes it meanwhile."""

    def __init__(self, path: Place):
        self.path = path
        self._hashed = begun(lambda: index.digest(path))

    def tensors(self):
        """As of `opened`."""
        return opened(self.path)

    def looks(self) -> index.File:
        """Size and SHA-256, once all has been read. Raises OSError."""
        return self._hashed()


class Streamed:
    """A file that comes once, from its beginning; its tensors must be asked for as they lie."""

    def __init__(self, path: Place):
        self._chunks, self._hash, self._came = path.stream(), hashlib.sha256(), 0
        self._left = memoryview(b"")

    @contextlib.contextmanager
    def tensors(self) -> Iterator[Passing]:
        """As of `opened`, one after the other."""
        yield Passing(self._fetch)

    def looks(self) -> index.File:
        """Size and SHA-256, once all has been read. Raises OSError, Unreachable."""
        while self._more():
            pass
        return index.File(self._came, self._hash.hexdigest())

    def _more(self) -> bool:
        """Whether there was a next chunk."""
        chunk = next(self._chunks, b"")
        self._hash.update(chunk)
        self._came += len(chunk)
        self._left = memoryview(chunk)
        return bool(chunk)

    def _fetch(self, begin: int, into: memoryview) -> None:
        self._pass(begin - (self._came - len(self._left)))
        self._pass(len(into), into)

    def _pass(self, count: int, into: memoryview | None = None) -> None:
        """The next ``count`` bytes."""
        done = 0
        while done < count:
            if not self._left and not self._more():
                raise SafetensorError("it is cut short")
            some = self._left[: count - done]
            if into is not None:
                into[done : done + len(some)] = some
            done += len(some)
            self._left = self._left[len(some) :]


class Tensors:
    """What `safe_open` offers, by ``fetch(begin, into)``, which fills memory with a file's bytes.

    Raises SafetensorError, and what ``fetch`` raises.
    """

    def __init__(self, fetch: Callable[[int, memoryview], None]):
        self._fetch = fetch
        first = bytearray(stream.LENGTH)
        fetch(0, memoryview(first))
        try:
            header = bytearray(stream.length_of(first))
            fetch(stream.LENGTH, memoryview(header))
            self._entries = stream.entries(bytes(header))
        except ValueError as error:
            raise SafetensorError(f"{error}") from None

    def keys(self) -> list[str]:
        """Names, in the file's order."""
        return list(self._entries)

    def get_tensor(self, key: str) -> torch.Tensor:
        """All of a tensor."""
        entry = self._entry(key)
        return self._values(entry.dtype, entry.shape, entry.begin)

    def get_slice(self, key: str) -> Slice:
        """A tensor of at least one dim, to be cut before it is read."""
        return Slice(self, key, self._entry(key))

    def rows(self, key: str, first: int, last: int) -> torch.Tensor:
        """Of a tensor, on its first dim."""
        entry = self._entry(key)
        row = torch.Size(entry.shape[1:]).numel() * entry.dtype.itemsize
        shape = (last - first, *entry.shape[1:])
        return self._values(entry.dtype, shape, entry.begin + first * row)

    def _entry(self, key: str) -> stream.Entry:
        if key not in self._entries:
            raise SafetensorError(f"File does not contain tensor {key}")
        return self._entries[key]

    def _values(self, dtype: torch.dtype, shape: tuple[int, ...], begin: int) -> torch.Tensor:
        values = torch.empty(shape, dtype=dtype)
        self._fetch(begin, stream.bytes_of(values))
        return values


class Passing(Tensors):
    """Those of a file that goes by: each whole, and kept until the next is asked for."""

    _newest: tuple[str, torch.Tensor] = ("", torch.empty(0))

    def get_tensor(self, key: str) -> torch.Tensor:
        if key != self._newest[0]:
            self._newest = key, super().get_tensor(key)
        return self._newest[1]

    def rows(self, key: str, first: int, last: int) -> torch.Tensor:
        return self.get_tensor(key)[first:last]


class Slice:
    """A tensor of `Tensors`, before it is read."""

    def __init__(self, values: Tensors, key: str, entry: stream.Entry):
        self.values, self.key, self.entry = values, key, entry

    def get_dtype(self) -> str:
        """As the header has it."""
        return stream.DTYPES[self.entry.dtype]

    def get_shape(self) -> list[int]:
        """Of all of it."""
        return list(self.entry.shape)

    def __getitem__(self, inside: tuple[slice, ...]) -> torch.Tensor:
        first, *others = inside
        return self.values.rows(self.key, first.start, first.stop)[:, *others]
