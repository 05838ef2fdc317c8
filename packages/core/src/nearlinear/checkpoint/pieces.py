"""Which part of which tensor a rank holds, and which rank writes a part that several hold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from .. import _torch
from ..parallel.layout import Cut


@dataclass(frozen=True, order=True)
class Piece:
    """A block of a tensor: where it begins on every dim, and how far it goes."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def overlap(self, other: Piece) -> Piece | None:
        """What two blocks of one tensor have in common; None: nothing."""
        first = tuple(map(max, self.offset, other.offset))
        last = tuple(
            min(a + n, b + m)
            for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(end - begin for begin, end in zip(first, last, strict=True))
        return Piece(first, shape) if all(size > 0 for size in shape) else None

    @classmethod
    def whole(cls, shape: Iterable[int]) -> Piece:
        """All of a tensor of ``shape``."""
        shape = tuple(shape)
        return cls((0,) * len(shape), shape)

    def inside(self, whole: Piece) -> tuple[slice, ...]:
        """Where this block lies in ``whole``, which contains it."""
        starts = [mine - theirs for mine, theirs in zip(self.offset, whole.offset, strict=True)]
        return tuple(slice(at, at + n) for at, n in zip(starts, self.shape, strict=True))


def blocks(tensor: torch.Tensor, cuts: Sequence[Cut] = ()) -> dict[Piece, torch.Tensor]:
    """What of a whole tensor this rank has, and the memory of each block: several where it is cut
    out of a fused projection, none where there are more ranks than rows."""
    values = tensor.detach()
    mine = Piece.whole(tensor.shape)
    if isinstance(tensor, DTensor):
        shape, offset = _torch.local_block(tensor)
        values, mine = values.to_local(), Piece(tuple(offset), tuple(shape))
    found = {mine: values}
    for cut in cuts:
        found = {
            piece: part for block, part in found.items() for piece, part in _cut(cut, block, part)
        }
    return {piece: part for piece, part in found.items() if 0 not in piece.shape}


def _cut(cut: Cut, block: Piece, values: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor]]:
    """``block`` of a rank's part, where its pieces lie in what was cut."""
    dim, begin = cut.dim, block.offset[cut.dim]
    end, lies = begin + block.shape[dim], 0
    for first, count in cut.mine:
        low, high = max(begin, lies), min(end, lies + count)
        if low < high:
            offset, shape = list(block.offset), list(block.shape)
            offset[dim], shape[dim] = first + low - lies, high - low
            yield Piece(tuple(offset), tuple(shape)), values.narrow(dim, low - begin, high - low)
        lies += count


Held = Sequence[tuple[str, Piece, int]]
"""What a rank has: names, blocks, and the bytes of each."""


def writers(holdings: Sequence[Held]) -> list[set[tuple[str, Piece]]]:
    """For every rank the blocks that it writes: each block once, bytes spread evenly.

    Replicas hold the same blocks; every rank computes the same answer.
    """
    holders: dict[tuple[str, Piece], list[int]] = {}
    sizes: dict[tuple[str, Piece], int] = {}
    for rank, held in enumerate(holdings):
        for name, piece, size in held:
            holders.setdefault((name, piece), []).append(rank)
            sizes[name, piece] = size
    load = [0] * len(holdings)
    chosen: list[set[tuple[str, Piece]]] = [set() for _ in holdings]
    for block in sorted(sizes, key=lambda block: (-sizes[block], block)):
        rank = min(holders[block], key=lambda rank: (load[rank], rank))
        load[rank] += sizes[block]
        chosen[rank].add(block)
    return chosen


def covers(whole: Iterable[int], parts: Iterable[Piece]) -> bool:
    """Whether ``parts``, which do not overlap, make up a tensor of shape ``whole``."""
    return sum(math.prod(part.shape) for part in parts) == math.prod(whole)
