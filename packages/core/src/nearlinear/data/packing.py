"""Packing of documents into sequences of `length` tokens.

- `concat`: concatenate documents and cut every `length` tokens, at any position of a document.
- `best_fit`: cut only documents longer than a sequence. Pack the remainders by best-fit decreasing,
  and pad the end of each sequence.
- `one_document`: cut like `best_fit`, but put a single remainder in each sequence.

Source: Ding et al., "Fewer Truncations Improve Language Modeling" (2024).

Documents are packed in groups of `GROUP` documents of one shard. Document lengths alone determine
the number of sequences of a group, so a sequence is found by its number and only groups that are
read are packed, in a few milliseconds each. A packed group takes 16 bytes per piece and 8 per
sequence, in a file that all ranks of a node map. Plans are derived from document lengths: they are
not part of the training state and are rebuilt when missing.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np

from ..config.train import Packing
from .cache import CacheFull, locked, warn_full, write_cached
from .source import MOST_OPEN, Documents, Piece

PACKINGS = get_args(Packing)


@dataclass(frozen=True)
class PackingEfficiency:
    """Tokens kept by a packing, and its number of sequences."""

    tokens: int
    """Document tokens placed in a sequence."""
    sequences: int
    total: int
    """Tokens of all documents."""
    length: int
    """Tokens per sequence."""

    @property
    def share(self) -> float:
        """Fraction of document tokens that are kept."""
        return self.tokens / self.total if self.total else 0.0

    @property
    def filled(self) -> float:
        """Fraction of sequence positions that hold a document token."""
        return self.tokens / (self.sequences * self.length) if self.sequences else 0.0


def packing_efficiency(lengths: np.ndarray, length: int) -> dict[str, PackingEfficiency]:
    """Return the efficiency of each packing for documents of `lengths` tokens, including EOS.

    Also includes `truncate`, the rule of SMP's public GPT example: the first `length` tokens of
    each document that has at least `length` tokens without EOS. Shorter documents are dropped.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    total = int(lengths.sum())
    long = int(np.count_nonzero(lengths > length))
    found = {
        "concat": (total // length * length, total // length),
        "truncate": (long * length, long),
    }
    for packing in ("best_fit", "one_document"):
        made, alone = _count_sequences(lengths, length, packing)
        found[packing] = total - alone, made
    return {name: PackingEfficiency(*counts, total, length) for name, counts in found.items()}


def pieces(
    lengths: np.ndarray, length: int, packing: str, skips_long: bool = False
) -> tuple[np.ndarray, ...]:
    """Pack consecutive documents into sequences.

    Full pieces of long documents come first, then the packed remainders. Pieces of a sequence are
    in document order. Sequences of a single token have no target and are dropped, and with
    ``skips_long`` documents longer than a sequence.

    Returns:
        First token and length of each piece, int64 [pieces] each, in sequence order, and the index
        of the first piece of each sequence, int64 [sequences].
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    begins = np.cumsum(lengths) - lengths
    if skips_long:
        lengths = np.where(lengths > length, 0, lengths)
    counts = lengths // length
    turn = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    whole = np.repeat(begins, counts) + turn * length
    rest = np.flatnonzero(lengths % length)
    sizes = lengths[rest] % length
    of = best_fit(sizes, length) if packing == "best_fit" else np.arange(len(rest))
    useful = np.bincount(of, sizes)[of] > 1
    rest, sizes, of = rest[useful], sizes[useful], of[useful]
    order = _stable_argsort(of, len(lengths))
    at = (begins[rest] + lengths[rest] - sizes)[order]
    firsts = np.flatnonzero(np.diff(of[order], prepend=-1))
    return (
        np.concatenate([whole, at]),
        np.concatenate([np.full(len(whole), length), sizes[order]]),
        np.concatenate([np.arange(len(whole)), firsts + len(whole)]),
    )


def sequences(lengths: np.ndarray, length: int, packing: str, skips_long: bool = False) -> int:
    """Count the sequences of `pieces` without packing."""
    lengths = np.asarray(lengths, dtype=np.int64)
    if skips_long:
        lengths = lengths[lengths <= length]
    return _count_sequences(lengths, length, packing)[0]


def _count_sequences(lengths: np.ndarray, length: int, packing: str) -> tuple[int, int]:
    """Count the sequences of `pieces`, and the dropped sequences of a single token."""
    made = int((lengths // length).sum())
    counts = np.bincount(lengths % length, minlength=2)
    if packing == "one_document":
        return made + int(counts[2:].sum()), int(counts[1])
    alone = 0
    for size, room, _, bins, _, items in _place_items(counts, length):
        if room == length:
            if size * items > 1:
                made += bins
            else:
                alone += 1
    return made, alone


def best_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Assign n items of size 1 to `capacity` to bins by best-fit decreasing. Returns int64 [n]."""
    sizes = np.asarray(sizes)
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    made, found = 0, []
    for _, room, left, bins, each, items in _place_items(np.bincount(sizes), capacity):
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
    of[_stable_argsort(capacity - sizes, capacity)] = found
    return of


def _place_items(
    counts: np.ndarray, capacity: int
) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Place `counts[s]` items of each size s by best-fit decreasing.

    Items of equal size are placed together: the bin with the least sufficient room takes as many as
    fit. The number of iterations is therefore one per pair of size and room, not one per item.

    Yields:
        Item size, room of the bins before and after, number of bins, items per bin, and number of
        items. The last bin may take fewer.
    """
    with_room = [0] * capacity
    rooms = 0  # bit r is set if a bin has room r
    values = np.flatnonzero(counts[1:])[::-1] + 1
    for size, count in zip(values.tolist(), counts[values].tolist(), strict=True):
        if 2 * size > capacity:  # fits into no used bin, and leaves no room for the rest
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


def _stable_argsort(values: np.ndarray, most: int) -> np.ndarray:
    """Return a stable sort order of `values` up to `most`. uint16 values use radix sort."""
    return np.argsort(values.astype(np.uint16) if most < 2**16 else values, kind="stable")


GROUP = 2**17
"""Maximum number of documents packed together."""

VERSION = 2
"""Version of the packing algorithm. It determines the sample order and enters the loader state."""
_GROUPS = "groups"
_DAMAGED = (OSError, ValueError, EOFError)

DocumentsOf = Callable[[int], Documents]
"""Documents of a shard, by its number."""
Rule = tuple[int, str, bool]
"""Arguments of `pieces` after the lengths."""


class PackingPlan:
    """Sequences of `length` tokens packed from the documents of `shards` shards.

    `identity` identifies the document lengths. Packed groups are stored under `cache`. The other
    arguments are those of `pieces`.
    """

    def __init__(
        self, cache: Path, identity: str, length: int, packing: str, documents: DocumentsOf,
        shards: int, skips_long: bool = False,
    ):  # fmt: skip
        rule = length, packing, skips_long
        words = json.dumps([VERSION, identity, length, packing, GROUP, *[True] * skips_long])
        folder = cache / "packing" / hashlib.sha256(words.encode()).hexdigest()[:32]
        groups = _map_or_make(folder / _GROUPS, lambda: _count(rule, documents, shards))
        self._shards: list[int] = groups[:, 0].tolist()
        self._ends: list[int] = np.cumsum(groups[:, 3]).tolist()
        # Wraps a partial function, not a method, so that deleting a plan releases its mappings.
        self._group = functools.lru_cache(MOST_OPEN)(
            functools.partial(_group, folder, groups, rule, documents)
        )

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def group_starts(self) -> np.ndarray:
        """First sequence of each group that has sequences, int64 [groups]."""
        starts = np.unique([0, *self._ends])
        return starts[starts < len(self)]

    def pieces(self, numbers: Iterable[int]) -> Iterator[Piece]:
        """Locate the sequences `numbers`. Each sequence is a row."""
        for row, number in enumerate(numbers):
            group = bisect.bisect_right(self._ends, number)
            left, shard = self._ends[group] - number, self._shards[group]
            firsts, parts = self._group(group)
            for start, stop in parts[firsts[-1 - left] : firsts[-left]].tolist():
                yield row, shard, start, stop


def _count(rule: Rule, documents: DocumentsOf, shards: int) -> np.ndarray:
    """Return shard, first token, tokens and sequences of each group, int64 [groups, 4]."""
    found = []
    for shard in range(shards):
        lengths, start = documents(shard).lengths(), 0
        for at in range(0, len(lengths), GROUP):
            group = lengths[at : at + GROUP]
            tokens = int(group.sum())
            found.append((shard, start, tokens, sequences(group, *rule)))
            start += tokens
    return np.array(found, dtype=np.int64).reshape(-1, 4)


def _group(
    folder: Path, groups: np.ndarray, rule: Rule, documents: DocumentsOf, number: int
) -> tuple[memoryview, np.ndarray]:
    """Load or compute the packing of a group.

    Returns the index of the first piece of each sequence followed by the number of pieces,
    [sequences + 1], and the first token in the shard and end of each piece, int64 [pieces, 2].
    """
    shard, start, tokens, count = groups[number].tolist()

    def make() -> np.ndarray:
        lengths = documents(shard).lengths(start, start + tokens)
        begins, sizes, firsts = pieces(lengths, *rule)
        begins += start
        return np.concatenate(
            [firsts, [len(begins)], np.stack([begins, begins + sizes], axis=1).reshape(-1)]
        )

    found = _map_or_make(folder / f"group-{number}", make)
    return found[: count + 1].data, found[count + 1 :].reshape(-1, 2)


def _map_or_make(path: Path, make: Callable[[], np.ndarray]) -> np.ndarray:
    """Map the array stored at `path`. The first process to need it computes it with `make`.

    On a full disk, return the result of `make` from memory.
    """
    path = path.with_suffix(".npy")
    try:
        return _map(path)
    except _DAMAGED:  # absent or damaged
        pass
    try:
        with locked(path.with_suffix(".lock")):
            try:
                return _map(path)
            except _DAMAGED:
                file = io.BytesIO()
                np.save(file, make(), allow_pickle=False)
                write_cached(path, file.getvalue())
    except CacheFull:
        warn_full(path.parents[1])
        return make()
    return _map(path)


def _map(path: Path) -> np.ndarray:
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
