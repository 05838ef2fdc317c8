"""An order of windows in which few places of the files are read at a time.

The windows that begin in one aligned block of a file stay together. An epoch shuffles the blocks;
so many of them in a row make a group; and a group is dealt out in turns: one window of each of its
blocks, then another of each, where every block has its windows in a shuffled order of its own. So
any stretch of samples takes evenly from all blocks of its group, and a block is read once per
epoch. Like `shuffle.permute` over all windows it is a function of (seed, position) and needs no
history. It mixes less: in an epoch a window meets those of its own group only.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .shuffle import permute

_EPOCHS_KEPT = 2  # a step may end in the next one


@dataclass(frozen=True)
class _Epoch:
    blocks: np.ndarray
    """numbers of the blocks in the order in which they are read"""
    ends: np.ndarray
    """position at which each group ends"""


class BlockOrder:
    """The order of `n` windows in blocks, given the first window of each (int64, from 0 up).

    `group` blocks are mixed at a time; `key(epoch)` and `key(epoch, block)` are the shuffles' keys.
    Takes 16 bytes for every block, none for a window.
    """

    def __init__(self, starts: np.ndarray, n: int, group: int, key: Callable[..., int]):
        self._starts, self._n, self._group, self._key = starts, n, group, key
        self._sizes = np.diff(starts, append=n)
        self._epochs: dict[int, _Epoch] = {}

    def places(self, samples: np.ndarray) -> np.ndarray:
        """Where samples are: int64 [N, 3] of epoch, block, and turn within the block."""
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

    def windows(self, places: np.ndarray) -> np.ndarray:
        """The windows at `places` [N, 3], int64 [N]."""
        found = np.empty(len(places), dtype=np.int64)
        for epoch, block in np.unique(places[:, :2], axis=0).tolist():
            chosen = (places[:, 0] == epoch) & (places[:, 1] == block)
            size = int(self._sizes[block])
            turns = permute(places[chosen, 2], size, self._key(epoch, block))
            found[chosen] = self._starts[block] + turns
        return found

    def ranges(self, blocks: np.ndarray) -> np.ndarray:
        """The first window of each block and the one after its last, int64 [N, 2]."""
        return np.stack([self._starts[blocks], self._starts[blocks] + self._sizes[blocks]], axis=1)

    def first_windows(self, epoch: int) -> np.ndarray:
        """The first window of each block, int64 [blocks], blocks as the epoch comes to them."""
        return self._starts[self._epoch(epoch).blocks]

    def _deal(self, blocks: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Block and turn of positions within a group: int64 [N, 2].

        Blocks differ in size (a file's last one is short), so as turns go on fewer take part: from
        the size of the i-th smallest on, all but the i smallest.
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
