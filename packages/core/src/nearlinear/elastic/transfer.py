"""Copy the state of a running job to replicas that join it.

The state is one stream of bytes: parameters, buffers and optimizer states in the order of their
names, alike on the ranks with one index in their replicas. The members that hold it send pieces in
turn, so that a joining rank receives from all of them at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from ..checkpoint.index_schema import TensorEntry
from ..checkpoint.state import (
    allocate_optimizer_state,
    optimizer_tensors,
    prefixed_model_tensors,
)
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
        states = {
            name: [str(value.tensor.dtype).removeprefix("torch."), value.shape]
            for name, value in optimizer_tensors(optimizer, model)
        }
        told = {"other": other, "optimizer": states}
        text = json.dumps(told).encode()
    sizes = torch.zeros(group.size, dtype=torch.int64)
    group.all_gather(sizes, torch.tensor([len(text)]))()
    size = int(sizes[holders[0]])
    everyone = torch.zeros(group.size * size, dtype=torch.uint8)
    own = torch.frombuffer(bytearray(text.ljust(size)[:size]), dtype=torch.uint8)
    group.all_gather(everyone, own)()
    told = json.loads(bytes(everyone.view(group.size, -1)[holders[0]].tolist()))
    if receives:
        states = told["optimizer"].items()
        entries = {name: TensorEntry(dtype, tuple(shape), {}) for name, (dtype, shape) in states}
        allocate_optimizer_state(optimizer, model, entries)
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
    sent, received = [0] * group.size, [0] * group.size
    data = torch.empty(0, dtype=torch.uint8)
    if group.position in joining:
        received = [lengths.get(member, 0) for member in range(group.size)]
    elif group.position in pieces:
        sent = [lengths[group.position] if m in joining else 0 for m in range(group.size)]
        data = torch.cat(pieces[group.position]).cpu().repeat(len(joining))
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
    found = [*prefixed_model_tensors(model), *optimizer_tensors(optimizer, model)]
    for name, value in sorted(found, key=itemgetter(0)):
        tensor = local_tensor(value.tensor)
        if not tensor.is_contiguous():
            raise CheckpointError(
                f"{name} is not contiguous and cannot be copied to other replicas"
            )
        yield tensor
