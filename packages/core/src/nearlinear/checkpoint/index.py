"""The index of a checkpoint: which tensors it holds, in which files, and what they must look like.

    step-00000100/index.json                  written last: without it the folder is no checkpoint
    step-00000100/rank-00003-of-00016.safetensors

The index is JSON and names every file with its size and SHA-256; files are safetensors. Neither can
carry code.
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
from ..storage import Place
from .pieces import Piece, covers

NAME = "index.json"
FORMAT = 2


@dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint, whole."""

    dtype: str
    """in torch's words, as in float32"""
    shape: tuple[int, ...]
    pieces: dict[str, list[Piece]]
    """its blocks in each file that has some"""


def key(name: str, block: int) -> str:
    """What the ``block``-th block of a tensor is called in a file."""
    return f"{name}:{block}" if block else name


@dataclass(frozen=True)
class File:
    """What a file must look like."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Index:
    """All of a checkpoint but its numbers."""

    step: int
    world: int
    """ranks that wrote it"""
    tensors: dict[str, Tensor]
    files: dict[str, File]
    values: dict = field(default_factory=dict)
    """what is no tensor: learning rates, the data's position"""

    def write(self, folder: Place) -> None:
        """Make ``folder`` a checkpoint, from one moment to the next."""
        text = json.dumps({"format": FORMAT} | dataclasses.asdict(self), separators=(",", ":"))
        (folder / NAME).put(text.encode())


def read(folder) -> Index:
    """The index of the checkpoint in ``folder``. Raises CheckpointError."""
    folder = storage.at(folder)
    path = folder / NAME
    try:
        text = path.read()
    except FileNotFoundError:
        what = "is no checkpoint, or was not finished" if folder.exists() else "does not exist"
        raise CheckpointError(f"{folder} {what}: there is no {path.name} in it") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error}): {_REMEDY}") from None
    try:
        data = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read ({error}): {_REMEDY}") from None
    if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
        raise CheckpointError(f"{path} is not of format {FORMAT}: use the version that wrote it")
    try:
        return _of(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} does not make sense ({error!r}): {_REMEDY}") from None


_REMEDY = "delete its folder to go back to the checkpoint before it"


def _of(data: dict) -> Index:
    files = {_plain(name): File(int(f["bytes"]), str(f["sha256"]))
             for name, f in data["files"].items()}  # fmt: skip
    tensors = {}
    for name, entry in data["tensors"].items():
        pieces = {
            file: [Piece(_sizes(piece["offset"]), _sizes(piece["shape"])) for piece in blocks]
            for file, blocks in entry["pieces"].items()
        }
        shape = _sizes(entry["shape"])
        parts = itertools.chain.from_iterable(pieces.values())
        if not pieces.keys() <= files.keys() or not covers(shape, parts):
            raise ValueError(f"parts of {name} are missing")
        tensors[name] = Tensor(str(entry["dtype"]), shape, pieces)
    return Index(int(data["step"]), int(data["world"]), tensors, files, dict(data["values"]))


def _sizes(values) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


def _plain(name: str) -> str:
    """``name`` if it names a file of the folder itself."""
    if name != Path(name).name or name.startswith("."):
        raise ValueError(f"{name!r} is no file of this folder")
    return name


def missing(folder: Place, found: Index) -> str:
    """What of a checkpoint's files is not there, or cut short, in words; empty: nothing."""
    there = folder.sizes()
    for name, file in found.files.items():
        if name not in there:
            return f"{name} is missing"
        if there[name] != file.bytes:
            return f"{name} has {there[name]} bytes instead of {file.bytes}"
    return ""


def check_content(path: Place, file: File, looks: Callable[[], File] | None = None) -> None:
    """Raise CheckpointError unless the file's bytes are those that were written.

    ``looks()``: what they are, from who reads them anyhow.
    """
    try:
        found = looks() if looks else digest(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): {_REMEDY}") from None
    if found != file:
        raise CheckpointError(f"{path} has changed since it was written: {_REMEDY}")


def digest(path) -> File:
    """What a file looks like."""
    found, size = hashlib.sha256(), 0
    for chunk in storage.at(path).stream():
        found.update(chunk)
        size += len(chunk)
    return File(size, found.hexdigest())
