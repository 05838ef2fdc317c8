"""Description of a checkpoint: model config, layout, and a summary of its tensors.

The model config and the layout are stored under ``values["about"]`` of the index. Checkpoints
without them load normally, but an export needs the model config from elsewhere.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from .. import storage
from ..config import train as train_config
from ..errors import CheckpointError
from ..fsdp.model_state import runtime_of
from ..storage import StoragePath
from . import index
from .hf import adapters, meta_model
from .index_schema import Index, TensorEntry

KEY = "about"
RUN_CONFIG = "config.toml"
"""The config in a run folder."""
AXES = ("pipeline", "replicate", "shard", "tensor", "context", "expert")
NUM_LARGEST = 5
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def describe_run(model: nn.Module) -> dict:
    """Return model config, mesh degrees and adapters to store under ``values["about"]``."""
    mesh = runtime_of(model).mesh
    layout = {axis: getattr(mesh, axis) for axis in AXES}
    described = {"model": meta_model.config_dict(model), "layout": layout}
    settings = adapters.adapter_settings(model)
    return described if settings is None else described | {adapters.KEY: settings}


def model_config(found: Index) -> dict | None:
    """Return the config.json of the saved model, or None if it was not stored."""
    return _stored_description(found).get("model")


def layout(found: Index) -> dict[str, int] | None:
    """Return the parallel degrees of the run that saved, or None if they were not stored."""
    return _stored_description(found).get("layout")


def _stored_description(found: Index) -> dict:
    stored = found.values.get(KEY)
    return stored if isinstance(stored, dict) else {}


def find_checkpoints(folder) -> list[StoragePath]:
    """Return ``folder`` if it is a checkpoint, or the checkpoints in it, oldest first.

    The checkpoints of a run folder are those of its config.toml. Unfinished checkpoints are left
    out. Raises CheckpointError if there is no checkpoint.
    """
    folder = storage.as_path(folder)
    if index.NAME in folder.file_sizes():
        return [folder]
    found = _checkpoints_in(folder)
    if not found and RUN_CONFIG in folder.file_sizes():
        found = _checkpoints_of_run(folder)
    if not found:
        index.read(folder)  # raises the specific error for this folder
        raise CheckpointError(
            f"{folder} contains no checkpoint: pass a checkpoint, or a folder of step-* folders"
        )
    return found


def _checkpoints_in(folder: StoragePath) -> list[StoragePath]:
    steps = (place for place in folder.subfolders() if place.name.startswith("step-"))
    return [place for place in steps if index.NAME in place.file_sizes()]


def _checkpoints_of_run(folder: StoragePath) -> list[StoragePath]:
    """Return the checkpoints of the run in ``folder``. Raises CheckpointError if it has none."""
    config = train_config.load(str(folder / RUN_CONFIG)).checkpoint
    if not config.folder:
        raise CheckpointError(
            f"the run in {folder} has written no checkpoints (checkpoint.folder is empty), so that "
            "its model is lost: remove the key and train again"
        )
    place = folder / "checkpoints" if config.folder == "auto" else storage.as_path(config.folder)
    found = _checkpoints_in(place)
    if not found:
        raise CheckpointError(
            f"the run in {folder} has no complete checkpoint in {place} yet: wait for the first "
            "one, or end the run with Ctrl-C, which saves it"
        )
    return found


def summarize(folder: StoragePath, found: Index) -> dict:
    """Return a JSON-serializable summary: step, layout, tensors, bytes, and largest tensors."""
    groups: dict[str, dict] = {}
    dtypes: dict[str, int] = {}
    for name, tensor in found.tensors.items():
        group = groups.setdefault(name.partition("/")[0], {"tensors": 0, "elements": 0, "bytes": 0})
        group["tensors"] += 1
        group["elements"] += math.prod(tensor.shape)
        group["bytes"] += tensor_size(tensor)
        dtypes[tensor.dtype] = dtypes.get(tensor.dtype, 0) + tensor_size(tensor)
    by_size = sorted(found.tensors.items(), key=lambda item: (-tensor_size(item[1]), item[0]))
    return {
        "folder": str(folder),
        "step": found.step,
        "world": found.world,
        "layout": layout(found),
        "model": model_config(found),
        "files": len(found.files),
        "bytes": sum(file.bytes for file in found.files.values()),
        "tensors": groups,
        "bytes_by_dtype": dtypes,
        "largest": [
            {"name": name, "dtype": tensor.dtype, "shape": list(tensor.shape),
             "bytes": tensor_size(tensor)} for name, tensor in by_size[:NUM_LARGEST]
        ],
        "values": sorted(found.values),
    }  # fmt: skip


def format_summary(summary: dict) -> str:
    """Format the result of `summarize` for a terminal."""
    degrees = ", ".join(f"{axis} {n}" for axis, n in (summary["layout"] or {}).items() if n > 1)
    kind = (summary["model"] or {}).get("architectures", ["unknown"])[0]
    ranks = f"{summary['world']} rank" + "s" * (summary["world"] != 1)
    lines = [
        f"{summary['folder']}: after step {summary['step']}, saved by {ranks}"
        + (f" ({degrees})" if degrees else ""),
        f"  model      {kind}",
        f"  files      {summary['files']}, {format_bytes(summary['bytes'])}",
    ]
    for name, group in summary["tensors"].items():
        lines.append(
            f"  {name:<10} {group['tensors']} tensors, {group['elements']:,} numbers, "
            f"{format_bytes(group['bytes'])}"
        )
    dtypes = ", ".join(f"{name} {format_bytes(n)}" for name, n in summary["bytes_by_dtype"].items())
    lines.append(f"  dtypes     {dtypes}")
    lines.append(f"  also       {', '.join(summary['values']) or 'nothing'}")
    lines.append("  largest")
    for each in summary["largest"]:
        shape = " x ".join(map(str, each["shape"])) or "scalar"
        size = format_bytes(each["bytes"])
        lines.append(f"    {size:>10}  {each['name']}  {shape} {each['dtype']}")
    return "\n".join(lines)


def tensor_size(tensor: TensorEntry) -> int:
    """Return the bytes of a whole tensor."""
    return math.prod(tensor.shape) * getattr(torch, tensor.dtype).itemsize


def format_bytes(count: float) -> str:
    """Format a number of bytes with a binary unit, as in "1.5 GiB"."""
    for unit in _UNITS[:-1]:
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} {_UNITS[-1]}"
