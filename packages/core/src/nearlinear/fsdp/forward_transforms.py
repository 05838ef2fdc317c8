"""Changes of a model's arguments and outputs around its own forward pass.

A whole model applies them by hooks. A pipeline stage receives the arguments of the whole model
beside the hidden states, and applies them itself.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable
from typing import Any

from torch import nn

from .. import _torch
from ..distributed.consensus import all_gather_ints
from ..distributed.runtime import Runtime
from ..errors import DataError
from .model_state import model_state


class ForwardTransforms:
    """Functions to call before and after a model's forward pass, in the order of the lists."""

    def __init__(self, model: nn.Module):
        self.names = list(inspect.signature(type(model).forward).parameters)[1:]
        self.before: list[Callable[[dict], dict]] = []
        """Each takes the model's arguments by name and returns the changed arguments."""
        self.after: list[Callable[[Any], Any]] = []
        """Each takes the model's output and returns the changed output."""

    def enter(self, args: tuple, kwargs: dict) -> dict:
        """Return the changed arguments by name."""
        arguments = dict(zip(self.names, args, strict=False)) | kwargs
        for transform in self.before:
            arguments = transform(arguments)
        return arguments

    def leave(self, output: Any) -> Any:
        """Return the changed output."""
        for transform in self.after:
            output = transform(output)
        return output


def forward_transforms(model: nn.Module) -> ForwardTransforms:
    """Return the transforms of ``model``, created on first use."""
    state = model_state(model)
    if state.forward_transforms is None:
        transforms = state.forward_transforms = ForwardTransforms(model)

        def enter(module: nn.Module, args: tuple, kwargs: dict):
            return None if model_state(module).is_stage else ((), transforms.enter(args, kwargs))

        def leave(module: nn.Module, args: tuple, output: Any):
            return None if model_state(module).is_stage else transforms.leave(output)

        model.register_forward_pre_hook(enter, with_kwargs=True)
        model.register_forward_hook(leave)
    return state.forward_transforms


class BatchCheck:
    """Check that ranks which compute one batch together are given the same batch.

    Different batches cause no error, only a loss of no batch at all. The usual cause is reading by
    rank instead of by data rank, which the first batch shows: only that one is compared.
    """

    def __init__(self, runtime: Runtime, *axes: str):
        self.runtime = runtime
        self.axes = [axis for axis in axes if getattr(runtime.mesh, axis) > 1]

    def __call__(self, batch: Any) -> Any:
        """Return ``batch``, any tree of tensors. The first call is collective; raises DataError."""
        if not self.axes:
            return batch
        runtime, own = self.runtime, [_checksum(batch)]
        sums = {
            axis: all_gather_ints(own, runtime.device, runtime.group(axis)) for axis in self.axes
        }
        self.axes = []
        for axis, received in sums.items():
            if any(checksum != own for checksum in received):
                raise DataError(
                    f"the {axis} parallel ranks {runtime.mesh.group(axis, runtime.rank)} compute "
                    "one batch together but were given different batches: read slice "
                    "mesh.data_rank(rank) of mesh.data_ranks, not rank of the world size (mesh is "
                    "the result of nl.init), and shuffle alike on all ranks"
                )
        return batch


def _checksum(tree: Any) -> int:
    """Return a checksum of all tensors but floating ones, whose rounding may differ."""
    found = 0
    for tensor in _torch.tensors_in(tree):
        if not tensor.is_floating_point():
            found = zlib.crc32(repr(tuple(tensor.shape)).encode(), found)
            values = tensor.cpu().contiguous().numpy()
            found = zlib.crc32(values, found)  # pyright: ignore[reportArgumentType] numpy stub
    return found
