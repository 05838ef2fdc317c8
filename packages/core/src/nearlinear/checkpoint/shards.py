"""Shards of tensors: rectangular blocks, which ranks hold and write.

`local_tensor_shards` lists the shards that a rank holds; `assign_writers` chooses the rank that
writes each shard; `tile` checks that shards cover a tensor exactly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch.distributed.tensor import DTensor

from .. import _torch
from ..fsdp.model_state import DimSplit

MAX_SPLIT_DIMS = 4
"""Dims along which a tensor may be divided."""


@dataclass(frozen=True, order=True)
class TensorShard:
    """A rectangular block of a tensor. The field names are part of the checkpoint format."""

    offset: tuple[int, ...]
    """Index of the first element, per dim."""
    shape: tuple[int, ...]
    """Size of the block, per dim."""

    def intersect(self, other: TensorShard) -> TensorShard | None:
        """Return the intersection of two shards of the same tensor, or None if it is empty."""
        first = tuple(map(max, self.offset, other.offset))
        last = tuple(
            min(a + n, b + m)
            for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(end - begin for begin, end in zip(first, last, strict=True))
        return TensorShard(first, shape) if all(size > 0 for size in shape) else None

    @classmethod
    def full(cls, shape: Iterable[int]) -> TensorShard:
        """Return the shard that covers a whole tensor of ``shape``."""
        shape = tuple(shape)
        return cls((0,) * len(shape), shape)

    def slices_in(self, outer: TensorShard) -> tuple[slice, ...]:
        """Return the slices of this shard in the values of ``outer``, which contains it."""
        starts = [mine - theirs for mine, theirs in zip(self.offset, outer.offset, strict=True)]
        return tuple(slice(at, at + n) for at, n in zip(starts, self.shape, strict=True))


def local_tensor_shards(
    tensor: torch.Tensor, splits: Sequence[DimSplit] = ()
) -> dict[TensorShard, torch.Tensor]:
    """Return the shards of a tensor on this rank, each with a view of its memory.

    A shard of a fused projection consists of several blocks. A rank without rows, as with more
    ranks than rows, has no shard.

    Args:
        tensor: A DTensor, or a tensor that is whole or divided by ``splits``.
        splits: Tensor- and expert-parallel divisions applied before the tensor was sharded.
    """
    values = tensor.detach()
    local = TensorShard.full(tensor.shape)
    if isinstance(tensor, DTensor):
        shape, offset = _torch.local_block(tensor)
        values, local = cast(DTensor, values).to_local(), TensorShard(tuple(offset), tuple(shape))
    found = {local: values}
    for split in splits:
        found = {
            shard: part
            for block, part in found.items()
            for shard, part in _undo(split, block, part)
        }
    return {shard: part for shard, part in found.items() if 0 not in shard.shape}


def _undo(
    split: DimSplit, block: TensorShard, values: torch.Tensor
) -> Iterator[tuple[TensorShard, torch.Tensor]]:
    """Yield the blocks of ``values`` with their offsets in the tensor before ``split``."""
    dim, begin = split.dim, block.offset[split.dim]
    end, position = begin + block.shape[dim], 0
    for first, count in split.ranges:
        low, high = max(begin, position), min(end, position + count)
        if low < high:
            offset, shape = list(block.offset), list(block.shape)
            offset[dim], shape[dim] = first + low - position, high - low
            shard = TensorShard(tuple(offset), tuple(shape))
            yield shard, values.narrow(dim, low - begin, high - low)
        position += count


ShardSizes = Sequence[tuple[str, TensorShard, int]]
"""Tensor name, shard, and bytes of every shard of one rank."""


def assign_writers(ranks: Sequence[ShardSizes]) -> list[set[tuple[str, TensorShard]]]:
    """Return the shards that each rank writes: every shard once, with bytes spread evenly.

    Replicas hold the same shards. The result is deterministic, so that all ranks compute the same.
    """
    holders: dict[tuple[str, TensorShard], list[int]] = {}
    sizes: dict[tuple[str, TensorShard], int] = {}
    for rank, held in enumerate(ranks):
        for name, shard, size in held:
            holders.setdefault((name, shard), []).append(rank)
            sizes[name, shard] = size
    load = [0] * len(ranks)
    assigned: list[set[tuple[str, TensorShard]]] = [set() for _ in ranks]
    for shard in sorted(sizes, key=lambda shard: (-sizes[shard], shard)):
        rank = min(holders[shard], key=lambda rank: (load[rank], rank))
        load[rank] += sizes[shard]
        assigned[rank].add(shard)
    return assigned


def tile(shape: tuple[int, ...], shards: Sequence[TensorShard]) -> bool:
    """Return True if ``shards`` cover every element of a tensor of ``shape`` exactly once.

    A sum of indicator functions of boxes is determined by its mixed derivative, which consists of
    signed unit masses at the corners of the boxes. Shards tile the tensor if and only if their
    corners cancel to those of the whole tensor. The time is linear in the number of shards.

    Raises ValueError if the tensor is divided along more than `MAX_SPLIT_DIMS` dims.
    """
    if 0 in shape:
        return not shards
    divided = [
        dim
        for dim, size in enumerate(shape)
        if not all(shard.shape[dim] == size and not shard.offset[dim] for shard in shards)
    ]
    if len(divided) > MAX_SPLIT_DIMS:
        raise ValueError(f"divided along {len(divided)} dims, more than {MAX_SPLIT_DIMS}")
    if not divided:
        return len(shards) == 1
    if len(divided) == 1:
        (dim,) = divided
        end = 0
        for begin, size in sorted((shard.offset[dim], shard.shape[dim]) for shard in shards):
            if begin != end:
                return False
            end += size
        return end == shape[dim]
    masses: dict[tuple[int, ...], int] = {}
    for weight, box in [(-1, TensorShard.full(shape)), *((1, shard) for shard in shards)]:
        ends = [((box.offset[dim], 1), (box.offset[dim] + box.shape[dim], -1)) for dim in divided]
        for corner in itertools.product(*ends):
            place, signs = zip(*corner, strict=True)
            masses[place] = masses.get(place, 0) + weight * math.prod(signs)
    return not any(masses.values())
