"""Sample order of datasets and mixtures: pure functions of the seed and the position.

Sample g of a dataset of n windows is window permute(g mod n) of epoch g // n. In a mixture,
`Proportions` assigns sample g to a source, and the source has an order of its own.

`permute` shuffles any number of items in constant memory with a keyed bijection on [0, n). The
bijection is a Feistel network over a grid a x b, the smallest near-square grid with a * b >= n.
Values that land outside [0, n) pass through the network again (cycle walking). The mixing is good
but not cryptographic. Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002).
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from .mixture import Mixture

_ROUNDS = 6
_MASK = 2**64 - 1
_MAX_N = 2**48


def permute(index: np.ndarray, n: int, key: int) -> np.ndarray:
    """Map indices through a keyed permutation of [0, n).

    The result is the same on every platform and numpy version, because only 64-bit integer
    arithmetic is used.

    Args:
        index: int64 indices in [0, n), of any shape.
        n: Number of items, 1 to 2**48.
        key: Any integer. Only its low 64 bits count.

    Returns:
        int64 array in the shape of `index`. Distinct indices give distinct results.

    Raises:
        ValueError: If an index is outside [0, n).
    """
    index = np.asarray(index, dtype=np.int64)
    if not 1 <= n <= _MAX_N:
        raise ValueError(f"n is {n}: permute shuffles 1 to 2**48 items")
    if index.size and not 0 <= int(index.min()) <= int(index.max()) < n:
        raise ValueError(f"indices {index.min()}..{index.max()} are not all within [0, {n})")
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    round_keys = _round_keys(key)
    value = _feistel(index.reshape(-1).astype(np.uint64), a, b, round_keys)
    outside = np.flatnonzero(value >= n)
    while outside.size:
        value[outside] = _feistel(value[outside], a, b, round_keys)
        outside = outside[value[outside] >= n]
    return value.astype(np.int64).reshape(index.shape)


def _feistel(value: np.ndarray, a: int, b: int, round_keys: list[np.uint64]) -> np.ndarray:
    left, right = value // np.uint64(b), value % np.uint64(b)  # in [0, a) and [0, b)
    for number, round_key in enumerate(round_keys):
        if number % 2:
            right = (right + _mix(left, round_key) % np.uint64(b)) % np.uint64(b)
        else:
            left = (left + _mix(right, round_key) % np.uint64(a)) % np.uint64(a)
    return left * np.uint64(b) + right


def _mix(value: np.ndarray, round_key: np.uint64) -> np.ndarray:
    """Apply the SplitMix64 finalizer (Steele, Lea, Flood 2014) to value xor key, modulo 2**64."""
    z = value ^ round_key
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _round_keys(key: int) -> list[np.uint64]:
    """Return the SplitMix64 stream seeded with `key`."""
    keys = []
    for number in range(1, _ROUNDS + 1):
        z = (key + number * 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        keys.append(np.uint64(z ^ (z >> 31)))
    return keys


_EPOCHS_KEPT = 2  # a step may span two epochs


@dataclass(frozen=True)
class _Epoch:
    """Block order of one epoch."""

    blocks: np.ndarray
    """Block numbers in reading order."""
    ends: np.ndarray
    """End position of each group."""


class BlockOrder:
    """Sample order that reads few regions of the files at a time.

    A block consists of the windows that begin in one aligned block of a file. Each epoch shuffles
    the blocks and divides them into groups of consecutive blocks. A group is read round-robin: one
    window of each block, then the next window of each, where the windows of a block are shuffled
    too. Any range of samples therefore draws evenly from all blocks of its group, and each block is
    read once per epoch. Like `permute` over all windows, the order is a pure function of seed and
    position, but it mixes less: within an epoch, a window is mixed only with its own group. The
    order takes 16 bytes per block and none per window.

    Args:
        starts: First window of each block, int64, ascending from 0.
        n: Number of windows.
        group: Number of blocks mixed at a time.
        key: `key(epoch)` is the key of the block shuffle, `key(epoch, block)` that of a block.
    """

    def __init__(self, starts: np.ndarray, n: int, group: int, key: Callable[..., int]):
        self._starts, self._n, self._group, self._key = starts, n, group, key
        self._sizes = np.diff(starts, append=n)
        self._epochs: dict[int, _Epoch] = {}

    def places(self, samples: np.ndarray) -> np.ndarray:
        """Locate samples [N]: int64 [N, 3] of epoch, block, and turn within the block."""
        found = np.empty((len(samples), 3), dtype=np.int64)
        found[:, 0] = samples // self._n
        positions = samples % self._n
        for epoch in np.unique(found[:, 0]).tolist():
            read = self._epoch(epoch)
            group = np.searchsorted(read.ends, positions, side="right")
            for number in np.unique(group[found[:, 0] == epoch]).tolist():
                chosen = (found[:, 0] == epoch) & (group == number)
                blocks = read.blocks[number * self._group : (number + 1) * self._group]
                start = read.ends[number - 1] if number else 0
                found[chosen, 1:] = self._deal(blocks, positions[chosen] - start)
        return found

    @property
    def block_count(self) -> int:
        """Number of blocks."""
        return len(self._starts)

    def windows(self, places: np.ndarray) -> np.ndarray:
        """Return the windows at `places` [N, 3], int64 [N]."""
        found = np.empty(len(places), dtype=np.int64)
        for epoch, block in np.unique(places[:, :2], axis=0).tolist():
            chosen = (places[:, 0] == epoch) & (places[:, 1] == block)
            size = int(self._sizes[block])
            turns = permute(places[chosen, 2], size, self._key(epoch, block))
            found[chosen] = self._starts[block] + turns
        return found

    def ranges(self, blocks: np.ndarray) -> np.ndarray:
        """Return first window and end of each block, int64 [N, 2]."""
        return np.stack([self._starts[blocks], self._starts[blocks] + self._sizes[blocks]], axis=1)

    def first_windows(self, epoch: int) -> np.ndarray:
        """Return the first window of each block in the order of an epoch, int64 [blocks]."""
        return self._starts[self._epoch(epoch).blocks]

    def _deal(self, blocks: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return block and turn of positions within a group, int64 [N, 2].

        Blocks differ in size, because the last block of a file is short. After as many turns as the
        i-th smallest block has windows, the i smallest blocks are exhausted.
        """
        by_size = blocks[np.argsort(self._sizes[blocks], kind="stable")]
        sizes = self._sizes[by_size]
        before = np.concatenate([[0], sizes[:-1]])
        active = np.arange(len(sizes), 0, -1)
        ends = np.cumsum((sizes - before) * active)
        stage = np.searchsorted(ends, positions, side="right")
        since = positions - np.concatenate([[0], ends[:-1]])[stage]
        turn, place = before[stage] + since // active[stage], since % active[stage]
        return np.stack([by_size[stage + place], turn], axis=1)

    def _epoch(self, epoch: int) -> _Epoch:
        if epoch not in self._epochs:
            count = len(self._starts)
            blocks = permute(np.arange(count), count, self._key(epoch))
            last = np.append(np.arange(self._group - 1, count - 1, self._group), count - 1)
            while len(self._epochs) >= _EPOCHS_KEPT:
                del self._epochs[min(self._epochs)]
            self._epochs[epoch] = _Epoch(blocks, np.cumsum(self._sizes[blocks])[last])
        return self._epochs[epoch]


class ShuffledOrder:
    """Shuffled order of `n` windows per epoch. `key(epoch)` is the key of the shuffle."""

    def __init__(self, n: int, key: Callable[[int], int]):
        self._n, self._key = n, key

    def windows(self, samples: np.ndarray) -> np.ndarray:
        """Return the windows of `samples`, int64 [N] each."""
        epochs, positions = samples // self._n, samples % self._n
        found = np.empty_like(samples)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            found[chosen] = permute(positions[chosen], self._n, self._key(epoch))
        return found


class MixtureOrder:
    """Shuffled order of a mixture. `key(source, epoch)` is the key of the shuffle of a source."""

    def __init__(self, mixture: Mixture, key: Callable[..., int]):
        self._proportions, self._offsets = mixture.proportions, mixture.offsets
        self._sources = [
            ShuffledOrder(len(source), functools.partial(key, number))
            for number, source in enumerate(mixture.sources)
        ]

    def windows(self, samples: np.ndarray) -> np.ndarray:
        """Return the windows of `samples`, int64 [N] each."""
        source, own = self._proportions.assign(samples)
        found = np.empty_like(samples)
        for number in np.unique(source).tolist():
            chosen = source == number
            found[chosen] = self._offsets[number] + self._sources[number].windows(own[chosen])
        return found


class MixtureBlockOrder:
    """Block order of a mixture: each source has its own, and blocks are numbered over all sources.

    Args:
        mixture: The mixture.
        orders: Order of each source.
    """

    def __init__(self, mixture: Mixture, orders: list[BlockOrder]):
        self._proportions, self._offsets = mixture.proportions, mixture.offsets
        self._orders = orders
        counts = [order.block_count for order in orders]
        self._first_blocks = np.cumsum(counts) - counts

    def places(self, samples: np.ndarray) -> np.ndarray:
        """Locate samples [N]: int64 [N, 3] of the source's epoch, block, and turn in the block."""
        source_of, own = self._proportions.assign(samples)
        found = np.empty((len(samples), 3), dtype=np.int64)
        for source in np.unique(source_of).tolist():
            chosen = source_of == source
            found[chosen] = self._orders[source].places(own[chosen])
            found[chosen, 1] += self._first_blocks[source]
        return found

    def windows(self, places: np.ndarray) -> np.ndarray:
        """Return the windows of the mixture at `places` [N, 3], int64 [N]."""
        found = np.empty(len(places), dtype=np.int64)
        for source, chosen in self._by_source(places[:, 1]):
            its = places[chosen] - np.array([0, self._first_blocks[source], 0])
            found[chosen] = self._offsets[source] + self._orders[source].windows(its)
        return found

    def ranges(self, blocks: np.ndarray) -> np.ndarray:
        """Return first window and end of each block, int64 [N, 2]."""
        found = np.empty((len(blocks), 2), dtype=np.int64)
        for source, chosen in self._by_source(blocks):
            its = self._orders[source].ranges(blocks[chosen] - self._first_blocks[source])
            found[chosen] = self._offsets[source] + its
        return found

    def _by_source(self, blocks: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        source_of = np.searchsorted(self._first_blocks, blocks, side="right") - 1
        for source in np.unique(source_of).tolist():
            yield source, source_of == source


def key(*words: int | str) -> int:
    """Derive the 64-bit key of a shuffle from its seed, epoch and, if any, source or block."""
    text = ":".join(map(str, words))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
