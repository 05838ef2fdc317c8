"""Weighted mixtures of datasets. The sample number alone determines the source of a sample.

Weights are exact rational numbers. If their period is short, a table of one period assigns samples
to sources: among the sources behind their share, the one with the earliest deadline gets the next
sample, so every source stays within one sample of its share (Tijdeman, "The chairman assignment
problem", 1980). Longer periods are assigned by a Huffman tree over the weights, whose nodes divide
their samples between two children in proportion, rounded to the nearest integer.

A curriculum changes the weights at given sample numbers.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import heapq
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError
from .dataset import ReadCounters, TokenDataset, WindowRows
from .format import Manifest

PERIOD = 2**12
"""Longest period of a table, in samples."""

MOST_SAMPLES = 2**48
"""More samples than any run reads."""

Stages = Sequence[tuple[int, Sequence[float]]]
"""First sample of each stage of a curriculum, and the weights from there on."""


class Mixture:
    """Weighted mixture of datasets, read as one dataset.

    Each source stays within two samples of its share (`Proportions`). Short sources are repeated
    while longer ones are still in their first epoch.

    Args:
        sources: Weight of each dataset, in order. The datasets must have the same sequence length,
            tokenizer and packing.
        curriculum: Later weights: the first sample of each stage, and its weights in the order of
            the sources.
        max_epochs: Most epochs of a dataset. After them its weight is 0. The others keep their
            relative weights.

    Raises:
        DataError: If the datasets do not match, or weights, stages or limits cannot be used.
    """

    def __init__(
        self,
        sources: Mapping[TokenDataset, float],
        curriculum: Stages = (),
        max_epochs: Mapping[TokenDataset, float] | None = None,
    ):
        self.sources: list[TokenDataset] = list(sources)
        self.weights: list[float] = list(sources.values())
        if not self.sources:
            raise DataError("a mixture of no datasets: give at least one")
        epochs = max_epochs or {}
        limits = [_limit(epochs.get(source), source) for source in self.sources]
        self.proportions: Curriculum = Curriculum([(0, self.weights), *curriculum], limits)
        first = self.sources[0]
        if any(source.pairs for source in self.sources):
            raise DataError(
                "pairs of conversations (nearlinear data preference) cannot be mixed: prepare all "
                "files together, and set data.path"
            )
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
        self.marks_targets: bool = any(each.marks_targets for each in self.sources)
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
        later = len(self.proportions.stages) - 1
        return "; ".join(parts) + (f"; other weights in {later} later stages" if later else "")

    def __len__(self) -> int:
        """Number of windows of all sources."""
        return self._length

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of the sources' tokens and first proportions, 64 hex digits, and the split."""
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
        """Return path, fingerprint and first share of each source."""
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
    """Assignment of sample numbers to sources in proportion to `weights`, which are exact.

    Among the first g samples, the number from each source differs from g times its share by less
    than one, or less than two if the period exceeds `PERIOD`.

    Raises:
        DataError: If a weight is not a number of at least 0, or all are 0.
    """

    def __init__(self, weights: Sequence[float]):
        exact = [Fraction(str(weight)) for weight in weights if _is_weight(weight)]
        if len(exact) != len(weights) or not any(exact):
            raise DataError(
                f"weights are {weights}: every weight must be a number of at least 0, and one above"
            )
        common = math.lcm(*(weight.denominator for weight in exact))
        parts = [int(weight * common) for weight in exact]
        self.parts: list[int] = [part // math.gcd(*parts) for part in parts]
        self.period: int = sum(self.parts)
        self.shares: list[float] = [part / self.period for part in self.parts]
        short = self.period <= PERIOD
        self._assignment = _Table(self.parts) if short else _Tree(self.parts)

    def counts(self, samples: int) -> np.ndarray:
        """Count the samples of each source among the first `samples`, int64 [sources]."""
        return self._assignment.counts(samples)

    def assign(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each sample [N] and its number within the source, int64 [N]."""
        return self._assignment.assign(samples)


class Curriculum:
    """Proportions that change at given samples; the first stage begins at sample 0.

    A source that reaches its limit, in samples, begins a stage without it.

    Raises:
        DataError: If stages do not begin one after the other, or weights cannot be used.
    """

    end: int | None = None
    """First sample for which every source has reached its limit or has no weight; None: never."""

    def __init__(self, stages: Stages, limits: Sequence[int | None] = ()):
        starts = [start for start, _ in stages]
        if starts != sorted(set(starts)):
            raise DataError(
                f"stages of the curriculum begin at samples {starts}: each must begin later than "
                "the one before"
            )
        for source in range(len(stages[0][1])):
            if not any(weights[source] for _, weights in stages):
                raise DataError(f"source {source + 1} has the weight 0: remove it")
        self._set([(start, list(weights)) for start, weights in stages])
        self.parts: list[int] = self.stages[0][1].parts
        self.shares: list[float] = self.stages[0][1].shares
        left = {source: limit for source, limit in enumerate(limits) if limit is not None}
        while left and self.end is None:  # the samples of a source that ends go to the others
            reached = {source: self._reaches(source, limit) for source, limit in left.items()}
            first = min(left, key=lambda source: (reached[source], source))
            if reached[first] > MOST_SAMPLES:
                break
            self._remove(first, reached[first])
            del left[first]

    def _set(self, stages: list[tuple[int, list[float]]]) -> None:
        self._weights = stages
        self.stages: list[tuple[int, Proportions]] = [
            (start, Proportions(weights)) for start, weights in stages
        ]
        starts = [start for start, _ in stages]
        self._starts = np.array(starts, dtype=np.int64)
        before = [np.zeros(len(stages[0][1]), dtype=np.int64)]
        for (start, proportions), after in zip(self.stages, starts[1:], strict=False):
            before.append(before[-1] + proportions.counts(after - start))
        self._before = np.stack(before)

    def _reaches(self, source: int, limit: int) -> int:
        """Return how many samples it takes to read `limit` of a source; more than `MOST_SAMPLES`
        if it is not read that often."""
        return bisect.bisect_left(
            range(MOST_SAMPLES + 1), limit, key=lambda samples: int(self.counts(samples)[source])
        )

    def _remove(self, source: int, at: int) -> None:
        """Begin a stage without a source at a sample."""
        stages = []
        ends = [*self._starts[1:].tolist(), MOST_SAMPLES]
        for (start, weights), end in zip(self._weights, ends, strict=True):
            if start < at:
                stages.append((start, weights))
            if end > at:
                rest = [0.0 if each == source else weight for each, weight in enumerate(weights)]
                if not any(rest):
                    self.end = max(at, start)
                    break
                stages.append((max(at, start), rest))
        self._set(stages)

    def describe(self) -> list[list[Any]]:
        """Return first sample and integer weights of each stage but the first."""
        return [[start, proportions.parts] for start, proportions in self.stages[1:]]

    def counts(self, samples: int) -> np.ndarray:
        """Count the samples of each source among the first `samples`, int64 [sources]."""
        stage = max(0, int(np.searchsorted(self._starts, samples)) - 1)
        start, proportions = self.stages[stage]
        return self._before[stage] + proportions.counts(samples - start)

    def assign(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each sample [N] and its number within the source, int64 [N].

        Raises `DataError` for samples after the end.
        """
        if self.end is not None and samples.max(initial=0) >= self.end:
            raise DataError(
                f"every source of the mixture ends before sample {self.end}: raise "
                "data.max_epochs, add sources, or train for fewer steps"
            )
        stage_of = np.searchsorted(self._starts, samples, side="right") - 1
        source, own = np.empty_like(samples), np.empty_like(samples)
        for stage in np.unique(stage_of).tolist():
            chosen = stage_of == stage
            start, proportions = self.stages[stage]
            source[chosen], numbers = proportions.assign(samples[chosen] - start)
            own[chosen] = numbers + self._before[stage][source[chosen]]
        return source, own


def _limit(epochs: float | None, source: TokenDataset) -> int | None:
    """Return the most samples of a source. Raises `DataError`."""
    if epochs is None:
        return None
    if not _is_weight(epochs) or epochs == 0:
        raise DataError(f"the most epochs of {source.path} are {epochs}: give a number above 0")
    return max(1, int(epochs * len(source)))


def _is_weight(weight) -> bool:
    return type(weight) in (int, float) and math.isfinite(weight) and weight >= 0


class _Table:
    """Assignment by a table of one period."""

    def __init__(self, parts: list[int]):
        self._period = sum(parts)
        self._table = assign_slots(parts)
        self._before = np.zeros((self._period + 1, len(parts)), dtype=np.int64)
        np.cumsum(self._table[:, None] == np.arange(len(parts)), axis=0, out=self._before[1:])

    def counts(self, samples: int) -> np.ndarray:
        return samples // self._period * self._before[-1] + self._before[samples % self._period]

    def assign(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rounds, places = samples // self._period, samples % self._period
        source = self._table[places]
        return source, rounds * self._before[-1][source] + self._before[places, source]


@dataclass(frozen=True)
class _Node:
    """A node of a Huffman tree: a source, or two children that share its samples."""

    weight: int
    source: int = -1
    """-1 for a node with children."""
    children: tuple[_Node, _Node] | None = None

    def first_child_count(self, samples: Any) -> Any:
        """Return how many of the node's first `samples` belong to its first child."""
        assert self.children is not None
        return (samples * self.children[0].weight + self.weight // 2) // self.weight


class _Tree:
    """Assignment by a Huffman tree: exact for any integers, in a step per level.

    A child's count is its share of its parent's, rounded. The rounding error of the parent is
    multiplied by that share, which is at most 2/3 above the lowest level of a Huffman tree, because
    a sibling is at least as heavy as either child of the node. So the errors of all levels, of half
    a sample each, add up to less than 1/2 + (1/2) / (1 - 2/3) = 2 samples.
    """

    def __init__(self, parts: list[int]):
        self._sources = len(parts)
        order = itertools.count()
        heap = [(part, next(order), _Node(part, source))
                for source, part in enumerate(parts) if part]  # fmt: skip
        heapq.heapify(heap)
        while len(heap) > 1:
            (light, _, first), (heavy, _, second) = heapq.heappop(heap), heapq.heappop(heap)
            node = _Node(light + heavy, children=(first, second))
            heapq.heappush(heap, (node.weight, next(order), node))
        self._root = heap[0][2]

    def counts(self, samples: int) -> np.ndarray:
        found = np.zeros(self._sources, dtype=np.int64)
        waiting = [(self._root, int(samples))]
        while waiting:
            node, count = waiting.pop()
            if node.children is None:
                found[node.source] = count
            else:
                first = node.first_child_count(count)
                waiting += zip(node.children, (first, count - first), strict=True)
        return found

    def assign(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        source, own = np.empty_like(samples), np.empty_like(samples)
        largest = int(samples.max(initial=0)) + 1
        # Products above 63 bits need Python's integers.
        exact = samples.astype(object) if largest * self._root.weight >= 2**62 else samples
        waiting = [(self._root, np.arange(len(samples)), exact)]
        while waiting:
            node, places, numbers = waiting.pop()
            if node.children is None:
                source[places], own[places] = node.source, numbers.astype(np.int64)
                continue
            before = node.first_child_count(numbers)
            is_first = (node.first_child_count(numbers + 1) > before).astype(bool)
            first, second = node.children
            waiting.append((first, places[is_first], before[is_first]))
            waiting.append((second, places[~is_first], (numbers - before)[~is_first]))
        return source, own


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
        last = ((slack - 1) * total - slack * owed) / (slack * np.maximum(weights, 1))
        chosen = int(np.where(may, last, np.inf).argmin())
        table[place] = chosen
        served[chosen] += 1
    return table
