"""Index of a checkpoint: its tensors, the files that hold their shards, and file hashes.

    step-00000100/index.json                  written last; a folder without it is no checkpoint
    step-00000100/rank-00003-of-00016.safetensors

The index is JSON and lists the size and SHA-256 of every safetensors file. Neither format can carry
code.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .. import storage
from ..errors import CheckpointError
from ..storage import StoragePath
from .tensor_shards import TensorShard, covers

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
