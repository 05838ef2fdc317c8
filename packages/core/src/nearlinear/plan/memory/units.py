"""The parameters of a rank, unit by unit, as `parallel.shard` gathers them: shapes, no model.

To the element: FSDP2 cuts the first dim of every parameter into as many pieces as there are ranks
that share it, and pads the last ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from ...mesh import Mesh
from ..shape import Shape

Dims = tuple[int, ...]


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered and reduced together."""

    parameters: tuple[Dims, ...]
    """what this rank computes with; the first dim is the one that is shared out"""
    ranks: int
    """that share them"""

    @cached_property
    def elements(self) -> int:
        return sum(map(math.prod, self.parameters))

    @cached_property
    def shard(self) -> int:
        """Elements of the largest shard."""
        return sum(-(-dims[0] // self.ranks) * math.prod(dims[1:]) for dims in self.parameters)

    @property
    def padded(self) -> int:
        """Elements of all shards, each as large as the largest."""
        return self.shard * self.ranks

    def slice(self, replicas: int) -> int:
        """Elements of the largest part of that which one of ``replicas`` updates."""
        rows = ((-(-dims[0] // self.ranks), dims) for dims in self.parameters)
        return sum(-(-count // replicas) * math.prod(dims[1:]) for count, dims in rows)


def table_of(shape: Shape, tensor: int) -> Dims:
    """The table of words on the first of ``tensor`` ranks, which has the most."""
    return math.ceil(shape.vocabulary / tensor), shape.width


def embedding_of(shape: Shape, tensor: int) -> tuple[Dims, ...]:
    """What comes before the blocks."""
    positions = ((shape.positions, shape.width),) if shape.positions else ()
    return (table_of(shape, tensor), *positions)


def head_of(family: str, shape: Shape, tensor: int) -> tuple[Dims, ...]:
    """What comes after the blocks, also where the table is that of the embedding."""
    return (table_of(shape, tensor), *_norm(family, shape.width))


def root_of(family: str, shape: Shape, tensor: int) -> tuple[Dims, ...]:
    """Both, of a model that is whole."""
    head = head_of(family, shape, tensor)
    return (*embedding_of(shape, tensor), *(head[1:] if shape.tied else head))


def block_of(family: str, shape: Shape, mesh: Mesh) -> tuple[Unit, ...]:
    """A block, and its experts where they are divided: tensor ranks cut every matrix."""
    tensor, width = mesh.tensor, shape.width
    inner, kv, own = shape.inner // tensor, shape.kv_width // tensor, width // tensor
    norms = _norm(family, width) * 2
    attention = ((own, width), (kv, width), (kv, width), (width, own))
    if family == "gpt2":  # inputs first, as its Conv1D has them
        matrices = [(width, 3 * own), (3 * own,), (own, width), (width,)]
        matrices += [(width, inner), (inner,), (inner, width), (width,)]
    elif family == "gpt_neox":
        matrices = [(3 * own, width), (3 * own,), (width, own), (width,)]
        matrices += [(inner, width), (inner,), (width, inner), (width,)]
    elif shape.experts > 1:
        return _mixture(shape, mesh, (*attention, (shape.experts, width), *norms))
    else:
        matrices = [*attention, (inner, width), (inner, width), (width, inner)]
    return (Unit((*matrices, *norms), mesh.sharing),)


def _mixture(shape: Shape, mesh: Mesh, others: tuple[Dims, ...]) -> tuple[Unit, ...]:
    """A block with experts, stacked: divided, they are a unit of their own."""
    count, inner = shape.experts // mesh.expert, shape.inner // mesh.tensor
    stacked = ((count, 2 * inner, shape.width), (count, shape.width, inner))
    if mesh.expert == 1:
        return (Unit((*others, *stacked), mesh.sharing),)
    ranks = mesh.expert_sharing
    experts = tuple(_first_that_divides(dims, ranks) for dims in stacked)
    return Unit(others, mesh.sharing), Unit(experts, ranks)


def _first_that_divides(dims: Dims, ranks: int) -> Dims:
    """``dims`` with the one in front that `parallel.shard` shares out: the first that divides."""
    at = next((i for i, size in enumerate(dims) if size % ranks == 0), 0)
    return (dims[at], *dims[:at], *dims[at + 1 :])


def _norm(family: str, width: int) -> tuple[Dims, ...]:
    """Weight and, but for RMS norms, bias."""
    return ((width,), (width,)) if family in ("gpt2", "gpt_neox") else ((width,),)


def buffer_bytes(family: str, shape: Shape) -> int:
    """Of buffers: the frequencies of rotary positions, and a copy of them."""
    if family == "gpt2":
        return 0
    turned = shape.head_width // 4 if family == "gpt_neox" else shape.head_width
    return 2 * (turned // 2) * 4
