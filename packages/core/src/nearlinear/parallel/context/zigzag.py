"""Which part of a sequence a context rank has, and which blocks of scores that makes it compute.

A sequence is cut into 2C chunks for C ranks; rank r has chunks r and 2C-1-r. A causal mask empties
what lies ahead of a chunk, so that an early chunk costs little and a late one much, and each of
these pairs the same. Source: the zig-zag variant of Ring Attention (Liu et al. 2023), known from
its public implementations. A rank's rows are its early chunk, then its late one: 2c rows in order.
"""

from dataclasses import dataclass

import torch

ALL = slice(None)


@dataclass(frozen=True)
class Block:
    """A rectangle of scores that no chunk boundary hides: rows of the queries, rows of the keys."""

    queries: slice
    keys: slice
    causal: bool = False  # on the diagonal: the rows of both are the same
    cut: bool = False  # by the window: not every score that causality leaves is seen


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """The two chunks of ``rank``, of ``2 * ranks``."""
    return rank, 2 * ranks - 1 - rank


def padded(length: int, ranks: int) -> int:
    """The least length that chunks divide."""
    return -(-length // (2 * ranks)) * 2 * ranks


def take(whole: torch.Tensor, rank: int, ranks: int, dim: int = 1) -> torch.Tensor:
    """The rows of ``rank``: ``whole`` has a multiple of ``2 * ranks`` of them on ``dim``."""
    chunks = whole.chunk(2 * ranks, dim)
    return torch.cat([chunks[chunk] for chunk in chunks_of(rank, ranks)], dim)


def restore(parts: list[torch.Tensor], dim: int = 1) -> torch.Tensor:
    """The whole sequence from the rows of all ranks: undoes `take`."""
    early, late = zip(*(part.chunk(2, dim) for part in parts), strict=True)
    return torch.cat([*early, *reversed(late)], dim)


def positions(rank: int, ranks: int, chunk: int, device) -> torch.Tensor:
    """Where the rows of ``rank`` stand in the sequence: LongTensor (2 * chunk,)."""
    inside = torch.arange(chunk, device=device)
    return torch.cat([inside + each * chunk for each in chunks_of(rank, ranks)])


def blocks(
    rank: int, source: int, ranks: int, chunk: int, window: int | None = None
) -> list[Block]:
    """What the queries of ``rank`` see of the keys of ``source``; chunks have ``chunk`` rows.

    With ``window`` a query sees that many keys, itself the last.
    """
    early, late = slice(0, chunk), slice(chunk, 2 * chunk)
    if window is None or window >= 2 * ranks * chunk:
        if source == rank:
            return [Block(ALL, ALL, causal=True)]
        return [Block(ALL, early)] if source < rank else [Block(late, ALL)]
    seen = []
    for queries, query_chunk in zip((early, late), chunks_of(rank, ranks), strict=True):
        for keys, key_chunk in zip((early, late), chunks_of(source, ranks), strict=True):
            apart = (query_chunk - key_chunk) * chunk
            if apart >= 0 and apart - chunk + 1 < window:
                seen.append(Block(queries, keys, apart == 0, cut=apart + chunk - 1 >= window))
    return seen
