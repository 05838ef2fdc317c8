"""Copy the state of a running job to replicas that join it.

The state is one stream of bytes: parameters, buffers and optimizer states in the order of their
names, alike on the ranks with one index in their replicas. The members that hold it send pieces in
turn, so that a joining rank receives from all of them at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..checkpoint.state import model_tensors, updated_names
from ..errors import CheckpointError
from ..fsdp.model_state import local_tensor
from .replica_sum import ReplicaGroup

PIECE = 16 * 2**20
"""Bytes that each holder sends to each joining rank at a time."""


def copy_state(
    group: ReplicaGroup,
    joining: Sequence[int],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    other: dict[str, Any],
) -> tuple[dict[str, Any], int]:
    """Copy the state from the members of ``group`` that hold it to those that join.

    Args:
        group: The ranks with one index in their replicas.
        joining: Positions in ``group`` of the ranks that join.
        model: The sharded model.
        optimizer: Its optimizer; on a joining rank its state is replaced.
        other: JSON values to copy; ignored on a joining rank.

    Returns:
        ``other`` of a holder, and the bytes that a joining rank has received.
    """
    receives = group.position in joining
    holders = [m for m in range(group.size) if m not in joining]
    text = b""
    if not receives:
        told = {"other": other, "optimizer": _describe(model, optimizer)}
        text = json.dumps(told).encode()
    sizes = torch.zeros(group.size, dtype=torch.int64)
    group.all_gather(sizes, torch.tensor([len(text)]))()
    size = int(sizes[holders[0]])
    everyone = torch.zeros(group.size * size, dtype=torch.uint8)
    own = torch.frombuffer(bytearray(text.ljust(size)[:size]), dtype=torch.uint8)
    group.all_gather(everyone, own)()
    told = json.loads(bytes(everyone.view(group.size, -1)[holders[0]].tolist()))
    if receives:
        _allocate(model, optimizer, told["optimizer"])
    pieces = list(_pieces(_state_tensors(model, optimizer)))
    for first in range(0, len(pieces), len(holders)):
        in_turn = dict(zip(holders, pieces[first : first + len(holders)], strict=False))
        _send_pieces(group, joining, in_turn)
    return told["other"], sum(part.numel() for piece in pieces for part in piece)


def _send_pieces(
    group: ReplicaGroup, joining: Sequence[int], pieces: dict[int, list[torch.Tensor]]
) -> None:
    """Send the piece of every holder in ``pieces`` to all joining ranks."""
    lengths = {holder: sum(part.numel() for part in parts) for holder, parts in pieces.items()}
    sent = [0] * group.size
    received = [0] * group.size
    if group.position in joining:
        received = [lengths.get(member, 0) for member in range(group.size)]
        data = torch.empty(0, dtype=torch.uint8)
    elif group.position in pieces:
        sent = [lengths[group.position] if m in joining else 0 for m in range(group.size)]
        data = torch.cat(pieces[group.position]).repeat(len(joining))
    else:
        data = torch.empty(0, dtype=torch.uint8)
    arrived = torch.empty(sum(received), dtype=torch.uint8)
    group.all_to_all(arrived, data, received, sent)()
    start = 0
    for holder in sorted(pieces) if group.position in joining else ():
        for part in pieces[holder]:
            part.copy_(arrived[start : start + part.numel()])
            start += part.numel()


def _pieces(tensors: Iterator[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Divide the bytes of ``tensors`` into pieces: lists of views."""
    piece, room = [], PIECE
    for tensor in tensors:
        data = tensor.detach().view(-1).view(torch.uint8)
        while data.numel():
            piece.append(data[:room])
            data, room = data[room:], room - piece[-1].numel()
            if not room:
                yield piece
                piece, room = [], PIECE
    if piece:
        yield piece


def _state_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield this rank's part of every tensor of the state, contiguous, in the order of names."""
    for name, value in sorted(model_tensors(model).items()):
        yield _contiguous(name, local_tensor(value.tensor))
    names: dict[Any, str] = dict(updated_names(model))
    for parameter in sorted(optimizer.state, key=names.__getitem__):
        for key, value in sorted(optimizer.state[parameter].items()):
            yield _contiguous(f"{names[parameter]}/{key}", local_tensor(value))


def _contiguous(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_contiguous():
        raise CheckpointError(f"{name} is not contiguous and cannot be copied to other replicas")
    return tensor


def _describe(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Return dtype and shape of each optimizer state by parameter and key; None: the parameter's.

    Raises CheckpointError for state that is not a tensor.
    """
    names: dict[Any, str] = dict(updated_names(model))
    found = {}
    for parameter, state in optimizer.state.items():
        of_parameter = found[names[parameter]] = {}
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):
                raise CheckpointError(
                    f"{type(optimizer).__name__} keeps {key} as a {type(value).__name__}; only "
                    "tensors can be copied to other replicas"
                )
            shape = None if value.shape == parameter.shape else list(value.shape)
            of_parameter[key] = [str(value.dtype).removeprefix("torch."), shape]
    return found


def _allocate(
    model: nn.Module, optimizer: torch.optim.Optimizer, described: dict[str, dict[str, Any]]
) -> None:
    """Give ``optimizer`` the state tensors of `_describe`, with any values."""
    parameters = {name: parameter for parameter, name in updated_names(model).items()}
    optimizer.state.clear()
    for name, of_parameter in described.items():
        parameter = parameters[name]
        for key, (dtype, shape) in of_parameter.items():
            kind = getattr(torch, dtype)
            if shape is None:
                value = torch.zeros_like(parameter.data, dtype=kind)
            else:
                value = torch.zeros(shape, dtype=kind)
            optimizer.state[parameter][key] = value
