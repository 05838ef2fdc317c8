"""Weighted mixtures of datasets. The sample number alone determines the source of a sample.

A table of one period assigns samples to sources. Among the sources behind their share, the one with
the earliest deadline gets the next sample, so every source stays within one sample of its share.
Source: Tijdeman, "The chairman assignment problem" (1980).
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError
from .dataset import ReadCounters, TokenDataset, WindowRows
from .format import Manifest

logger = logging.getLogger("nearlinear.data")

PERIOD = 2**12
"""Maximum period of the assignment in samples. Weights are rounded to that many parts."""


class Mixture:
    """Weighted mixture of datasets, read as one dataset.

    In any range of samples, each source is within two samples of its share (`Proportions`). Short
    sources are repeated while longer ones are still in their first epoch.

    Args:
        sources: Weight of each dataset, in order. The datasets must have the same sequence length,
            tokenizer and packing.

    Raises:
        DataError: If the datasets do not match, or a weight is not positive.
    """

    def __init__(self, sources: Mapping[TokenDataset, float]):
        self.sources: list[TokenDataset] = list(sources)
        self.weights: list[float] = list(sources.values())
        if not self.sources:
            raise DataError("a mixture of no datasets: give at least one")
        self.proportions: Proportions = Proportions(self.weights)
        first = self.sources[0]
        for other in self.sources[1:]:
            for attribute, expected, found in (
                ("tokenizer", first.manifest.tokenizer["sha256"],
                 other.manifest.tokenizer["sha256"]),
                ("vocabulary", first.manifest.vocab_size, other.manifest.vocab_size),
                ("EOS id", first.manifest.eos_id, other.manifest.eos_id),
                ("sequence length", first.sequence_length, other.sequence_length),
                ("packing", first.packing, other.packing),
            ):  # fmt: skip
                if expected != found:
                    raise DataError(
                        f"{first.path} and {other.path} cannot be mixed: their {attribute} differs "
                        f"({expected} and {found}); prepare both with the same settings"
                    )
        self.manifest: Manifest = first.manifest
        self.path: Path | str = first.path
        self.split: str = first.split
        self.sequence_length: int = first.sequence_length
        self.packing: str = first.packing
        self.marks_targets: bool = any(each.manifest.marks_targets for each in self.sources)
        """True if a source holds conversations, of which only some tokens are targets."""
        self.reads: ReadCounters | None = None
        self.tokens: int = sum(source.tokens for source in self.sources)
        ends = np.cumsum([len(source) for source in self.sources])
        self.offsets: np.ndarray = ends - [len(source) for source in self.sources]
        """Offset of each source in the window numbering of the mixture."""
        self._length = int(ends[-1])

    def __repr__(self) -> str:
        parts = (
            f"{share:.4g} of {source}"
            for share, source in zip(self.proportions.shares, self.sources, strict=True)
        )
        return "; ".join(parts)

    def __len__(self) -> int:
        """Number of windows of all sources."""
        return self._length

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of the sources' tokens and proportions, 64 hex digits, and the split's name."""
        identity = [
            [source.fingerprint, part]
            for source, part in zip(self.sources, self.proportions.parts, strict=True)
        ]
        return f"{hashlib.sha256(json.dumps(identity).encode()).hexdigest()}/{self.split}"

    @property
    def files(self) -> list[Path | str]:
        """Token files of all sources."""
        return [file for source in self.sources for file in source.files]

    def describe(self) -> list[dict[str, Any]]:
        """Return path, fingerprint and share of each source."""
        return [
            {"path": str(source.path), "dataset": source.fingerprint, "share": share}
            for source, share in zip(self.sources, self.proportions.shares, strict=True)
        ]

    def rows(self, indices: Sequence[int] | np.ndarray, documents: bool = False) -> WindowRows:
        """Return windows like `TokenDataset.rows`. Windows are numbered source after source."""
        indices, length = np.asarray(indices, dtype=np.int64), self.sequence_length
        tokens = np.empty((len(indices), length), dtype=np.int64)
        filled = np.full(len(indices), length)
        begins = [np.empty(0, dtype=np.int64)]
        ignored = np.zeros(tokens.shape, bool) if self.marks_targets else None
        for source, at, its in self._by_source(indices):
            found = source.rows(its, documents)
            tokens[at] = found.tokens
            if ignored is not None and found.ignored is not None:
                ignored[at] = found.ignored
            if found.filled is not None:
                filled[at] = found.filled
            if documents:
                begins.append(at[found.begins // length] * length + found.begins % length)
        filled = None if self.packing == "concat" else filled
        starts = np.sort(np.concatenate(begins)) if documents else None
        return WindowRows(tokens, filled, starts, ignored)

    def extents(self, first: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Return byte ranges like `TokenDataset.extents`. Files are numbered as in `files`."""
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
        """Return the path of the tokenizer file, see `TokenDataset.tokenizer`."""
        return self.sources[0].tokenizer()

    def prefetch(self, extents: np.ndarray) -> np.ndarray:
        """Download byte ranges like `ShardSource.prefetch`. Files are numbered as in `files`."""
        ends = np.cumsum([len(source.files) for source in self.sources])
        source_of = np.searchsorted(ends, extents[:, 0], side="right")
        left = [np.empty((0, 3), dtype=np.int64)]
        for number in np.unique(source_of).tolist():
            source = self.sources[number]
            first = np.array([ends[number] - len(source.files), 0, 0])
            left.append(source.prefetch(extents[source_of == number] - first) + first)
        return np.concatenate(left)

    def epochs(self, samples: int) -> dict[str, float]:
        """Return the epochs read of each source after `samples` samples, keyed by path."""
        counts = self.proportions.counts(samples)
        return {
            str(source.path): float(count / len(source))
            for source, count in zip(self.sources, counts, strict=True)
        }

    def _by_source(self, indices: np.ndarray):
        source_of = np.searchsorted(self.offsets, indices, side="right") - 1
        for number in np.unique(source_of).tolist():
            rows = np.flatnonzero(source_of == number)
            yield self.sources[number], rows, indices[rows] - self.offsets[number]


class Proportions:
    """Assignment of sample numbers to sources in proportion to `weights`.

    Among the first g samples, the number from each source differs from g times its share by less
    than one. Weights that need a period above `PERIOD` are rounded, with a warning.

    Raises:
        DataError: If a weight is not a positive number.
    """

    def __init__(self, weights: Sequence[float]):
        exact = [Fraction(str(weight)) for weight in weights if _positive(weight)]
        if len(exact) != len(weights):
            raise DataError(f"weights are {weights}: every weight must be a number above 0")
        self.parts: list[int] = _integer_parts(exact)
        self.period: int = sum(self.parts)
        self.shares: list[float] = [part / self.period for part in self.parts]
        _warn_rounded(exact, self.parts)
        table = assign_slots(self.parts)
        counts = np.zeros((len(table) + 1, len(self.parts)), dtype=np.int64)
        np.cumsum(table[:, None] == np.arange(len(self.parts)), axis=0, out=counts[1:])
        self._table, self._before = table, counts

    def counts(self, samples: int) -> np.ndarray:
        """Count the samples of each source among the first `samples`, int64 [sources]."""
        return samples // self.period * self._before[-1] + self._before[samples % self.period]

    def assign(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each sample [N] and its number within the source, int64 [N]."""
        rounds, places = samples // self.period, samples % self.period
        source = self._table[places]
        return source, rounds * self._before[-1][source] + self._before[places, source]


def _positive(weight) -> bool:
    return type(weight) in (int, float) and math.isfinite(weight) and weight > 0


def _integer_parts(weights: list[Fraction]) -> list[int]:
    """Convert weights to coprime integers, rounded to a sum of at most `PERIOD`."""
    common = math.lcm(*(weight.denominator for weight in weights))
    parts = [int(weight * common) for weight in weights]
    parts = [part // math.gcd(*parts) for part in parts]
    if sum(parts) <= PERIOD:
        return parts
    total, room = sum(parts), PERIOD - len(parts)
    rounded = [1 + part * room // total for part in parts]  # every source keeps at least one part
    rests = [(part * room % total, -number) for number, part in enumerate(parts)]
    for _, number in sorted(rests, reverse=True)[: PERIOD - sum(rounded)]:
        rounded[-number] += 1
    return [part // math.gcd(*rounded) for part in rounded]


def _warn_rounded(weights: list[Fraction], parts: list[int]) -> None:
    """Warn about the source with the largest rounding error, if any."""
    asked = [weight / sum(weights) for weight in weights]
    found = [Fraction(part, sum(parts)) for part in parts]
    off = [abs(is_ / was - 1) for is_, was in zip(found, asked, strict=True)]
    if worst := max(off):
        number = off.index(worst)
        logger.warning(
            "mixture weights are rounded to %d parts: source %d gets %.4f %% of the samples "
            "instead of %.4f %%",
            sum(parts), number + 1, 100 * found[number], 100 * asked[number],
        )  # fmt: skip


def assign_slots(parts: list[int]) -> np.ndarray:
    """Assign sum(parts) slots to sources in proportion to `parts`, int64 [sum(parts)]."""
    weights, total = np.array(parts, dtype=np.int64), sum(parts)
    slack = 2 * len(parts) - 2
    served = np.zeros(len(parts), dtype=np.int64)
    table = np.zeros(total, dtype=np.int64)
    if len(parts) == 1:
        return table
    for place in range(total):
        owed = (place + 1) * weights - served * total  # in slots times `total`
        # eligible: owed at least 1 / slack of a slot; the earliest deadline goes first
        may = slack * owed >= total
        last = ((slack - 1) * total - slack * owed) / (slack * weights)
        chosen = int(np.where(may, last, np.inf).argmin())
        table[place] = chosen
        served[chosen] += 1
    return table
