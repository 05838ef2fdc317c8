"""Content of a checkpoint's index: its types, and the strict schema that it must satisfy.

`parse` validates everything that loading relies on: known keys, dtypes and groups of tensors,
shards that tile every tensor, files that hold their shards, finite settings and complete states of
the optimizer.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import sealed_json
from .shards import TensorShard, tile

FORMAT, UNSEALED_FORMAT = 3, 2
"""Format of written checkpoints, and the older format, which is read as well."""
BINDING = "nearlinear.content"
"""Key of `Index.content` in the metadata of safetensors files."""
MODEL, OPTIMIZER, RANDOM = GROUPS = "model", "optimizer", "random"
"""First parts of tensor names."""
DTYPES = {
    torch.complex64: "C64", torch.float64: "F64", torch.int64: "I64", torch.uint64: "U64",
    torch.float32: "F32", torch.int32: "I32", torch.uint32: "U32",
    torch.bfloat16: "BF16", torch.float16: "F16", torch.int16: "I16", torch.uint16: "U16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Allowed dtypes with their names in safetensors files, wider dtypes first, for alignment."""
MAX_INTEGER, MAX_DIMS = 2**62, 32
_DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
_ADAM, _MOMENTS = ("Adam", "AdamW", "NAdam", "RAdam"), ("exp_avg", "exp_avg_sq")
_LIMITS = {"lr": math.inf, "weight_decay": math.inf, "eps": math.inf, "momentum": math.inf,
           "betas": 1.0}  # fmt: skip
"""Settings of optimizers that are at least 0, and below this limit."""
_SHARD_KEYS = {"offset", "shape"}


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
    content: str = ""
    """SHA-256 of step, world, tensors and values; "" in the older format, which has none."""


def describe(
    step: int, world: int, tensors: Mapping[str, TensorEntry], values: dict
) -> dict[str, Any]:
    """Return the content of an index, except for its files, as JSON-serializable data."""
    return {
        "step": step,
        "world": world,
        "tensors": {
            name: {
                "dtype": entry.dtype,
                "shape": entry.shape,
                "pieces": {
                    file: [{"offset": each.offset, "shape": each.shape} for each in shards]
                    for file, shards in entry.pieces.items()
                },
            }
            for name, entry in tensors.items()
        },
        "values": values,
    }


def content_hash(described: Mapping[str, Any]) -> str:
    """Return `Index.content` of the result of `describe`."""
    parts = {name: described[name] for name in ("step", "world", "tensors", "values")}
    return hashlib.sha256(sealed_json.encode(parts)).hexdigest()


def parse(data: dict[str, Any], sealed: bool) -> Index:
    """Convert the data of an index. Raises ValueError for anything that is never written.

    Args:
        data: The JSON object without its format.
        sealed: True for a document with a verified hash of itself.
    """
    keys = {"step", "world", "tensors", "files", "values"} | ({"sha256"} if sealed else set())
    _check_keys(data, keys, "the index")
    files = {
        _check_file_name(name): _parse_file(entry, f"file {name}")
        for name, entry in _as_dict(data["files"], "files").items()
    }
    tensors = {
        _check_tensor_name(name): _parse_tensor(entry, name, files.keys())
        for name, entry in _as_dict(data["tensors"], "tensors").items()
    }
    values = _as_dict(data["values"], "values")
    _check_file_sizes(files, tensors)
    _check_values(values)
    _check_optimizer(values.get(OPTIMIZER), tensors)
    step = _integer(data["step"], "step")
    world = _integer(data["world"], "world", least=1)
    return Index(step, world, tensors, files, values, content_hash(data) if sealed else "")


def _parse_file(entry: Any, label: str) -> FileEntry:
    _check_keys(entry, {"bytes", "sha256"}, label)
    if not isinstance(entry["sha256"], str) or not re.fullmatch("[0-9a-f]{64}", entry["sha256"]):
        raise ValueError(f"the hash of {label} is not a SHA-256")
    return FileEntry(_integer(entry["bytes"], label), entry["sha256"])


def _parse_tensor(entry: Any, name: str, files: Set[str]) -> TensorEntry:
    _check_keys(entry, {"dtype", "shape", "pieces"}, name)
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in _DTYPE_NAMES:
        raise ValueError(
            f"{name} has dtype {str(entry['dtype'])[:40]!r}; allowed are {', '.join(_DTYPE_NAMES)}"
        )
    shape, pieces = _integers(entry["shape"], name), {}
    for file, listed in _as_dict(entry["pieces"], name).items():
        if file not in files:
            raise ValueError(f"{name} is in {file[:80]!r}, which is not in the list of files")
        if not isinstance(listed, list) or not listed:
            raise ValueError(f"{name} has no shards in {file}")
        pieces[file] = [_parse_shard(shard, name, shape) for shard in listed]
    if math.prod(shape) > MAX_INTEGER:
        raise ValueError(f"{name} has too many elements: shape {list(shape)}")
    try:
        complete = tile(shape, [shard for listed in pieces.values() for shard in listed])
    except ValueError as error:
        raise ValueError(f"{name} is {error}") from None
    if not complete:
        raise ValueError(f"the shards of {name} overlap, or do not cover the tensor")
    return TensorEntry(entry["dtype"], shape, pieces)


def _parse_shard(shard: Any, name: str, shape: tuple[int, ...]) -> TensorShard:
    if type(shard) is not dict or shard.keys() != _SHARD_KEYS:
        raise ValueError(f"a shard of {name} has not exactly the keys offset and shape")
    offset, size = shard["offset"], shard["shape"]
    inside = type(offset) is list and type(size) is list and len(offset) == len(size) == len(shape)
    if inside:  # an index may have a hundred thousand shards
        for first, count, whole in zip(offset, size, shape, strict=True):
            if type(first) is not int or type(count) is not int:
                inside = False
            elif not 0 <= first < first + count <= whole:
                inside = False
    if not inside:
        raise ValueError(f"a shard of {name} is outside of the tensor")
    return TensorShard(tuple(offset), tuple(size))


def _check_file_sizes(files: Mapping[str, FileEntry], tensors: Mapping[str, TensorEntry]) -> None:
    """Raise ValueError if a file is too small for its shards: loading allocates their memory."""
    needed = dict.fromkeys(files, 0)
    for tensor in tensors.values():
        itemsize = _DTYPE_NAMES[tensor.dtype].itemsize
        for file, shards in tensor.pieces.items():
            needed[file] += itemsize * sum(math.prod(shard.shape) for shard in shards)
    for file, size in needed.items():
        if size > files[file].bytes:
            raise ValueError(f"{file} has {files[file].bytes} bytes, and its shards {size}")


def _check_values(values: Mapping[str, Any]) -> None:
    """Check the values that this package stores itself; further objects may store any JSON."""
    for text in _texts(values):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError("values contain a text that is not Unicode") from None
    for name in ("loss_scaler", "about"):
        if name in values and not all(map(math.isfinite, _numbers(_as_dict(values[name], name)))):
            raise ValueError(f"values.{name} contains a number that is not finite")
    layout = values.get("about", {}).get("layout") or {}
    for axis, degree in _as_dict(layout, "values.about.layout").items():
        _integer(degree, f"values.about.layout.{axis}", least=1)
    if not isinstance(values.get("about", {}).get("model", {}), dict | None):
        raise ValueError("values.about.model is not an object")


def _check_optimizer(settings: Any, tensors: Mapping[str, TensorEntry]) -> None:
    """Check the settings of the optimizer, and that the state of every parameter is complete."""
    states: dict[str, dict[str, TensorEntry]] = {}
    for full, entry in tensors.items():
        group, _, rest = full.partition("/")
        if group == OPTIMIZER:
            name, _, key = rest.rpartition("/")
            states.setdefault(name, {})[key] = entry
    if settings is None:
        if states:
            raise ValueError("there is optimizer state without the settings of the optimizer")
        return
    _check_keys(settings, {"kind", "groups"}, "values.optimizer")
    if not isinstance(settings["kind"], str) or not isinstance(settings["groups"], list):
        raise ValueError("values.optimizer has no kind or no list of groups")
    known: set[str] = set()
    for group in settings["groups"]:
        names = _as_dict(group, "a parameter group").get("params")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("a parameter group of the optimizer has no list of parameters")
        if len(set(names)) < len(names) or known & set(names):
            raise ValueError("a parameter is in the groups of the optimizer twice")
        known |= set(names)
        _check_settings(group)
    for name, state in states.items():
        if name not in known:
            raise ValueError(f"{name} has optimizer state, and is not a parameter of the optimizer")
        if settings["kind"] in _ADAM:
            for key in (*_MOMENTS, "step"):
                if key not in state:
                    raise ValueError(f"{name} has no {key} in the optimizer's state")
            shape = tensors[f"{MODEL}/{name}"].shape if f"{MODEL}/{name}" in tensors else None
            for key in _MOMENTS:
                if shape is not None and state[key].shape != shape:
                    raise ValueError(f"{key} of {name} does not have the parameter's shape")


def _check_settings(group: Mapping[str, Any]) -> None:
    for key, value in group.items():
        if not all(map(math.isfinite, _numbers(value))):
            raise ValueError(f"{key} of the optimizer is not finite")
        if key in _LIMITS:
            numbers = value if key == "betas" and isinstance(value, list) else [value]
            for number in numbers:
                if isinstance(number, bool) or not isinstance(number, int | float):
                    raise ValueError(f"{key} of the optimizer is not a number")
                if not 0 <= number < _LIMITS[key]:
                    raise ValueError(f"{key} of the optimizer is {number}")


def _numbers(value: Any) -> Iterator[float]:
    """Yield the numbers in JSON data. Raises ValueError for integers of more than 62 bits."""
    if isinstance(value, bool):
        return
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise ValueError("an integer has more than 62 bits")
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _numbers(each)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value:
            yield from _texts(each)
        for each in value.values() if isinstance(value, dict) else ():
            yield from _texts(each)


def _as_dict(value: Any, label: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{label} is not an object")
    return value


def _check_keys(value: Any, expected: Set[str], label: str) -> None:
    for key in expected ^ _as_dict(value, label).keys():
        raise ValueError(f"{label} has {'no' if key in expected else 'an unknown key'} {key[:80]}")


def _integer(value: Any, label: str, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= MAX_INTEGER:
        raise ValueError(f"{label}: {str(value)[:40]!r} is not an integer of at least {least}")
    return value


def _integers(values: Any, label: str, least: int = 0) -> tuple[int, ...]:
    if not isinstance(values, list) or len(values) > MAX_DIMS:
        raise ValueError(f"{label} has no list of at most {MAX_DIMS} integers")
    return tuple(_integer(value, label, least) for value in values)


def _check_file_name(name: str) -> str:
    """Return ``name``. Raise ValueError unless it names a file directly inside of the folder."""
    if name != Path(name).name or not name.endswith(".safetensors") or name.startswith("."):
        raise ValueError(f"{name[:80]!r} is no safetensors file of this folder")
    if not name.isprintable() or len(name) > 255:
        raise ValueError(f"{name[:80]!r} is not the name of a file")
    return name


def _check_tensor_name(name: str) -> str:
    group, _, rest = name.partition("/")
    if group not in GROUPS or not rest or not name.isprintable():
        raise ValueError(f"{name[:80]!r} is in none of the groups {', '.join(GROUPS)}")
    return name
