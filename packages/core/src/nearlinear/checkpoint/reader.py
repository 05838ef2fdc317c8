"""Read tensors of safetensors files: memory-mapped, by byte ranges, or streamed and hashed.

`open_tensors` gives random access to some tensors of a file, without a check of the content.
`HashingReader` reads a whole file once, from its beginning, and hashes it on the way.
`CheckpointReader` reads whole tensors of a checkpoint in one process.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from .. import storage
from ..errors import CheckpointDamaged
from ..storage import StoragePath
from . import index, safetensors_file
from .index_schema import FileEntry, shard_key
from .shards import TensorShard

READ = 2**20
"""Bytes per read: they stay in the processor's cache until they are hashed."""


def open_tensors(path: StoragePath) -> contextlib.AbstractContextManager[Any]:
    """Open a file with the interface of safetensors' `safe_open`, as a context manager.

    Raises OSError, StorageUnreachable, and SafetensorError for a file of another format.
    """
    if path.path is not None:
        return safe_open(path.path, "pt")

    def fetch(begin: int, into: memoryview) -> None:
        at = 0
        for chunk in path.stream(begin, begin + len(into)):
            into[at : at + len(chunk)] = chunk
            at += len(chunk)

    return contextlib.nullcontext(LazyTensors(fetch))


class HashingReader:
    """A file that is read and hashed in one pass. Read its tensors in file order."""

    def __init__(self, path: StoragePath):
        self._source, self._hash, self._position = path.reader(), hashlib.sha256(), 0
        self._discarded = memoryview(bytearray(READ))

    @contextlib.contextmanager
    def tensors(self) -> Iterator[SequentialTensors]:
        """Open the tensors of the file, to be read in file order."""
        yield SequentialTensors(self._fetch)

    def finish(self) -> FileEntry:
        """Read to the end; return size and SHA-256. Raises OSError, StorageUnreachable."""
        while self._read(self._discarded):
            pass
        self._source.close()
        return FileEntry(self._position, self._hash.hexdigest())

    def _fetch(self, begin: int, into: memoryview) -> None:
        while self._position < begin:
            self._fill(self._discarded[: begin - self._position])
        self._fill(into)

    def _fill(self, into: memoryview) -> None:
        while into:
            count = self._read(into[:READ])
            if not count:
                raise SafetensorError("file is truncated")
            into = into[count:]

    def _read(self, into: memoryview) -> int:
        """Read and hash the next bytes; return their number."""
        count = self._source.readinto(into)
        self._hash.update(into[:count])
        self._position += count
        return count


class LazyTensors:
    """The interface of `safe_open` on ``fetch(begin, into)``, which copies bytes of a file.

    Raises SafetensorError, and the errors of ``fetch``.
    """

    def __init__(self, fetch: Callable[[int, memoryview], None]):
        self._fetch = fetch
        first = bytearray(safetensors_file.LENGTH_BYTES)
        fetch(0, memoryview(first))
        try:
            header = bytearray(safetensors_file.header_length(first))
            fetch(safetensors_file.LENGTH_BYTES, memoryview(header))
            self._entries, self._metadata = safetensors_file.parse_header(bytes(header))
        except ValueError as error:
            raise SafetensorError(f"{error}") from None

    def metadata(self) -> dict[str, str]:
        """Return the texts stored in the header."""
        return self._metadata

    def keys(self) -> list[str]:
        """Return the names of the tensors in file order."""
        return list(self._entries)

    def get_tensor(self, key: str) -> torch.Tensor:
        """Read a whole tensor."""
        entry = self._entry(key)
        return self._values(entry.dtype, entry.shape, entry.begin)

    def get_slice(self, key: str) -> TensorSlice:
        """Return a tensor of at least one dim that is read when it is indexed."""
        return TensorSlice(self, key, self._entry(key))

    def rows(self, key: str, first: int, last: int) -> torch.Tensor:
        """Read rows ``first`` to ``last`` (exclusive) of the first dim."""
        entry = self._entry(key)
        row = torch.Size(entry.shape[1:]).numel() * entry.dtype.itemsize
        shape = (last - first, *entry.shape[1:])
        return self._values(entry.dtype, shape, entry.begin + first * row)

    def _entry(self, key: str) -> safetensors_file.HeaderEntry:
        if key not in self._entries:
            raise SafetensorError(f"File does not contain tensor {key}")
        return self._entries[key]

    def _values(self, dtype: torch.dtype, shape: tuple[int, ...], begin: int) -> torch.Tensor:
        values = torch.empty(shape, dtype=dtype)
        self._fetch(begin, safetensors_file.tensor_bytes(values))
        return values


class SequentialTensors(LazyTensors):
    """Tensors of a streamed file, each read whole and kept until the next one is read."""

    _key = ""
    _newest = _buffer = torch.empty(0, dtype=torch.uint8)

    def get_tensor(self, key: str) -> torch.Tensor:
        if key != self._key:
            self._key, self._newest = key, super().get_tensor(key)
        return self._newest

    def rows(self, key: str, first: int, last: int) -> torch.Tensor:
        return self.get_tensor(key)[first:last]

    def read_into(self, key: str, target: torch.Tensor) -> bool:
        """Read a whole tensor directly into ``target``. Return False if that is not possible.

        ``target`` must be a contiguous CPU tensor of the same dtype.
        """
        entry = self._entry(key)
        plain_memory = target.is_contiguous() and target.device.type == "cpu"
        if key == self._key or target.dtype != entry.dtype or not plain_memory:
            return False
        self._fetch(entry.begin, safetensors_file.tensor_bytes(target))
        return True

    def _values(self, dtype: torch.dtype, shape: tuple[int, ...], begin: int) -> torch.Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        if len(self._buffer) < size:
            self._buffer = torch.empty(size, dtype=torch.uint8)
        self._fetch(begin, safetensors_file.tensor_bytes(self._buffer[:size]))
        return self._buffer[:size].view(dtype).view(shape)


class TensorSlice:
    """A tensor of `LazyTensors` that is read when it is indexed."""

    def __init__(self, values: LazyTensors, key: str, entry: safetensors_file.HeaderEntry):
        self.values, self.key, self.entry = values, key, entry

    def get_dtype(self) -> str:
        """Return the dtype as named in the header."""
        return safetensors_file.DTYPES[self.entry.dtype]

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""
        return list(self.entry.shape)

    def __getitem__(self, inside: tuple[slice, ...]) -> torch.Tensor:
        first, *others = inside
        return self.values.rows(self.key, first.start, first.stop)[:, *others]


class CheckpointReader:
    """Reads whole tensors of a checkpoint, one at a time, without the ranks that wrote it.

    The content of each file is checked before its first use, unless ``checked`` is True. Raises
    CheckpointError.
    """

    def __init__(self, folder, checked: bool = False):
        self.folder, self.index = storage.as_path(folder), index.read(folder)
        if fault := index.find_missing_file(self.folder, self.index):
            raise CheckpointDamaged(
                f"checkpoint {folder} is incomplete: {fault}; use another checkpoint"
            )
        self._checked = set(self.index.files) if checked else set()

    def tensor(self, name: str) -> torch.Tensor:
        """Read a whole tensor."""
        return self.shard(name, TensorShard.full(self.index.tensors[name].shape))

    def shard(self, name: str, shard: TensorShard) -> torch.Tensor:
        """Read a shard of a tensor, whose values may lie in several files."""
        entry = self.index.tensors[name]
        values = torch.empty(shard.shape, dtype=getattr(torch, entry.dtype))
        for file, saved_shards in entry.pieces.items():
            for number, saved in enumerate(saved_shards):
                common = saved.intersect(shard)
                if common is not None:
                    key = shard_key(name, number)
                    values[common.slices_in(shard)] = self._read(file, key, common.slices_in(saved))
        return values

    def _read(self, file: str, key: str, inside: tuple[slice, ...]) -> torch.Tensor:
        new = file not in self._checked
        if new:
            index.check_content(self.folder / file, self.index.files[file])
            self._checked.add(file)
        try:
            with open_tensors(self.folder / file) as values:
                for fault in index.header_faults(file, values, self.index) if new else ():
                    raise CheckpointDamaged(f"{self.folder} is damaged: {fault}")
                return values.get_slice(key)[inside] if inside else values.get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise CheckpointDamaged(f"{self.folder / file} cannot be read: {error}") from None
