"""Which part of which tensor a rank holds, and which rank writes a part that several hold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

    def inside(self, whole: Piece) -> tuple[slice, ...]:
        """Where this block lies in ``whole``, which contains it."""
        starts = [mine - theirs for mine, theirs in zip(self.offset, whole.offset, strict=True)]
        return tuple(slice(at, at + n) for at, n in zip(starts, self.shape, strict=True))


def held(tensor: torch.Tensor) -> Piece:
    """The block of ``tensor`` on this rank: all of it, unless it is sharded."""
    if isinstance(tensor, DTensor):
        shape, offset = _torch.local_block(tensor)
        return Piece(tuple(offset), tuple(shape))
    return Piece((0,) * tensor.dim(), tuple(tensor.shape))


def in_whole(cuts: tuple[Cut, ...], piece: Piece) -> Iterator[tuple[Piece, tuple[slice, ...]]]:
    """Where ``piece`` of a rank's part lies in the whole parameter: blocks, and each one's place.

    A place is that of the block in ``piece``. A fused projection comes as several blocks.
    """
    blocks = [(piece, tuple(slice(0, size) for size in piece.shape))]
    for cut in cuts:
        blocks = [found for block, place in blocks for found in _split(cut, block, place)]
    yield from blocks


def _split(cut: Cut, block: Piece, place: tuple[slice, ...]):
    dim, begin = cut.dim, block.offset[cut.dim]
    end, lies = begin + block.shape[dim], 0
    for first, count in cut.mine:
        low, high = max(begin, lies), min(end, lies + count)
        if low < high or (count == 0 and begin == end):
            offset, shape, where = list(block.offset), list(block.shape), list(place)
            offset[dim], shape[dim] = first + low - lies, high - low
            where[dim] = slice(low - begin, high - begin)
            yield Piece(tuple(offset), tuple(shape)), tuple(where)
        lies += count


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of `held`."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def writers(holdings: Sequence[Mapping[str, tuple[Piece, int]]]) -> list[set[str]]:
    """For every rank the names whose block it writes: each block once, bytes spread evenly.

    ``holdings[rank]``: the block and its bytes, by name. Replicas hold the same blocks; every rank
    computes the same answer.
    """
    holders: dict[tuple[str, Piece], list[int]] = {}
    sizes: dict[tuple[str, Piece], int] = {}
    for rank, blocks in enumerate(holdings):
        for name, (piece, size) in blocks.items():
            if 0 not in piece.shape:  # where there are more ranks than rows, some hold nothing
                holders.setdefault((name, piece), []).append(rank)
                sizes[name, piece] = size
    load = [0] * len(holdings)
    chosen: list[set[str]] = [set() for _ in holdings]
    for block in sorted(sizes, key=lambda block: (-sizes[block], block)):
        rank = min(holders[block], key=lambda rank: (load[rank], rank))
        load[rank] += sizes[block]
        chosen[rank].add(block[0])
    return chosen


def covers(whole: Iterable[int], parts: Iterable[Piece]) -> bool:
    """Whether ``parts``, which do not overlap, make up a tensor of shape ``whole``."""
    return sum(math.prod(part.shape) for part in parts) == math.prod(whole)
