"""What a rank has of every tensor, as the others are told, so that all choose alike who writes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .pieces import Piece, blocks
from .state import Part

Blocks = dict[str, dict[Piece, torch.Tensor]]


def blocks_of(tensors: dict[str, Part]) -> Blocks:
    """The blocks that this rank has, and their memory."""
    return {name: blocks(part.tensor, part.cuts) for name, part in tensors.items()}


def told(tensors: dict[str, Part], here: Blocks) -> dict:
    """`blocks_of` in words that JSON can carry."""
    return {
        name: {
            "dtype": str(part.tensor.dtype).removeprefix("torch."),
            "shape": part.shape,
            "blocks": [(p.offset, p.shape, values.nbytes) for p, values in here[name].items()],
        }
        for name, part in tensors.items()
    }


def listed(told: dict) -> Iterator[tuple[str, Piece, int]]:
    """What a rank has told: names, blocks and their bytes, as `pieces.writers` takes them."""
    for name, entry in told.items():
        for offset, shape, size in entry["blocks"]:
            yield name, Piece(tuple(offset), tuple(shape)), size
