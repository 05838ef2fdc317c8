"""Index of a checkpoint: its tensors, the files that hold their shards, and file hashes.

    step-00000100/index.json                  written last; a folder without it is no checkpoint
    step-00000100/rank-00003-of-00016.safetensors

The index is JSON and lists the size and SHA-256 of every safetensors file. Neither format can carry
code. `local_tensor_shards` lists the shards that a rank holds; `assign_writers` chooses the rank
that writes each shard.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
from torch.distributed.tensor import DTensor

from .. import _torch, storage
from ..errors import CheckpointError
from ..fsdp.model_state import DimSplit
from ..storage import StoragePath

NAME = "index.json"
FORMAT = 2
_REMEDY = "delete its folder to resume from the previous checkpoint"


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a checkpoint. The field names are part of the format."""

    dtype: str
    """Name of the torch dtype, as in "float32"."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    pieces: dict[str, list[TensorShard]]
    """Shards of the tensor by file name."""


def shard_key(name: str, number: int) -> str:
    """Return the key in a safetensors file of shard ``number`` of tensor ``name``."""
    return f"{name}:{number}" if number else name


@dataclass(frozen=True)
class FileEntry:
    """Expected size and SHA-256 of a file. The field names are part of the format."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Index:
    """Contents of index.json. The field names are part of the format."""

    step: int
    """Step after which the state was saved."""
    world: int
    """Number of ranks that saved."""
    tensors: dict[str, TensorEntry]
    files: dict[str, FileEntry]
    values: dict = field(default_factory=dict)
    """State other than tensors: learning rates, position in the data, model config."""

    def write(self, folder: StoragePath) -> None:
        """Write the index atomically, which makes ``folder`` a checkpoint."""
        text = json.dumps({"format": FORMAT} | dataclasses.asdict(self), separators=(",", ":"))
        (folder / NAME).put(text.encode())


def read(folder) -> Index:
    """Read the index of the checkpoint in ``folder``. Raises CheckpointError."""
    folder = storage.as_path(folder)
    path = folder / NAME
    try:
        text = path.read()
    except FileNotFoundError:
        state = "is not a complete checkpoint" if folder.exists() else "does not exist"
        raise CheckpointError(
            f"{folder} {state}: {path.name} is missing; choose a folder written by nl.save"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error}): {_REMEDY}") from None
    try:
        data = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}): {_REMEDY}") from None
    version = data.pop("format", None) if isinstance(data, dict) else None
    if version != FORMAT:
        raise CheckpointError(
            f"{path} has format {version!r}, and this version reads format {FORMAT}: load it with "
            "the version of nearlinear that wrote it"
        )
    try:
        return _parse(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is invalid ({error!r}): {_REMEDY}") from None


def _parse(data: dict) -> Index:
    files = {_check_file_name(name): FileEntry(int(f["bytes"]), str(f["sha256"]))
             for name, f in data["files"].items()}  # fmt: skip
    tensors = {}
    for name, entry in data["tensors"].items():
        shards = {
            file: [TensorShard(_ints(shard["offset"]), _ints(shard["shape"])) for shard in listed]
            for file, listed in entry["pieces"].items()
        }
        shape = _ints(entry["shape"])
        all_shards = itertools.chain.from_iterable(shards.values())
        if not shards.keys() <= files.keys() or not covers(shape, all_shards):
            raise ValueError(f"shards of {name} are missing")
        tensors[name] = TensorEntry(str(entry["dtype"]), shape, shards)
    return Index(int(data["step"]), int(data["world"]), tensors, files, dict(data["values"]))


def _ints(values) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


def _check_file_name(name: str) -> str:
    """Return ``name``. Raise ValueError unless it names a file directly inside of the folder."""
    if name != Path(name).name or name.startswith("."):
        raise ValueError(f"{name!r} is no file of this folder")
    return name


def find_missing_file(folder: StoragePath, found: Index) -> str:
    """Return a message about the first missing or truncated file, or "" if there is none."""
    sizes = folder.file_sizes()
    for name, file in found.files.items():
        if name not in sizes:
            return f"{name} is missing"
        if sizes[name] != file.bytes:
            return f"{name} has {sizes[name]} bytes instead of {file.bytes}"
    return ""


def check_content(
    path: StoragePath, file: FileEntry, read_hash: Callable[[], FileEntry] | None = None
) -> None:
    """Raise CheckpointError unless the size and SHA-256 of a file are those of ``file``.

    Args:
        path: The file.
        file: Entry in the index.
        read_hash: Returns the digest that the caller computed while reading, to avoid a second
            pass over the file.
    """
    try:
        found = read_hash() if read_hash else hash_file(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): {_REMEDY}") from None
    if found != file:
        raise CheckpointError(f"{path} has changed since it was written: {_REMEDY}")


def hash_file(path) -> FileEntry:
    """Return the size and SHA-256 of a file."""
    digest, size = hashlib.sha256(), 0
    for chunk in storage.as_path(path).stream():
        digest.update(chunk)
        size += len(chunk)
    return FileEntry(size, digest.hexdigest())


@dataclass(frozen=True, order=True)
class TensorShard:
    """A rectangular block of a tensor. The field names are part of the checkpoint format."""

    offset: tuple[int, ...]
    """Index of the first element, per dim."""
    shape: tuple[int, ...]
    """Size of the block, per dim."""

    def intersect(self, other: TensorShard) -> TensorShard | None:
        """Return the intersection of two shards of the same tensor, or None if it is empty."""
        first = tuple(map(max, self.offset, other.offset))
        last = tuple(
            min(a + n, b + m)
            for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(end - begin for begin, end in zip(first, last, strict=True))
        return TensorShard(first, shape) if all(size > 0 for size in shape) else None

    @classmethod
    def full(cls, shape: Iterable[int]) -> TensorShard:
        """Return the shard that covers a whole tensor of ``shape``."""
        shape = tuple(shape)
        return cls((0,) * len(shape), shape)

    def slices_in(self, outer: TensorShard) -> tuple[slice, ...]:
        """Return the slices of this shard in the values of ``outer``, which contains it."""
        starts = [mine - theirs for mine, theirs in zip(self.offset, outer.offset, strict=True)]
        return tuple(slice(at, at + n) for at, n in zip(starts, self.shape, strict=True))


def local_tensor_shards(
    tensor: torch.Tensor, splits: Sequence[DimSplit] = ()
) -> dict[TensorShard, torch.Tensor]:
    """Return the shards of a tensor on this rank, each with a view of its memory.

    A shard of a fused projection consists of several blocks. A rank without rows, as with more
    ranks than rows, has no shard.

    Args:
        tensor: A DTensor, or a tensor that is whole or divided by ``splits``.
        splits: Tensor- and expert-parallel divisions applied before the tensor was sharded.
    """
    values = tensor.detach()
    local = TensorShard.full(tensor.shape)
    if isinstance(tensor, DTensor):
        shape, offset = _torch.local_block(tensor)
        values, local = cast(DTensor, values).to_local(), TensorShard(tuple(offset), tuple(shape))
    found = {local: values}
    for split in splits:
        found = {
            shard: part
            for block, part in found.items()
            for shard, part in _undo(split, block, part)
        }
    return {shard: part for shard, part in found.items() if 0 not in shard.shape}


def _undo(
    split: DimSplit, block: TensorShard, values: torch.Tensor
) -> Iterator[tuple[TensorShard, torch.Tensor]]:
    """Yield the blocks of ``values`` with their offsets in the tensor before ``split``."""
    dim, begin = split.dim, block.offset[split.dim]
    end, position = begin + block.shape[dim], 0
    for first, count in split.ranges:
        low, high = max(begin, position), min(end, position + count)
        if low < high:
            offset, shape = list(block.offset), list(block.shape)
            offset[dim], shape[dim] = first + low - position, high - low
            shard = TensorShard(tuple(offset), tuple(shape))
            yield shard, values.narrow(dim, low - begin, high - low)
        position += count


ShardSizes = Sequence[tuple[str, TensorShard, int]]
"""Tensor name, shard, and bytes of every shard of one rank."""


def assign_writers(ranks: Sequence[ShardSizes]) -> list[set[tuple[str, TensorShard]]]:
    """Return the shards that each rank writes: every shard once, with bytes spread evenly.

    Replicas hold the same shards. The result is deterministic, so that all ranks compute the same.
    """
    holders: dict[tuple[str, TensorShard], list[int]] = {}
    sizes: dict[tuple[str, TensorShard], int] = {}
    for rank, held in enumerate(ranks):
        for name, shard, size in held:
            holders.setdefault((name, shard), []).append(rank)
            sizes[name, shard] = size
    load = [0] * len(ranks)
    assigned: list[set[tuple[str, TensorShard]]] = [set() for _ in ranks]
    for shard in sorted(sizes, key=lambda shard: (-sizes[shard], shard)):
        rank = min(holders[shard], key=lambda rank: (load[rank], rank))
        load[rank] += sizes[shard]
        assigned[rank].add(shard)
    return assigned


def covers(shape: Iterable[int], shards: Iterable[TensorShard]) -> bool:
    """Return True if disjoint ``shards`` cover a tensor of ``shape``."""
    return sum(math.prod(shard.shape) for shard in shards) == math.prod(shape)
