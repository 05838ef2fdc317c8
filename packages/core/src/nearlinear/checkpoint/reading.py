"""The tensors in a safetensors file: mapped into memory, by ranges, or as it goes by.

`opened` is for who wants some of a file, in any order, and has its content checked elsewhere.
`Streamed` is for who has all of it checked as well: it is read once, from its beginning, and hashed
and cut up on the way.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator

import torch
from safetensors import SafetensorError, safe_open

from ..storage import Place
from . import index, stream

READ = 2**20
"""bytes at a time, which a processor's cache holds until they are hashed"""


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


class Streamed:
    """A file that is read and hashed at once; its tensors must be asked for as they lie."""

    def __init__(self, path: Place):
        self._source, self._hash, self._came = path.reader(), hashlib.sha256(), 0
        self._unwanted = memoryview(bytearray(READ))

    @contextlib.contextmanager
    def tensors(self) -> Iterator[Passing]:
        """As of `opened`, one after the other."""
        yield Passing(self._fetch)

    def looks(self) -> index.File:
        """Size and SHA-256, once all has been read. Raises OSError, Unreachable."""
        while self._more(self._unwanted):
            pass
        self._source.close()
        return index.File(self._came, self._hash.hexdigest())

    def _fetch(self, begin: int, into: memoryview) -> None:
        while self._came < begin:
            self._fill(self._unwanted[: begin - self._came])
        self._fill(into)

    def _fill(self, into: memoryview) -> None:
        while into:
            count = self._more(into[:READ])
            if not count:
                raise SafetensorError("it is cut short")
            into = into[count:]

    def _more(self, into: memoryview) -> int:
        """The next bytes, hashed while the processor has them at hand; how many they are."""
        count = self._source.readinto(into)
        self._hash.update(into[:count])
        self._came += count
        return count


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

    _key = ""
    _newest = _memory = torch.empty(0, dtype=torch.uint8)

    def get_tensor(self, key: str) -> torch.Tensor:
        if key != self._key:
            self._key, self._newest = key, super().get_tensor(key)
        return self._newest

    def rows(self, key: str, first: int, last: int) -> torch.Tensor:
        return self.get_tensor(key)[first:last]

    def put(self, key: str, there: torch.Tensor) -> bool:
        """Read all of a tensor to where it belongs, if bytes can go ``there``; whether they did."""
        entry = self._entry(key)
        as_it_lies = there.is_contiguous() and there.device.type == "cpu"
        if key == self._key or there.dtype != entry.dtype or not as_it_lies:
            return False
        self._fetch(entry.begin, stream.bytes_of(there))
        return True

    def _values(self, dtype: torch.dtype, shape: tuple[int, ...], begin: int) -> torch.Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        if len(self._memory) < size:
            self._memory = torch.empty(size, dtype=torch.uint8)
        self._fetch(begin, stream.bytes_of(self._memory[:size]))
        return self._memory[:size].view(dtype).view(shape)


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
