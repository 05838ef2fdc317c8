"""Exchange of Python objects between ranks, without pickle.

The structure of an object is sent as JSON and its tensors by collectives. Objects consist of
tensors, numbers, strings and None in dicts, lists and tuples; mappings arrive as dicts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ..errors import NearlinearError

Transfer = Callable[[torch.Tensor], None]
"""Sends a tensor, or receives one in place."""


def broadcast_object(
    value: Any, source: int, group: dist.ProcessGroup, device: torch.device, name: str = "an object"
) -> Any:
    """Broadcast ``value`` from global rank ``source`` to ``group``. A collective call.

    Args:
        value: Ignored on other ranks than ``source``.
        source: Global rank.
        group: A group that contains ``source``.
        device: Device of the group's tensors, on which tensors arrive.
        name: Name of the object in the error.

    Raises:
        NearlinearError: On all ranks, if ``value`` contains an object of another type.
    """

    def transfer(tensor: torch.Tensor) -> None:
        dist.broadcast(tensor, source, group=group)

    if dist.get_rank() != source:
        return receive(transfer, device, name)
    send(value, transfer, device, name)
    return value


def send(value: Any, transfer: Transfer, device: torch.device, name: str) -> None:
    """Send ``value`` by ``transfer``. Raises NearlinearError here and on the receiver."""
    tensors: list[torch.Tensor] = []
    unsupported = unsupported_type(value)
    description = {"unsupported": unsupported} if unsupported else _describe(value, tensors)
    text = json.dumps(description).encode()
    transfer(torch.tensor(len(text), device=device))
    transfer(torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device))
    if unsupported:
        raise _unsupported(unsupported, name)
    for tensor in tensors:
        transfer(tensor.to(device))


def receive(transfer: Transfer, device: torch.device, name: str) -> Any:
    """Receive a value of `send`. Raises NearlinearError."""
    size = torch.tensor(0, device=device)
    transfer(size)
    encoded = torch.empty(int(size), dtype=torch.uint8, device=device)
    transfer(encoded)
    description = json.loads(bytes(encoded.cpu().tolist()))
    if "unsupported" in description:
        raise _unsupported(description["unsupported"], name)
    return _receive(description, transfer, device)


def unsupported_type(value: Any) -> str:
    """Return the type of the first object in ``value`` that cannot be sent, or ""."""
    if isinstance(value, Mapping):
        bad = next((key for key in value if not isinstance(key, str | int | float | bool)), None)
        if bad is not None:
            return f"{type(bad).__name__} (a key)"
    if isinstance(value, Mapping | list | tuple):
        items = value.values() if isinstance(value, Mapping) else value
        return next(filter(None, map(unsupported_type, items)), "")
    if isinstance(value, torch.Tensor | str | int | float | bool | None):
        return ""
    return type(value).__name__


def _unsupported(kind: str, name: str) -> NearlinearError:
    return NearlinearError(
        f"{name} is or contains an object of type {kind}, which cannot be sent to other ranks. Use "
        "tensors, numbers and strings, in dicts, lists or tuples."
    )


def _describe(value: Any, tensors: list[torch.Tensor]) -> dict[str, Any]:
    """Return a description of ``value`` for JSON; append its tensors to ``tensors``."""
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach().contiguous())
        return {"tensor": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, Mapping):
        return {"dict": [[key, _describe(each, tensors)] for key, each in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_describe(each, tensors) for each in value]}
    return {"value": value}


def _receive(description: dict[str, Any], transfer: Transfer, device: torch.device) -> Any:
    """Receive the tensors of a description, and rebuild its value."""
    if "tensor" in description:
        dtype = getattr(torch, description["dtype"])
        tensor = torch.empty(description["tensor"], dtype=dtype, device=device)
        transfer(tensor)
        return tensor
    if "dict" in description:
        return {key: _receive(each, transfer, device) for key, each in description["dict"]}
    for kind, build in (("list", list), ("tuple", tuple)):
        if kind in description:
            return build(_receive(each, transfer, device) for each in description[kind])
    return description["value"]
