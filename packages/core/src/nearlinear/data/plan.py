"""The sequences of a packing: counted once for a node, and worked out where they are first read.

Documents are packed with those of their shard, `GROUP` together. How many sequences a group makes
follows from its documents' lengths alone, by counting; so a sequence is found by its number, and
only the groups that are read are packed, each in a few milliseconds: 16 bytes a piece and 8 a
sequence, in a file that all ranks of the node map. A plan follows from the documents' lengths: it
is no part of a run's state, and is made again where it is not.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from .cache import Full, locked, put, tell_full
from .documents import DocumentIndex, DocumentsByToken
from .packing import pieces, sequences
from .stream import MOST_OPEN

GROUP = 2**17
"""documents packed together at most"""

VERSION = 2
"""of how documents become sequences, here and in `packing`: another one is another order"""
_GROUPS = "groups"
_DAMAGED = (OSError, ValueError, EOFError)

Documents = Callable[[int], DocumentIndex | DocumentsByToken]


class Plan:
    """The sequences of `length` tokens of the documents of so many `shards`.

    `identity` stands for the documents' lengths; what has been worked out lies under `cache`.
    """

    def __init__(
        self, cache: Path, identity: str, length: int, packing: str, documents: Documents,
        shards: int,
    ):  # fmt: skip
        words = json.dumps([VERSION, identity, length, packing, GROUP])
        folder = cache / "packing" / hashlib.sha256(words.encode()).hexdigest()[:32]
        groups = _kept(folder / _GROUPS, lambda: _count(length, packing, documents, shards))
        self._shards = groups[:, 0]
        self._ends = np.cumsum(groups[:, 3])
        # Of a partial function, not a method: who drops a plan drops its maps at once.
        self._group = functools.lru_cache(MOST_OPEN)(
            functools.partial(_group, folder, groups, length, packing, documents)
        )

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def pieces(self, numbers: np.ndarray) -> np.ndarray:
        """Where the sequences `numbers` [N] lie: int64 [pieces, 4] of row, shard, token, end there.

        In the order of the rows.
        """
        groups = np.searchsorted(self._ends, numbers, side="right")
        found, counts = [np.empty((0, 2), dtype=np.int64)], []
        for group, left in zip(
            groups.tolist(), (self._ends[groups] - numbers).tolist(), strict=True
        ):
            firsts, parts = self._group(group)
            first, end = firsts[-1 - left], firsts[-left]
            found.append(parts[first:end])
            counts.append(end - first)
        whole = np.empty((sum(counts), 4), dtype=np.int64)
        whole[:, 0] = np.repeat(np.arange(len(counts)), counts)
        whole[:, 1] = self._shards[groups][whole[:, 0]]
        np.concatenate(found, out=whole[:, 2:])
        return whole


def _count(length: int, packing: str, documents: Documents, shards: int) -> np.ndarray:
    """Every group's shard, first token there, tokens, and sequences: int64 [groups, 4]."""
    found = []
    for shard in range(shards):
        lengths, start = documents(shard).lengths(), 0
        for at in range(0, len(lengths), GROUP):
            group = lengths[at : at + GROUP]
            tokens = int(group.sum())
            found.append((shard, start, tokens, sequences(group, length, packing)))
            start += tokens
    return np.array(found, dtype=np.int64).reshape(-1, 4)


def _group(
    folder: Path, groups: np.ndarray, length: int, packing: str, documents: Documents, number: int
) -> tuple[memoryview, np.ndarray]:
    """Of a group, the first piece of each sequence and the end of all, [sequences + 1].

    And its pieces: int64 [pieces, 2] of first token in the shard and end.
    """
    shard, start, tokens, count = groups[number].tolist()

    def make() -> np.ndarray:
        lengths = documents(shard).lengths(start, start + tokens)
        begins, sizes, firsts = pieces(lengths, length, packing)
        begins += start
        return np.concatenate(
            [firsts, [len(begins)], np.stack([begins, begins + sizes], axis=1).reshape(-1)]
        )

    found = _kept(folder / f"group-{number}", make)
    return memoryview(found[: count + 1]), found[count + 1 :].reshape(-1, 2)


def _kept(path: Path, make: Callable[[], np.ndarray]) -> np.ndarray:
    """An array that is mapped from `path`, where the first to need it puts what `make` gives.

    Where there is no room for it, it is what `make` gives.
    """
    path = path.with_suffix(".npy")
    try:
        return _mapped(path)
    except _DAMAGED:  # not there yet, or damaged
        pass
    try:
        with locked(path.with_suffix(".lock")):
            try:
                return _mapped(path)
            except _DAMAGED:
                file = io.BytesIO()
                np.save(file, make(), allow_pickle=False)
                put(path, file.getvalue())
    except Full:
        tell_full(path.parents[1])
        return make()
    return _mapped(path)


def _mapped(path: Path) -> np.ndarray:
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
