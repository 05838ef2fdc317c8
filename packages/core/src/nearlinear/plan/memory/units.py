"""The parameters of a rank, unit by unit, as `parallel.shard` gathers them: shapes, no model.

To the element: FSDP2 cuts the first dim of every parameter into as many pieces as there are ranks
that share it, and pads the last ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..shape import Shape

Dims = tuple[int, ...]


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered and reduced together."""

    parameters: tuple[Dims, ...]
    """what this rank computes with"""

    @property
    def elements(self) -> int:
        return sum(map(math.prod, self.parameters))

    def shard(self, ranks: int) -> int:
        """Elements of the largest shard, over ``ranks``."""
        return sum(-(-dims[0] // ranks) * math.prod(dims[1:]) for dims in self.parameters)

    def slice(self, ranks: int, replicas: int) -> int:
        """Elements of the largest part of that which one of ``replicas`` updates."""
        rows = ((-(-dims[0] // ranks), dims) for dims in self.parameters)
        return sum(-(-count // replicas) * math.prod(dims[1:]) for count, dims in rows)


def root_of(family: str, shape: Shape, tensor: int) -> Unit:
    """Embeddings, last norm and head on the first of ``tensor`` ranks, which has the most."""
    width, words = shape.width, math.ceil(shape.vocabulary / tensor)
    tables: list[Dims] = [(words, width)] * (1 if shape.tied else 2)
    if shape.positions:
        tables.append((shape.positions, width))
    return Unit((*tables, *_norm(family, width)))


def block_of(family: str, shape: Shape, tensor: int) -> Unit:
    """A block; ``tensor`` ranks cut every matrix."""
    width, inner, kv = shape.width, shape.inner // tensor, shape.kv_width // tensor
    own = width // tensor
    norms = _norm(family, width) * 2
    if family == "gpt2":  # inputs first, as its Conv1D has them
        matrices = [(width, 3 * own), (3 * own,), (own, width), (width,)]
        matrices += [(width, inner), (inner,), (inner, width), (width,)]
    elif family == "gpt_neox":
        matrices = [(3 * own, width), (3 * own,), (width, own), (width,)]
        matrices += [(inner, width), (inner,), (width, inner), (width,)]
    else:
        matrices = [(own, width), (kv, width), (kv, width), (width, own)]
        matrices += [(inner, width), (inner, width), (width, inner)]
    return Unit((*matrices, *norms))


def _norm(family: str, width: int) -> tuple[Dims, ...]:
    """Weight and, but for RMS norms, bias."""
    return ((width,), (width,)) if family in ("gpt2", "gpt_neox") else ((width,),)


def buffer_bytes(family: str, shape: Shape) -> int:
    """Of buffers: the frequencies of rotary positions, and a copy of them."""
    if family == "gpt2":
        return 0
    turned = shape.head_width // 4 if family == "gpt_neox" else shape.head_width
    return 2 * (turned // 2) * 4
