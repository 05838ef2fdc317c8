"""Types of state dicts, and the values beside model and optimizer in a checkpoint."""

from __future__ import annotations

import base64
import contextlib
import enum
import functools
import io
import json
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

from ..... import storage
from .....distributed.consensus import all_gather_json
from .....errors import CheckpointError
from .....storage import StoragePath
from ...state_dicts import ModelStateDict, OptimizerStateDict

log = logging.getLogger(__name__)

PICKLED = "__torch__"


class SMStateDictType(enum.Enum):
    """State dicts beside those of FSDP."""

    SM_LOCAL_STATE_DICT = "sm_local_state_dict"
    """This rank's tensors, saved and loaded without communication at the same shard degree."""


@contextlib.contextmanager
def sm_state_dict_type(
    model: nn.Module, state_dict_type: SMStateDictType | StateDictType, *args: Any
) -> Iterator[None]:
    """Set the type of ``model.state_dict()`` in this block."""
    if state_dict_type is SMStateDictType.SM_LOCAL_STATE_DICT:
        state_dict_type = StateDictType.LOCAL_STATE_DICT
    assert isinstance(state_dict_type, StateDictType)
    with FullyShardedDataParallel.state_dict_type(model, state_dict_type, *args):
        yield


class Parts:
    """A state dict divided into model, optimizer, and plain values."""

    def __init__(self, state_dict: Mapping[str, Any]):
        self.state_dict = state_dict
        self.model: ModelStateDict | None = None
        self.optimizer: OptimizerStateDict | None = None
        self.values: dict[str, Any] = {}
        for key, value in state_dict.items():
            if isinstance(value, ModelStateDict):
                self.model = value
            elif isinstance(value, OptimizerStateDict):
                self.optimizer = value
            else:
                self.values[key] = value

    @property
    def module(self) -> nn.Module | None:
        part = self.model if self.model is not None else self.optimizer
        return None if part is None else part.model

    @property
    def is_local(self) -> bool:
        return self.model is not None and self.model.local


class PlainValues:
    """The plain values of a state dict as an object that `nearlinear.save` accepts."""

    def __init__(self, values: Mapping[str, Any]):
        self.values = dict(values)

    def state_dict(self) -> dict[str, Any]:
        """Return the encoded values of rank 0. A collective call."""
        encoded = {key: encode(key, value) for key, value in self.values.items()}
        return {"values": all_gather_json(encoded)[0]}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.values = {key: decode(value) for key, value in saved["values"].items()}


def encode(key: str, value: Any) -> Any:
    """Return ``value`` as JSON, with tensors and tuples as bytes of ``torch.save``.

    Raises CheckpointError for objects that cannot be loaded without running their code.
    """
    with contextlib.suppress(TypeError, ValueError):
        if json.loads(json.dumps(value)) == value and not isinstance(value, tuple):
            return value
    memory = io.BytesIO()
    try:
        torch.save(value, memory)
        torch.load(io.BytesIO(memory.getvalue()), weights_only=True)
    except Exception as error:  # any error of a user's object
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"state_dict[{key!r}] is a {type(value).__name__} that cannot be saved ({reason}): "
            "store numbers, strings, tensors, lists and dicts, as in its to_dict()"
        ) from None
    return {PICKLED: base64.b64encode(memory.getvalue()).decode()}


def decode(value: Any) -> Any:
    """Return the value of `encode`."""
    if isinstance(value, dict) and value.keys() == {PICKLED}:
        memory = io.BytesIO(base64.b64decode(value[PICKLED]))
        return torch.load(memory, map_location="cpu", weights_only=True)
    return value


def folder_of(checkpoint_id: Any, storage_object: Any, local: bool = False) -> StoragePath:
    """Return the folder of a checkpoint. For a shared one a collective call: that of rank 0.

    Scripts name a folder per tensor or expert rank; a checkpoint of `nearlinear.save` is one folder
    for all ranks.

    Args:
        checkpoint_id: A path or an ``s3://`` address.
        storage_object: torch's storage reader or writer, whose path is used without
            ``checkpoint_id``.
        local: Every rank has a folder of its own.
    """
    place = checkpoint_id
    if place is None:
        place = getattr(storage_object, "path", None) or getattr(
            storage_object, "checkpoint_id", None
        )
    if place is None:
        raise CheckpointError("pass checkpoint_id=, a path or s3://bucket/prefix")
    text = os.fspath(place)
    return storage.as_path(text if local else all_gather_json(text)[0])


@functools.cache
def warn_without_effect(name: str) -> None:
    """Log once that an argument has no effect."""
    log.warning("%s has no effect here", name)


def note_arguments(s3_region: str | None, **without_effect: Any) -> None:
    """Use the region of S3 if the environment has none; warn of arguments without effect."""
    if s3_region:
        os.environ.setdefault("AWS_DEFAULT_REGION", s3_region)
    for name, value in without_effect.items():
        if value:
            warn_without_effect(name)
