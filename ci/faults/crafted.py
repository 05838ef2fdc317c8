"""Crafted indexes: changes that somebody with write access to a checkpoint could make.

Every change is sealed with a matching hash of the index, so that only the schema, the tiling of the
tensors, and the binding between index and files can refuse it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from nearlinear.checkpoint import index, index_schema, sealed_json

Change = Callable[[dict, random.Random], object]

JUNK: list[Any] = [
    None, True, -1, 0, 1, 2**63, 10**400, 1e308, float("nan"), float("inf"), "", "x" * 10_000,
    "\ud800", "\0", [], [[[]]], {}, {"": {}}, [0] * 40, -0.5,
]  # fmt: skip


def seal(data: dict, version: int = index_schema.FORMAT) -> bytes:
    """Return an index with the content of ``data`` and a matching hash."""
    rest = {key: value for key, value in data.items() if key not in ("format", "sha256")}
    return sealed_json.seal(version, rest)


def write_unsealed(folder: Path) -> None:
    """Convert a checkpoint to the older format, without hash of the index and bound files."""
    path = folder / index.NAME
    data = json.loads(path.read_text())
    data.pop("sha256", None)
    data["format"] = index_schema.UNSEALED_FORMAT
    for name, entry in data["files"].items():
        save_file(load_file(folder / name), folder / name, {"format": "pt"})
        found = index.hash_file(folder / name)
        entry |= {"bytes": found.bytes, "sha256": found.sha256}
    path.write_text(json.dumps(data, separators=(",", ":")))


def _tensor(data: dict, rng: random.Random, parts: int = 1) -> dict:
    """Return a random tensor with at least ``parts`` shards."""
    return rng.choice(
        [
            entry
            for _, entry in sorted(data["tensors"].items())
            if sum(map(len, entry["pieces"].values())) >= parts and entry["shape"]
        ]
    )


def _shards(entry: dict) -> list[dict]:
    return [shard for _, listed in sorted(entry["pieces"].items()) for shard in listed]


def _set_offset(value: Callable[[dict, dict], int]) -> Change:
    def change(data: dict, rng: random.Random) -> None:
        entry = _tensor(data, rng)
        shard = rng.choice(_shards(entry))
        shard["offset"][0] = value(entry, shard)

    return change


def _set_shape(value: Callable[[int], Any]) -> Change:
    def change(data: dict, rng: random.Random) -> None:
        shard = rng.choice(_shards(_tensor(data, rng)))
        shard["shape"][0] = value(shard["shape"][0])

    return change


def _overlap(data: dict, rng: random.Random) -> None:
    first, second, *_ = _shards(_tensor(data, rng, 2))
    second["offset"] = list(first["offset"])


def swap_offsets(data: dict, rng: random.Random) -> None:
    """Exchange the offsets of two shards of equal shape: the tiling remains exact."""
    equal = [
        shards
        for _, entry in sorted(data["tensors"].items())
        if len(shards := _shards(entry)) > 1 and shards[0]["shape"] == shards[1]["shape"]
    ]
    first, second, *_ = rng.choice(equal)
    first["offset"], second["offset"] = second["offset"], first["offset"]


def swap_tensors(data: dict, rng: random.Random) -> None:
    """Exchange the files of two tensors that are described alike."""
    names = [name for name in sorted(data["tensors"]) if name.endswith("/exp_avg")]
    name = rng.choice(names)
    one, other = data["tensors"][name], data["tensors"][name + "_sq"]
    one["pieces"], other["pieces"] = other["pieces"], one["pieces"]
    data["tensors"][name], data["tensors"][name + "_sq"] = other, one
    first, second = sorted(data["files"])[:2]
    data["files"][first], data["files"][second] = data["files"][second], data["files"][first]


def _drop_state(suffix: str) -> Change:
    def change(data: dict, rng: random.Random) -> None:
        names = [name for name in sorted(data["tensors"]) if name.endswith(suffix)]
        del data["tensors"][rng.choice(names)]

    return change


def _setting(key: str, value: Any) -> Change:
    return lambda data, rng: data["values"]["optimizer"]["groups"][0].update({key: value})


def _file(key: str, value: Callable[[Any], Any]) -> Change:
    def change(data: dict, rng: random.Random) -> None:
        entry = data["files"][rng.choice(sorted(data["files"]))]
        entry[key] = value(entry[key])

    return change


def _rename_file(new: str) -> Change:
    def change(data: dict, rng: random.Random) -> None:
        old = rng.choice(sorted(data["files"]))
        data["files"][new] = data["files"].pop(old)
        for entry in data["tensors"].values():
            if old in entry["pieces"]:
                entry["pieces"][new] = entry["pieces"].pop(old)

    return change


def _rename_tensor(new: str) -> Change:
    def change(data: dict, rng: random.Random) -> None:
        old = rng.choice(sorted(data["tensors"]))
        data["tensors"][new] = data["tensors"].pop(old)

    return change


def _junk(data: dict, rng: random.Random) -> None:
    """Replace a random value anywhere in the index."""
    place, key = data, rng.choice(sorted(set(data) - {"format", "sha256"}))
    while isinstance(place[key], dict | list) and place[key] and rng.random() < 0.85:
        place = place[key]
        key = rng.choice(sorted(place)) if isinstance(place, dict) else rng.randrange(len(place))
    place[key] = rng.choice(JUNK)


STRUCTURAL: dict[str, Change] = {
    "offset one too large": _set_offset(lambda entry, shard: shard["offset"][0] + 1),
    "negative offset": _set_offset(lambda entry, shard: -1 - shard["offset"][0]),
    "offset out of range": _set_offset(lambda entry, shard: entry["shape"][0]),
    "huge offset": _set_offset(lambda entry, shard: 2**70),
    "overlapping shards": _overlap,
    "shard one row longer": _set_shape(lambda size: size + 1),
    "shard one row shorter": _set_shape(lambda size: size - 1),
    "shard size of a wrong type": _set_shape(str),
    "negative shard": _set_shape(lambda size: -size),
    "tensor of another shape": lambda data, rng: _tensor(data, rng).update(shape=[7, 11]),
    "tensor too large for memory": lambda data, rng: _tensor(data, rng).update(shape=[2**40]),
    "no shards": lambda data, rng: _tensor(data, rng)["pieces"].clear(),
    "shard listed twice": lambda data, rng: [
        listed.append(listed[0]) for listed in _tensor(data, rng)["pieces"].values()
    ],
    "unknown dtype": lambda data, rng: _tensor(data, rng).update(dtype="complex128"),
    "dtype is an attribute of torch": lambda data, rng: _tensor(data, rng).update(dtype="load"),
    "dtype is a list": lambda data, rng: _tensor(data, rng).update(dtype=["float32"]),
    "negative step": lambda data, rng: data.update(step=-5),
    "infinite step": lambda data, rng: data.update(step=float("inf")),
    "text as step": lambda data, rng: data.update(step="2"),
    "step of 400 digits": lambda data, rng: data.update(step=10**400),
    "no ranks": lambda data, rng: data.update(world=0),
    "negative lr": _setting("lr", -1),
    "lr is not a number": _setting("lr", float("nan")),
    "text as lr": _setting("lr", "0.1"),
    "betas above 1": _setting("betas", [2, 0.9]),
    "infinite weight decay": _setting("weight_decay", float("inf")),
    "groups are missing": lambda data, rng: data["values"]["optimizer"].pop("groups"),
    "optimizer is a list": lambda data, rng: data["values"].update(optimizer=[]),
    "unknown parameter": lambda data, rng: data["values"]["optimizer"]["groups"][0].update(
        params=["transformer.unknown"]
    ),
    "first moment is missing": _drop_state("/exp_avg"),
    "second moment is missing": _drop_state("/exp_avg_sq"),
    "step count is missing": _drop_state("/step"),
    "unknown group of tensors": _rename_tensor("modle/transformer.wte.weight"),
    "control characters in a name": _rename_tensor("model/\x1b[2J"),
    "file outside of the folder": _rename_file("../a.safetensors"),
    "absolute path": _rename_file("/etc/passwd"),
    "index as data file": _rename_file(index.NAME),
    "NUL in a file name": _rename_file("a\0.safetensors"),
    "file one byte smaller": _file("bytes", lambda size: size - 1),
    "file of a negative size": _file("bytes", lambda size: -size),
    "hash is not a hash": _file("sha256", lambda digest: digest[:-1]),
    "hash of other content": _file("sha256", lambda digest: digest[::-1]),
    "unknown key": lambda data, rng: data.update(code="print()"),
    "key is missing": lambda data, rng: data.pop(rng.choice(["step", "tensors", "files"])),
    "model of a wrong type": lambda data, rng: data["values"].update(about={"model": 3}),
}
"""Changes that both formats refuse."""
SEMANTIC: dict[str, Change] = {
    "swapped offsets": swap_offsets,
    "swapped tensors": swap_tensors,
    "other step": lambda data, rng: data.update(step=rng.randrange(10**6)),
    "other learning rate": _setting("lr", 0.5),
    "state of a parameter is missing": lambda data, rng: [
        data["tensors"].pop(name) for name in list(data["tensors"]) if "optimizer/lm" in name
        or "optimizer/transformer.ln_f" in name
    ],
    "random value": _junk,
}  # fmt: skip
"""Plausible changes, which only the binding of the files to the index reveals."""


def _million_empty_tensors(text: bytes) -> bytes:
    empty = '"model/%d":{"dtype":"float32","shape":[0],"pieces":{}}'
    tensors = ",".join(empty % number for number in range(10**6)).encode()
    return text.replace(b'"tensors":{', b'"tensors":{' + tensors + b",", 1)


TEXTS: dict[str, Callable[[bytes], bytes]] = {
    "200,000 nested arrays": lambda text: text.replace(
        b'"values":{', b'"values":{"deep":' + b"[" * 200_000 + b"]" * 200_000 + b",", 1
    ),
    "nested arrays without an end": lambda text: b'{"format":3,' + b"[" * 200_000,
    "duplicate key": lambda text: text.replace(b'"step":', b'"step":1,"step":', 1),
    "million empty tensors": _million_empty_tensors,
    "format 2 without hash": lambda text: b'{"format":2,' + text.split(b",", 2)[2],
    "format 99": lambda text: text.replace(b'"format":3', b'"format":99', 1),
    "truncated": lambda text: text[: len(text) // 2],
    "empty": lambda text: b"",
    "not UTF-8": lambda text: b"\xff" + text,
    "white space": lambda text: json.dumps(json.loads(text), indent=1).encode(),
    "data after the end": lambda text: text + b"{}",
    "list": lambda text: b"[" + text + b"]",
}
"""Changes of the encoded index."""
