"""The sequences of a packing, computed once for a node and mapped from a file by all of its ranks.

A plan lists pieces of documents in the order of the sequences: 12 bytes a piece, 8 a sequence, on
disk. So a sequence is found by its number alone, and memory holds the pages that are used. It
follows from the documents' lengths: it is no part of a run's state, and is made again where it is
not. Documents are packed with those of their shard, at most `GROUP` together.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from .cache import locked
from .packing import pieces

GROUP = 2**18
"""documents packed together at most; 2 GiB of text of a shard hold about as many"""

_VERSION = 1
_ABOUT = "plan.json"
_ARRAYS = {"begins": "<i8", "tokens": "<i4", "firsts": "<i8"}


class Plan:
    """A plan in a folder: `begins` and `tokens` of pieces, `firsts`, the first of each sequence."""

    def __init__(self, folder: Path):
        about = json.loads((folder / _ABOUT).read_text())
        sizes = {"begins": about["pieces"], "tokens": about["pieces"], "firsts": about["sequences"]}
        for name, dtype in _ARRAYS.items():
            setattr(self, name, _mapped(folder / name, dtype, sizes[name]))
        self.pieces, self.total = about["pieces"], about["tokens"]

    begins: np.ndarray
    tokens: np.ndarray
    firsts: np.ndarray

    def __len__(self) -> int:
        return len(self.firsts)

    def of(self, sequences: np.ndarray) -> np.ndarray:
        """The pieces of `sequences` [N]: int64 [pieces, 3] of row, begin, tokens."""
        first = self.firsts[sequences]
        after = sequences + 1
        last = np.where(
            after < len(self), self.firsts[np.minimum(after, len(self) - 1)], self.pieces
        )
        counts = last - first
        row = np.repeat(np.arange(len(first)), counts)
        at = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts) + first[row]
        return np.stack([row, self.begins[at], self.tokens[at]], axis=1)


def _mapped(path: Path, dtype: str, count: int) -> np.ndarray:
    if not count:  # which cannot be mapped
        return np.empty(0, dtype)
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", shape=(count,)))


def plan(
    cache: Path, identity: str, length: int, packing: str, shards: Iterable[np.ndarray]
) -> Plan:
    """The plan of documents whose lengths `shards` has, shard by shard; from `cache` if there.

    `identity` stands for those lengths. One rank of a node makes it, others wait for it.
    """
    words = json.dumps([_VERSION, identity, length, packing, GROUP])
    name = hashlib.sha256(words.encode()).hexdigest()[:32]
    folder = cache / "packing" / name
    try:
        return Plan(folder)
    except (OSError, ValueError, KeyError):
        pass
    with locked(folder.with_suffix(".lock")):
        try:
            return Plan(folder)
        except (OSError, ValueError, KeyError):  # not there yet, or damaged
            _make(folder, length, packing, shards)
    return Plan(folder)


def _make(folder: Path, length: int, packing: str, shards: Iterable[np.ndarray]) -> None:
    partial = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.partial")
    partial.mkdir(parents=True)
    try:
        about = _write(partial, length, packing, shards)
        (partial / _ABOUT).write_text(json.dumps(about))
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(folder: Path, length: int, packing: str, shards: Iterable[np.ndarray]) -> dict:
    start = done = sequences = 0
    files = {name: open(folder / name, "wb") for name in _ARRAYS}
    for lengths in shards:
        for at in range(0, len(lengths), GROUP):
            group = lengths[at : at + GROUP]
            begins, tokens, firsts = pieces(group, length, packing)
            arrays = {"begins": begins + start, "tokens": tokens, "firsts": firsts + done}
            for name, dtype in _ARRAYS.items():
                files[name].write(arrays[name].astype(dtype).tobytes())
            start += int(group.sum())
            done, sequences = done + len(begins), sequences + len(firsts)
    for file in files.values():
        file.close()
    return {"pieces": done, "sequences": sequences, "tokens": start}
