"""Give what one rank has to all ranks of a group: tensors in dicts, lists and tuples, and numbers.

What it is goes ahead as JSON, so that nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
import torch.distributed as dist

from ...errors import NearlinearError


def everywhere(value, source: int, group: dist.ProcessGroup, device: torch.device):
    """``value`` of global rank ``source``, on every rank of ``group``. A collective call.

    Dicts of any kind arrive as dicts. Raises NearlinearError, on all ranks, for what cannot travel.
    """
    mine, tensors, text = dist.get_rank() == source, [], b""
    if mine:
        try:
            text = json.dumps(_described(value, tensors)).encode()
        except (TypeError, ValueError):
            text = json.dumps({"refused": _name_of_stranger(value)}).encode()
    size = torch.tensor(len(text), device=device)
    dist.broadcast(size, source, group=group)
    written = torch.empty(int(size), dtype=torch.uint8, device=device)
    if mine:
        written.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    dist.broadcast(written, source, group=group)
    said = json.loads(bytes(written.cpu().tolist()))
    if "refused" in said:
        raise NearlinearError(
            f"a function under @nl.step returned a {said['refused']}, which cannot go to the other "
            "stages: return tensors, numbers and texts, in dicts, lists or tuples"
        )
    if mine:
        for tensor in tensors:
            dist.broadcast(tensor.to(device), source, group=group)
        return value
    return _received(said, source, group, device)


def _described(value, tensors: list):
    """``value`` for JSON; its tensors, contiguous, go to ``tensors``."""
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach().contiguous())
        return {"tensor": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, Mapping):
        return {"dict": [[key, _described(each, tensors)] for key, each in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_described(each, tensors) for each in value]}
    return {"value": value}


def _received(said: dict, source: int, group, device):
    if "tensor" in said:
        tensor = torch.empty(said["tensor"], dtype=getattr(torch, said["dtype"]), device=device)
        dist.broadcast(tensor, source, group=group)
        return tensor
    if "dict" in said:
        return {key: _received(each, source, group, device) for key, each in said["dict"]}
    for kind, build in (("list", list), ("tuple", tuple)):
        if kind in said:
            return build(_received(each, source, group, device) for each in said[kind])
    return said["value"]


def _name_of_stranger(value) -> str:
    """The type of the first thing in ``value`` that JSON cannot carry."""
    parts = value.values() if isinstance(value, Mapping) else value
    if isinstance(value, Mapping | list | tuple):
        return next(filter(None, map(_name_of_stranger, parts)), "")
    if isinstance(value, torch.Tensor | str | int | float | bool | None):
        return ""
    return type(value).__name__
