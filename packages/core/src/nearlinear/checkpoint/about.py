"""What a checkpoint says of the run that wrote it, beside its state: its model, and its layout.

Under ``values["about"]`` of the index; checkpoints without it are as good, but for an export, which
then has to be told the model's config.
"""

from __future__ import annotations

from torch import nn

from .. import runtime
from .hf import skeleton
from .index import Index

KEY = "about"
AXES = ("pipeline", "replicate", "shard", "tensor", "context", "expert")


def about(model: nn.Module) -> dict:
    """What to keep under ``values["about"]`` of ``model``'s checkpoint."""
    mesh = runtime.current().mesh
    layout = {axis: getattr(mesh, axis) for axis in AXES}
    return {"model": skeleton.describe(model), "layout": layout}


def model_of(found: Index) -> dict | None:
    """The config.json of the model in a checkpoint, if it knows."""
    return _about(found).get("model")


def layout_of(found: Index) -> dict[str, int] | None:
    """The degrees of parallelism of the run that wrote a checkpoint, if it knows."""
    return _about(found).get("layout")


def _about(found: Index) -> dict:
    told = found.values.get(KEY)
    return told if isinstance(told, dict) else {}
