"""Several datasets in given proportions: which one a sample is of follows from its number alone.

A table of one period says whose each sample is. At every place the shares that are behind their
weight are served, the most urgent first, so that no source is ever a whole sample ahead or behind.
Source: Tijdeman, "The chairman assignment problem" (1980).
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

import numpy as np

from ..errors import DataError
from .dataset import Rows, TokenDataset

logger = logging.getLogger("nearlinear.data")

PERIOD = 2**12
"""samples after which the pattern repeats, at most: weights are rounded to that many parts"""


class Blend:
    """Datasets with a weight each, read as one: `{dataset: weight}`, in the order given.

    Of any stretch of samples each source has its share to less than two samples, see `Proportions`;
    a source that is short is read again while others are in their first epoch. Sources have one
    sequence length, tokenizer and packing. Raises `DataError`.
    """

    def __init__(self, sources: Mapping[TokenDataset, float]):
        self.sources, self.weights = list(sources), list(sources.values())
        if not self.sources:
            raise DataError("a blend of no datasets: give at least one")
        self.proportions = Proportions(self.weights)
        first = self.sources[0]
        for other in self.sources[1:]:
            for what, mine, its in (
                ("tokenizer", first.manifest.tokenizer["sha256"],
                 other.manifest.tokenizer["sha256"]),
                ("vocabulary", first.manifest.vocab_size, other.manifest.vocab_size),
                ("end of a document", first.manifest.eos_id, other.manifest.eos_id),
                ("sequence length", first.sequence_length, other.sequence_length),
                ("packing", first.packing, other.packing),
            ):  # fmt: skip
                if mine != its:
                    raise DataError(
                        f"{first.path} and {other.path} cannot be blended: their {what} differs "
                        f"({mine} and {its}); prepare them alike"
                    )
        self.manifest, self.path, self.split = first.manifest, first.path, first.split
        self.sequence_length, self.packing = first.sequence_length, first.packing
        self.reads = None
        self.tokens = sum(source.tokens for source in self.sources)
        ends = np.cumsum([len(source) for source in self.sources])
        self.offsets = ends - [len(source) for source in self.sources]
        """of each source's first window among the windows of all"""
        self._length = int(ends[-1])

    def __repr__(self) -> str:
        parts = (
            f"{share:.4g} of {source}"
            for share, source in zip(self.proportions.shares, self.sources, strict=True)
        )
        return "; ".join(parts)

    def __len__(self) -> int:
        """The windows of all sources."""
        return self._length

    @functools.cached_property
    def fingerprint(self) -> str:
        """Identity of the sources' tokens and proportions: 64 hex digits, plus the split's name."""
        identity = [
            [source.fingerprint, part]
            for source, part in zip(self.sources, self.proportions.parts, strict=True)
        ]
        return f"{hashlib.sha256(json.dumps(identity).encode()).hexdigest()}/{self.split}"

    @property
    def files(self) -> list[Path]:
        """The files of all sources."""
        return [file for source in self.sources for file in source.files]

    def describe(self) -> list[dict]:
        """Every source's path, fingerprint and share."""
        return [
            {"path": str(source.path), "dataset": source.fingerprint, "share": share}
            for source, share in zip(self.sources, self.proportions.shares, strict=True)
        ]

    def rows(self, indices, documents: bool = False) -> Rows:
        """As of a `TokenDataset`; the second source's windows follow the first one's, and so on."""
        indices, length = np.asarray(indices, dtype=np.int64), self.sequence_length
        tokens = np.empty((len(indices), length), dtype=np.int64)
        filled = np.full(len(indices), length)
        begins = [np.empty(0, dtype=np.int64)]
        for source, at, its in self._by_source(indices):
            found = source.rows(its, documents)
            tokens[at] = found.tokens
            if found.filled is not None:
                filled[at] = found.filled
            if documents:
                begins.append(at[found.begins // length] * length + found.begins % length)
        filled = None if self.packing == "concat" else filled
        return Rows(tokens, filled, np.sort(np.concatenate(begins)) if documents else None)

    def extents(self, first, end) -> np.ndarray:
        """As of a `TokenDataset`, of the windows' places in `files`."""
        ranges = [np.arange(*pair) for pair in zip(first, end, strict=True)]
        indices = np.concatenate([np.empty(0, dtype=np.int64), *ranges])
        files = np.cumsum([0, *(len(source.files) for source in self.sources)])
        found = [np.empty((0, 3), dtype=np.int64)]
        for source, _, its in self._by_source(indices):
            lie = source.extents(its)
            lie[:, 0] += files[self.sources.index(source)]
            found.append(lie)
        return np.concatenate(found)

    def tokenizer(self) -> Path:
        """As of a `TokenDataset`."""
        return self.sources[0].tokenizer()

    def bring(self, extents: np.ndarray) -> np.ndarray:
        """As `Split.bring`, of places in `files`."""
        ends = np.cumsum([len(source.files) for source in self.sources])
        of = np.searchsorted(ends, extents[:, 0], side="right")
        left = [np.empty((0, 3), dtype=np.int64)]
        for number in np.unique(of).tolist():
            source = self.sources[number]
            first = np.array([ends[number] - len(source.files), 0, 0])
            left.append(source.bring(extents[of == number] - first) + first)
        return np.concatenate(left)

    def epochs(self, samples: int) -> dict[str, float]:
        """How often each source, by its path, has been read after so many samples."""
        counts = self.proportions.counts(samples)
        return {
            str(source.path): float(count / len(source))
            for source, count in zip(self.sources, counts, strict=True)
        }

    def _by_source(self, indices: np.ndarray):
        of = np.searchsorted(self.offsets, indices, side="right") - 1
        for number in np.unique(of).tolist():
            rows = np.flatnonzero(of == number)
            yield self.sources[number], rows, indices[rows] - self.offsets[number]


class Proportions:
    """Whose sample g is: of n sources with `weights`, a function of g.

    Weights that are not n-ths of at most `PERIOD` are rounded to it, which is said. Among the first
    g samples those of source k are g times its share, to less than one sample. Raises `DataError`.
    """

    def __init__(self, weights):
        weights = [Fraction(str(weight)) if _positive(weight) else None for weight in weights]
        if None in weights:
            raise DataError(f"weights are {weights}: give each source a number above 0")
        self.parts = _whole(weights)
        self.period = sum(self.parts)
        self.shares = [part / self.period for part in self.parts]
        _tell_rounded(weights, self.parts)
        table = _chairs(self.parts)
        counts = np.zeros((len(table) + 1, len(self.parts)), dtype=np.int64)
        np.cumsum(table[:, None] == np.arange(len(self.parts)), axis=0, out=counts[1:])
        self._table, self._before = table, counts

    def counts(self, samples: int) -> np.ndarray:
        """How many of the first `samples` each source has, int64 [sources]."""
        return samples // self.period * self._before[-1] + self._before[samples % self.period]

    def of(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source of `samples` [N], and which of that source's samples it is: int64 [N]."""
        rounds, places = samples // self.period, samples % self.period
        source = self._table[places]
        return source, rounds * self._before[-1][source] + self._before[places, source]


def _positive(weight) -> bool:
    return type(weight) in (int, float) and math.isfinite(weight) and weight > 0


def _whole(weights: list[Fraction]) -> list[int]:
    """Weights in whole numbers that have no common divisor, and add up to at most `PERIOD`."""
    common = math.lcm(*(weight.denominator for weight in weights))
    parts = [int(weight * common) for weight in weights]
    parts = [part // math.gcd(*parts) for part in parts]
    if sum(parts) <= PERIOD:
        return parts
    total, room = sum(parts), PERIOD - len(parts)
    rounded = [1 + part * room // total for part in parts]  # nobody goes without
    rests = [(part * room % total, -number) for number, part in enumerate(parts)]
    for _, number in sorted(rests, reverse=True)[: PERIOD - sum(rounded)]:
        rounded[-number] += 1
    return [part // math.gcd(*rounded) for part in rounded]


def _tell_rounded(weights: list[Fraction], parts: list[int]) -> None:
    """Say which source has a share that is furthest from its weight, if one is."""
    asked = [weight / sum(weights) for weight in weights]
    found = [Fraction(part, sum(parts)) for part in parts]
    off = [abs(is_ / was - 1) for is_, was in zip(found, asked, strict=True)]
    if worst := max(off):
        number = off.index(worst)
        logger.warning(
            "a blend's weights are rounded to %d parts: source %d has %.4f %% of the samples in "
            "place of %.4f %%",
            sum(parts), number + 1, 100 * found[number], 100 * asked[number],
        )  # fmt: skip


def _chairs(parts: list[int]) -> np.ndarray:
    """Who has each of sum(parts) places, int64: at every place, all are near their share."""
    weights, total = np.array(parts, dtype=np.int64), sum(parts)
    slack = 2 * len(parts) - 2
    served = np.zeros(len(parts), dtype=np.int64)
    table = np.zeros(total, dtype=np.int64)
    if len(parts) == 1:
        return table
    for place in range(total):
        owed = (place + 1) * weights - served * total  # in places times `total`
        # who is owed 1 / slack of a place may sit; first who must, soonest
        may = slack * owed >= total
        last = ((slack - 1) * total - slack * owed) / (slack * weights)
        chosen = int(np.where(may, last, np.inf).argmin())
        table[place] = chosen
        served[chosen] += 1
    return table
