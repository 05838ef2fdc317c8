"""How documents become sequences of `length` tokens, and what each way keeps of them.

- ``concat``: documents end to end, cut every `length` tokens; a document is cut anywhere.
- ``best_fit``: a document is cut only where it is longer than a sequence; what is left of each
  goes into the sequence with the least room that takes it, the longest first, with padding after.
- ``one_document``: as best fit, but nothing shares a sequence.

Source: Ding et al., "Fewer Truncations Improve Language Modeling" (2024): best-fit packing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

Packing = Literal["concat", "best_fit", "one_document"]
PACKINGS = get_args(Packing)


@dataclass(frozen=True)
class Kept:
    """What a way of making sequences keeps, and how many it makes."""

    tokens: int
    """of the documents, that are in a sequence"""
    sequences: int
    total: int
    """tokens of the documents"""
    length: int

    @property
    def share(self) -> float:
        """Of the tokens, how many are kept."""
        return self.tokens / self.total if self.total else 0.0

    @property
    def filled(self) -> float:
        """Of the places in the sequences, how many hold a token of a document."""
        return self.tokens / (self.sequences * self.length) if self.sequences else 0.0


def kept(lengths: np.ndarray, length: int) -> dict[str, Kept]:
    """What every packing keeps of documents of `lengths` tokens (EOS counted), by its name.

    Beside them ``truncate``, the rule of SMP's public GPT example: the first `length` tokens of
    documents that have them (without EOS, which it does not add), and no other document.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    total = int(lengths.sum())
    long = int(np.count_nonzero(lengths > length))
    found = {
        "concat": (total // length * length, total // length),
        "truncate": (long * length, long),
    }
    for packing in ("best_fit", "one_document"):
        made, alone = _made(lengths, length, packing)
        found[packing] = total - alone, made
    return {name: Kept(*counts, total, length) for name, counts in found.items()}


def pieces(lengths: np.ndarray, length: int, packing: str) -> tuple[np.ndarray, ...]:
    """The sequences of documents that lie one after the other, as pieces of them.

    Returns begin and tokens of each piece, int64 [pieces], in the order of the sequences, and the
    number of each sequence's first piece, int64 [sequences]. The whole pieces of long documents
    come first, then what is left, a sequence's pieces in the documents' order. A sequence of one
    token would predict nothing and is left out.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    begins = np.cumsum(lengths) - lengths
    counts = lengths // length
    turn = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    whole = np.repeat(begins, counts) + turn * length
    rest = np.flatnonzero(lengths % length)
    sizes = lengths[rest] % length
    of = best_fit(sizes, length) if packing == "best_fit" else np.arange(len(rest))
    useful = np.bincount(of, sizes)[of] > 1
    rest, sizes, of = rest[useful], sizes[useful], of[useful]
    order = _sorted(of, len(lengths))
    at = (begins[rest] + lengths[rest] - sizes)[order]
    firsts = np.flatnonzero(np.diff(of[order], prepend=-1))
    return (
        np.concatenate([whole, at]),
        np.concatenate([np.full(len(whole), length), sizes[order]]),
        np.concatenate([np.arange(len(whole)), firsts + len(whole)]),
    )


def sequences(lengths: np.ndarray, length: int, packing: str) -> int:
    """How many sequences `pieces` makes, without making them."""
    return _made(np.asarray(lengths, dtype=np.int64), length, packing)[0]


def _made(lengths: np.ndarray, length: int, packing: str) -> tuple[int, int]:
    """How many sequences `pieces` makes, and how many tokens it leaves out, each alone in one."""
    made = int((lengths // length).sum())
    counts = np.bincount(lengths % length, minlength=2)
    if packing == "one_document":
        return made + int(counts[2:].sum()), int(counts[1])
    alone = 0
    for size, room, _, bins, _, items in _turns(counts, length):
        if room == length:
            if size * items > 1:
                made += bins
            else:
                alone += 1
    return made, alone


def best_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """The bin, int64 [n], of each of n items of 1 to `capacity`: best fit, the largest first."""
    sizes = np.asarray(sizes)
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    made, found = 0, []
    for _, room, left, bins, each, items in _turns(np.bincount(sizes), capacity):
        if room == capacity:
            chosen = list(range(made, made + bins))
            made += bins
        else:
            waiting = with_room[room]
            chosen = waiting[-bins:]
            del waiting[-bins:]
        with_room[left] += chosen
        if each == 1:
            found += chosen
        else:
            found += [number for number in chosen for _ in range(each)][:items]
    of = np.empty(len(sizes), dtype=np.int64)
    of[_sorted(capacity - sizes, capacity)] = found
    return of


def _turns(counts: np.ndarray, capacity: int) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Best fit of `counts[s]` items of size s, the largest first: who goes where.

    Of each turn the items' size, the room of the bins that take them, what is left of it, how many
    bins, how many items each takes, and how many items there are: the last bin may take fewer.
    Equal items are placed together: the bin with the least room that takes one takes as many as it
    can. So it takes a turn for each pair of a size and a room, not for each item.
    """
    with_room = [0] * capacity
    rooms = 0  # bit r: there is a bin with room r
    values = np.flatnonzero(counts[1:])[::-1] + 1
    for size, count in zip(values.tolist(), counts[values].tolist(), strict=True):
        if 2 * size > capacity:  # nothing has room for it, and it has room for no other
            yield size, capacity, capacity - size, count, 1, count
            with_room[capacity - size] = count
            rooms |= 1 << capacity - size
            continue
        while count:
            fits = rooms >> size
            if fits:
                room = size + (fits & -fits).bit_length() - 1
                each = room // size
                bins = min(with_room[room], count // each or 1)
                with_room[room] -= bins
                if not with_room[room]:
                    rooms ^= 1 << room
            else:
                room, each = capacity, capacity // size
                bins = count // each or 1
            items = min(bins * each, count)
            left = room - min(each, items) * size
            if left:
                with_room[left] += bins
                rooms |= 1 << left
            yield size, room, left, bins, each, items
            count -= items


def _sorted(values: np.ndarray, most: int) -> np.ndarray:
    """The order that sorts `values` of at most `most`, stable: small numbers sort by radix."""
    return np.argsort(values.astype(np.uint16) if most < 2**16 else values, kind="stable")
