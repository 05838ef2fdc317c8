"""What is in a checkpoint, from its index alone: step, layout, tensors, bytes, the largest ones."""

from __future__ import annotations

import math

import torch

from .. import storage
from ..errors import CheckpointError
from ..storage import Place
from . import about, index
from .index import Index, Tensor

LARGEST = 5
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def folders(folder) -> list[Place]:
    """``folder``, if it is a checkpoint, or those in it: a run's, oldest first.

    What was never finished is not among them. Raises CheckpointError where there is none.
    """
    folder = storage.at(folder)
    if index.NAME in folder.sizes():
        return [folder]
    steps = (place for place in folder.folders() if place.name.startswith("step-"))
    found = [place for place in steps if index.NAME in place.sizes()]
    if not found:
        index.read(folder)  # raises
        raise CheckpointError(f"{folder} holds no checkpoint")
    return found


def summary(folder: Place, found: Index) -> dict:
    """What `text` says, as JSON can carry it."""
    rooms: dict[str, dict] = {}
    dtypes: dict[str, int] = {}
    for name, tensor in found.tensors.items():
        room = rooms.setdefault(name.partition("/")[0], {"tensors": 0, "elements": 0, "bytes": 0})
        room["tensors"] += 1
        room["elements"] += math.prod(tensor.shape)
        room["bytes"] += size(tensor)
        dtypes[tensor.dtype] = dtypes.get(tensor.dtype, 0) + size(tensor)
    by_size = sorted(found.tensors.items(), key=lambda item: (-size(item[1]), item[0]))
    return {
        "folder": str(folder),
        "step": found.step,
        "world": found.world,
        "layout": about.layout_of(found),
        "model": about.model_of(found),
        "files": len(found.files),
        "bytes": sum(file.bytes for file in found.files.values()),
        "tensors": rooms,
        "bytes_by_dtype": dtypes,
        "largest": [
            {"name": name, "dtype": tensor.dtype, "shape": list(tensor.shape),
             "bytes": size(tensor)} for name, tensor in by_size[:LARGEST]
        ],
        "values": sorted(found.values),
    }  # fmt: skip


def text(told: dict) -> str:
    """A `summary` for people."""
    layout = told["layout"]
    degrees = ", ".join(f"{axis} {n}" for axis, n in layout.items() if n > 1) if layout else ""
    kind = (told["model"] or {}).get("architectures", ["not told"])[0]
    ranks = f"{told['world']} rank" + "s" * (told["world"] != 1)
    lines = [
        f"{told['folder']}: after step {told['step']}, saved by {ranks}"
        + (f" ({degrees})" if degrees else ""),
        f"  model      {kind}",
        f"  files      {told['files']}, {in_units(told['bytes'])}",
    ]
    for room, has in told["tensors"].items():
        lines.append(
            f"  {room:<10} {has['tensors']} tensors, {has['elements']:,} numbers, "
            f"{in_units(has['bytes'])}"
        )
    dtypes = ", ".join(f"{name} {in_units(n)}" for name, n in told["bytes_by_dtype"].items())
    lines.append(f"  dtypes     {dtypes}")
    lines.append(f"  also       {', '.join(told['values']) or 'nothing'}")
    lines.append("  largest")
    for each in told["largest"]:
        shape = " x ".join(map(str, each["shape"])) or "one number"
        lines.append(f"    {in_units(each['bytes']):>10}  {each['name']}  {shape} {each['dtype']}")
    return "\n".join(lines)


def size(tensor: Tensor) -> int:
    """Bytes of a whole tensor."""
    return math.prod(tensor.shape) * getattr(torch, tensor.dtype).itemsize


def in_units(count: float) -> str:
    """A number of bytes for people."""
    for unit in _UNITS:
        if count < 1024 or unit == _UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
