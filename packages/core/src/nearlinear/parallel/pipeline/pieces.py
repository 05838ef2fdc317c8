"""Cut what a step is given into micro-batches: along dim 0, or as it is said."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping

import torch

from ... import _torch
from ...errors import DataError


def pieces(batch: Mapping, count: int, device: torch.device) -> list[dict]:
    """``batch``, a model's arguments, as ``count`` micro-batches on ``device``.

    Tensors are cut along dim 0; those of one row, as positions may be, go to all. DataError where
    rows do not divide.
    """
    if batch.get("num_items_in_batch") is not None:
        raise DataError(
            "num_items_in_batch: a pipeline weighs its micro-batches by their numbers of targets "
            "itself; leave it out"
        )
    tensors = [value for value in batch.values() if isinstance(value, torch.Tensor)]
    rows = max((tensor.shape[0] for tensor in tensors if tensor.dim()), default=0)
    if rows == 0 or rows % count:
        raise _uneven(rows, count)
    parts = []
    for i in range(count):
        part = {}
        for name, value in batch.items():
            if isinstance(value, torch.Tensor) and value.dim():
                if value.shape[0] not in (1, rows):
                    raise DataError(
                        f"{name} has {value.shape[0]} rows where the batch has {rows}: give it one "
                        "row per sample, or a single one"
                    )
                if value.shape[0] == rows:
                    value = value.chunk(count)[i]
            part[name] = value
        parts.append(_torch.map_tensors(lambda tensor: tensor.to(device), part))
    return parts


def cut(value, count: int, i: int, axis: int = 0, name: str = "an argument"):
    """Micro-batch ``i`` of ``count`` of ``value``: tensors in dicts and lists, and what has SMP's
    ``smp_slice(count, i, axis)``; anything else goes to all. DataError."""
    if hasattr(value, "smp_slice"):
        return value.smp_slice(count, i, axis)
    if isinstance(value, torch.Tensor) and value.dim():
        if axis >= value.dim() or value.shape[axis] % count:
            raise _uneven(value.shape[axis] if axis < value.dim() else 0, count, axis, name)
        return value.chunk(count, axis)[i]
    if isinstance(value, Mapping):
        return {key: cut(each, count, i, axis, name) for key, each in value.items()}
    if isinstance(value, list | tuple):
        parts = [cut(each, count, i, axis, name) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def arguments(
    given: inspect.BoundArguments,
    count: int,
    i: int,
    whole: Collection[str],
    axes: Mapping[str, int],
) -> tuple[tuple, dict]:
    """Micro-batch ``i`` of a function's arguments, (args, kwargs); those in ``whole`` go to all."""

    def part(name: str, value):
        return value if name in whole else cut(value, count, i, axes.get(name, 0), name)

    parts = {}
    for name, value in given.arguments.items():
        further = given.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        parts[name] = {k: part(k, v) for k, v in value.items()} if further else part(name, value)
    found = inspect.BoundArguments(given.signature, parts)
    return found.args, found.kwargs


def _uneven(rows: int, count: int, axis: int = 0, name: str = "the batch") -> DataError:
    return DataError(
        f"{name} has {rows} rows along dim {axis}, which microbatches = {count} do not divide: use "
        "a batch size that is a multiple of microbatches, drop the last short batch, or pad it "
        "with labels -100"
    )
