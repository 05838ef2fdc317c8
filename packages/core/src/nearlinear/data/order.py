"""The order in which a dataset's windows are read: a function of the seed and the position alone.

Sample g of one dataset is window permute(g mod n) of epoch g // n. Of a blend it is the sample of
one of its sources that its proportions say.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable

import numpy as np

from .blend import Blend
from .shuffle import permute


class Shuffled:
    """The order of `n` windows, epoch after epoch; `key(epoch)` is the key of its shuffle."""

    def __init__(self, n: int, key: Callable[[int], int]):
        self._n, self._key = n, key

    def windows(self, samples: np.ndarray) -> np.ndarray:
        """The windows of `samples`, int64 [N] both."""
        epochs, positions = samples // self._n, samples % self._n
        found = np.empty_like(samples)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            found[chosen] = permute(positions[chosen], self._n, self._key(epoch))
        return found


class Blended:
    """The order of a blend's windows; `key(source, epoch)` is the key of a source's shuffle."""

    def __init__(self, blend: Blend, key: Callable[..., int]):
        self._proportions, self._offsets = blend.proportions, blend.offsets
        self._sources = [
            Shuffled(len(source), functools.partial(key, number))
            for number, source in enumerate(blend.sources)
        ]

    def windows(self, samples: np.ndarray) -> np.ndarray:
        """The windows of `samples`, int64 [N] both."""
        source, own = self._proportions.of(samples)
        found = np.empty_like(samples)
        for number in np.unique(source).tolist():
            chosen = source == number
            found[chosen] = self._offsets[number] + self._sources[number].windows(own[chosen])
        return found


def key(*words: int | str) -> int:
    """The key of the shuffle that ``words`` name: seed, epoch, and the block where it is of one."""
    text = ":".join(map(str, words))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
