"""Splitting of batches and of function arguments into micro-batches."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import torch

from .. import _torch
from ..distributed.objects import broadcast_object
from ..distributed.runtime import Runtime
from ..errors import DataError


def batch_of_first_stage(batch: Any, runtime: Runtime) -> Any:
    """Return the ``batch`` of the pipeline's first rank on all its ranks. A collective call.

    Args:
        batch: Tensors and numbers in dicts and lists; ignored on other ranks than the first.
        runtime: This rank's runtime, with several pipeline ranks.
    """
    first = runtime.mesh.group("pipeline", runtime.rank)[0]
    if runtime.rank == first:
        batch = _torch.map_tensors(lambda tensor: tensor.to(runtime.device), batch)
    return broadcast_object(batch, first, runtime.group("pipeline"), runtime.device, "the batch")


def split_microbatches(
    batch: Mapping[str, Any], count: int, device: torch.device
) -> list[dict[str, Any]]:
    """Split ``batch``, the arguments of a model, into ``count`` micro-batches on ``device``.

    Tensors are split along dim 0. Tensors with one row, such as positions, and other values go to
    every micro-batch. Raises DataError if the rows do not divide evenly.
    """
    if batch.get("num_items_in_batch") is not None:
        raise DataError(
            "num_items_in_batch: a pipeline weighs its micro-batches by their numbers of targets "
            "itself. Remove it from the batch."
        )
    tensors = [value for value in batch.values() if isinstance(value, torch.Tensor)]
    rows = max((tensor.shape[0] for tensor in tensors if tensor.dim()), default=0)
    if rows == 0 or rows % count:
        raise _indivisible(rows, count)
    micro_batches = []
    for i in range(count):
        micro_batch = {}
        for name, value in batch.items():
            if isinstance(value, torch.Tensor) and value.dim():
                if value.shape[0] not in (1, rows):
                    raise DataError(
                        f"{name} has {value.shape[0]} rows, but the batch has {rows}. Pass one row "
                        "per sample, or a single row for all samples."
                    )
                if value.shape[0] == rows:
                    value = value.chunk(count)[i]
            micro_batch[name] = value
        micro_batches.append(_torch.map_tensors(lambda tensor: tensor.to(device), micro_batch))
    return micro_batches


def slice_value(value: Any, count: int, i: int, dim: int = 0, name: str = "an argument") -> Any:
    """Return micro-batch ``i`` of ``count`` of ``value``.

    Slices tensors, also in dicts and lists, and objects with SMP's ``smp_slice(count, i, dim)``.
    Other values are returned unchanged. Raises DataError if a tensor does not divide evenly.

    Args:
        name: Name of the argument, for the error message.
    """
    if hasattr(value, "smp_slice"):
        return value.smp_slice(count, i, dim)
    if isinstance(value, torch.Tensor) and value.dim():
        if dim >= value.dim() or value.shape[dim] % count:
            raise _indivisible(value.shape[dim] if dim < value.dim() else 0, count, dim, name)
        return value.chunk(count, dim)[i]
    if isinstance(value, Mapping):
        return {key: slice_value(each, count, i, dim, name) for key, each in value.items()}
    if isinstance(value, list | tuple):
        slices = [slice_value(each, count, i, dim, name) for each in value]
        return type(value)(*slices) if hasattr(value, "_fields") else type(value)(slices)
    return value


def slice_arguments(
    bound: inspect.BoundArguments,
    count: int,
    i: int,
    not_split: Collection[str],
    dims: Mapping[str, int],
) -> tuple[tuple, dict]:
    """Return (args, kwargs) of a function for micro-batch ``i`` of ``count``.

    Args:
        bound: Arguments for the whole batch.
        not_split: Names of arguments to pass whole to every micro-batch.
        dims: Dim to split by name of the argument; default 0.
    """

    def slice_named(name: str, value: Any) -> Any:
        if name in not_split:
            return value
        return slice_value(value, count, i, dims.get(name, 0), name)

    arguments = {}
    for name, value in bound.arguments.items():
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            arguments[name] = {key: slice_named(key, each) for key, each in value.items()}
        else:
            arguments[name] = slice_named(name, value)
    sliced = inspect.BoundArguments(bound.signature, arguments)  # pyright: ignore[reportArgumentType] - any dict
    return sliced.args, sliced.kwargs


def _indivisible(rows: int, count: int, dim: int = 0, name: str = "the batch") -> DataError:
    return DataError(
        f"{name} has {rows} rows along dim {dim}, not a multiple of microbatches = {count}. Use a "
        "batch size that is a multiple of microbatches, drop the last short batch, or pad it "
        "with labels -100."
    )
