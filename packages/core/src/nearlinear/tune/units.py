"""The units a model is sharded in, and their sizes: from a model that has no values."""

from dataclasses import dataclass

import torch
from torch import nn

from ..parallel.blocks import find_blocks


@dataclass(frozen=True)
class Unit:
    """The parameters that are gathered and reduced together."""

    shapes: tuple[torch.Size, ...]

    @property
    def parameters(self) -> int:
        return sum(shape.numel() for shape in self.shapes)

    def shard(self, degree: int) -> int:
        """Elements per rank over ``degree`` ranks: dim 0 of every parameter is padded to divide."""
        return sum(
            -(-shape[0] // degree) * (shape.numel() // shape[0]) if shape.numel() else 0
            for shape in self.shapes
        )


def units_of(model: nn.Module) -> list[Unit]:
    """The units `nearlinear.shard` makes of ``model``: the root, then its blocks."""
    blocks = find_blocks(model)
    inside = [list(block.parameters()) for block in blocks]
    taken = {id(parameter) for parameters in inside for parameter in parameters}
    root = [p for p in model.parameters() if id(p) not in taken]
    return [Unit(tuple(p.shape for p in parameters)) for parameters in (root, *inside)]
