"""Batches of one data rank, in an order that does not depend on the number of ranks.

The order is a pure function of seed and position: sample g is window permute(g mod n) of epoch
g // n, and each step takes the next G samples over all ranks. The state is a single integer plus
the identity of the order, so a run resumes instantly at any position, also with another number of
ranks. Source: elastic resume of OLMo-core and Grain. `BlockShuffle` selects another pure order with
larger reads, and assigns the samples of a step to ranks by file position.

The loader state is small, JSON-serializable and equal on all ranks. A state of other data or
another order is rejected, because the run would repeat some samples and skip others.
"""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Protocol

import numpy as np
import torch

from ..distributed import runtime
from ..errors import DataError
from .dataset import UNIT, TokenDataset
from .masking import IGNORED_LABEL, NO_MASKS, Masks, make_batch
from .mixture import Mixture
from .packing import VERSION
from .read_ahead import ReadAhead
from .sampler import BlockOrder, MixtureBlockOrder, MixtureOrder, ShuffledOrder, key

_FORMAT, _BLOCK_FORMAT = 1, 2  # the second adds the block shuffle

_IDENTITY = {
    "dataset": None,
    "seed": None,
    "sequence_length": None,
    "packing": "concat",
    "packing_plan": 2,
    "shuffle_block_mib": 0,
    "shuffle_blocks": 0,
    "objective": "causal",
}
"""State keys that determine the batches, with the values assumed when a key is absent."""


class BatchTransform(Protocol):
    """Changes batches, in a way that depends on their sequences and the seeds only."""

    @property
    def identity(self) -> str:
        """Name and settings, part of the loader's state."""
        ...

    def __call__(
        self, batch: dict[str, torch.Tensor], windows: list[int], seeds: list[int]
    ) -> dict[str, torch.Tensor]:
        """Return the changed batch; a window of the dataset and a seed per sequence."""
        ...


def loader_state(
    dataset: TokenDataset | Mixture, seed: int, blocks: BlockShuffle | None, next_sample: int
) -> dict:
    """Return the state of a loader of `dataset` positioned at `next_sample`."""
    state = {
        "format": _BLOCK_FORMAT if blocks else _FORMAT,
        "next_sample": next_sample,
        "seed": seed,
        "sequence_length": dataset.sequence_length,
        "dataset": dataset.fingerprint,
        "tokenizer": dataset.manifest.tokenizer_id,
    }
    if isinstance(dataset, Mixture):
        state["sources"] = dataset.describe()
        if stages := dataset.proportions.describe():
            state["curriculum"] = stages
    if dataset.packing != "concat":
        state["packing"] = dataset.packing
        state["packing_plan"] = VERSION
    if blocks:
        state["shuffle_block_mib"] = blocks.block_mib
        state["shuffle_blocks"] = blocks.blocks
    return state


def check_loader_state(saved: dict, here: dict, path) -> None:
    """Raise `DataError` unless the state `saved` matches the loader state `here` of `path`."""
    words = saved.get("tokenizer", here["tokenizer"])  # absent in older states
    if words["sha256"] != here["tokenizer"]["sha256"]:
        raise DataError(
            f"the loader state is of the tokenizer {_tokenizer(words)}, and {path} is of the "
            f"tokenizer {_tokenizer(here['tokenizer'])}, with other token ids: prepare the data "
            "with the tokenizer of the run (nearlinear data ... --tokenizer), or start a new "
            "run in another folder"
        )
    known = _BLOCK_FORMAT if "shuffle_block_mib" in saved else _FORMAT
    if saved.get("format") != known:
        raise DataError(
            f"the loader state has format {saved.get('format')!r}, but format {known} is expected: "
            "resume with the version that wrote it, or start a new run"
        )
    differing = _other_sources(saved.get("sources", []), here.get("sources", [])) or [
        f"{name} was {saved.get(name, usual)} and is {here.get(name, usual)}"
        for name, usual in _IDENTITY.items()
        if saved.get(name, usual) != here.get(name, usual)
    ]
    differing += _other_stages(saved, here)
    if differing:
        changes = ", ".join(differing)
        raise DataError(
            f"cannot resume the data order: {changes}; use the settings and the nearlinear of "
            "the interrupted run, or start a new run without the loader state"
        )


def _other_sources(before: list[dict], now: list[dict]) -> list[str]:
    """Describe the differences between the sources of two mixtures."""
    found = []
    for number, (was, is_) in enumerate(zip_longest(before, now), 1):
        identity = [each and (each["dataset"], each["share"]) for each in (was, is_)]
        if identity[0] != identity[1]:
            found.append(f"source {number} was {_source(was)} and is {_source(is_)}")
    return found


def _other_stages(saved: dict, here: dict) -> list[str]:
    """Describe the difference between the stages of two curricula that have been reached."""
    reached = [
        [stage for stage in state.get("curriculum", []) if stage[0] < saved["next_sample"]]
        for state in (saved, here)
    ]
    if reached[0] == reached[1]:
        return []
    tokens = saved["next_sample"] * here["sequence_length"]
    return [
        f"the curriculum up to sample {saved['next_sample']} was {reached[0]} and is {reached[1]} "
        f"(new stages may begin at {tokens} tokens or later)"
    ]


def _source(told: dict | None) -> str:
    if told is None:
        return "none"
    return f"{told['share']:.6g} of {told['path']} ({told['dataset'][:12]})"


def _tokenizer(words: dict) -> str:
    return f"{words['name']} (sha256 {words['sha256'][:12]})"


_AT_ONCE = 1024
"""Samples whose windows are computed together, for about the cost of one."""
_CHUNKS = 64
"""Chunks of samples kept in memory, at 8 bytes per sample."""


@dataclass(frozen=True)
class BlockShuffle:
    """Shuffle blocks of the files over the split, and windows within groups of blocks.

    Reads become large, and each part of a file is read once, by the rank that uses it. In return,
    an epoch is mixed less, and the windows of one rank and step are adjacent. The windows of a step
    over all ranks are not.
    """

    block_mib: int = 4
    """Size of a block in MiB."""
    blocks: int = 64
    """Number of blocks mixed at a time; at least the number of nodes."""


class Loader:
    """Endless iterator over optimizer steps for one data rank.

    Each step is a list of `micro_batches` dicts {"input_ids", "labels"}: LongTensor [B, S] with
    B = `micro_batch_size` and S = the dataset's sequence length, see `masking.make_batch`. Document
    masks add "position_ids". Over all data ranks, a step takes
    G = micro_batch_size * micro_batches * data_ranks samples. The samples depend only on G.

    Args:
        dataset: Dataset or mixture to read.
        micro_batch_size: Windows per micro-batch.
        micro_batches: Micro-batches per step.
        data_rank: Index among the ranks that read different data. Defaults to the position of this
            rank in the mesh of `nearlinear.init`.
        data_ranks: Number of ranks that read different data. Defaults to that of the mesh.
        seed: Seed of the order.
        blocks: Order with large reads, for parallel file systems. None shuffles single windows.
        read_ahead: Number of steps read ahead by a thread.
        masks: Tokens excluded from attention and loss.
        transform: Changes every batch; None changes nothing.

    Raises:
        DataError: If an argument is out of range or does not apply to the dataset.
    """

    def __init__(
        self,
        dataset: TokenDataset | Mixture,
        micro_batch_size: int,
        micro_batches: int = 1,
        data_rank: int | None = None,
        data_ranks: int | None = None,
        seed: int = 0,
        blocks: BlockShuffle | None = None,
        read_ahead: int = 0,
        masks: Masks = NO_MASKS,
        transform: BatchTransform | None = None,
    ):
        _require_positive(micro_batch_size=micro_batch_size, micro_batches=micro_batches)
        if read_ahead < 0:
            raise DataError(f"read_ahead is {read_ahead}: give 0 or more steps")
        if (data_rank is None) != (data_ranks is None):
            raise DataError("give both data_rank and data_ranks, or neither")
        if data_rank is None or data_ranks is None:
            data_rank, data_ranks = runtime.data_place()
        _require_rank(data_rank, data_ranks)
        if transform is None and isinstance(dataset, TokenDataset) and dataset.pairs:
            raise DataError(
                f"{dataset.path} holds pairs of conversations, of which one is rejected: a loader "
                "alone would teach both; use nl.Trainer or nearlinear train"
            )
        self.dataset: TokenDataset | Mixture = dataset
        self.seed: int = seed
        self.micro_batch_size: int = micro_batch_size
        self.micro_batches: int = micro_batches
        self.data_rank: int = data_rank
        self.data_ranks: int = data_ranks
        self.blocks: BlockShuffle | None = blocks
        self.read_ahead: int = read_ahead
        self.masks: Masks = masks
        self.transform: BatchTransform | None = transform
        self.order: BlockOrder | MixtureBlockOrder | None = (
            _block_order(dataset, blocks, seed) if blocks else None
        )
        every = self.order or _sample_order(dataset, seed)
        # Wraps a partial function, not a method, so that deleting a loader releases its mappings.
        self._chunk = functools.lru_cache(_CHUNKS)(functools.partial(_chunk, every))
        self._read_ahead_thread = None
        if blocks or read_ahead:  # remember the blocks of this group and the next
            mixed = len(dataset.sources) if isinstance(dataset, Mixture) else 1
            remembered = 2 * blocks.blocks * mixed if blocks else 0
            self._read_ahead_thread = ReadAhead(dataset, remembered)
        self._pending: dict[int, tuple[np.ndarray, Future]] = {}
        self._next_sample = 0
        self._last_step: int | None = None

    @property
    def samples_per_step(self) -> int:
        """Windows per optimizer step over all data ranks (G)."""
        return self.micro_batch_size * self.micro_batches * self.data_ranks

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> list[dict[str, torch.Tensor]]:
        base = self._next_sample
        step = [self._batch(base, windows) for windows in self._read(base)]
        self._last_step, self._next_sample = base, base + self.samples_per_step
        return step

    def _batch(self, base: int, windows: np.ndarray) -> dict[str, torch.Tensor]:
        """Return the micro-batch of ``windows`` in the step at sample `base`."""
        batch = make_batch(self.dataset, windows, self.masks)
        if self.transform is None:
            return batch
        numbers = windows.tolist()
        return self.transform(batch, numbers, [key(self.seed, "noise", base, n) for n in numbers])

    def last_step_of(self, data_rank: int) -> list[dict[str, torch.Tensor]]:
        """Return the micro-batches of the last step that are those of another data rank."""
        assert self._last_step is not None
        other = copy.copy(self)
        other.data_rank = data_rank
        windows, _ = other._share(self._last_step)
        return [self._batch(self._last_step, each) for each in windows]

    def _rank_windows(self, base: int) -> np.ndarray:
        """Return this rank's windows of the step at sample `base` without block shuffling."""
        everyones = self._windows(base, self.samples_per_step)
        shape = self.micro_batches, self.data_ranks, self.micro_batch_size
        return everyones.reshape(shape)[:, self.data_rank]

    def _share(self, base: int) -> tuple[np.ndarray, np.ndarray]:
        """Return this rank's windows of the step at sample `base`, int64 [micro_batches, B].

        Also returns the ranges of windows to read ahead, [N, 2] of first and end.
        """
        if self.order is None:
            mine = self._rank_windows(base)
            return mine, mine.reshape(-1, 1) + np.array([0, 1])
        size, count = self.micro_batch_size, self.micro_batches
        # Adjacent windows go to the same rank in every step of a group.
        places = self.order.places(np.arange(base, base + self.samples_per_step))
        ranks = np.argsort(places[:, 1], kind="stable").reshape(self.data_ranks, -1)
        places = places[ranks[self.data_rank]]
        mine = self.order.windows(places).reshape(count, size)
        return mine, self.order.ranges(np.unique(places[:, 1]))

    def _read(self, base: int) -> np.ndarray:
        """Return this rank's windows after their read-ahead, and start that of later steps."""
        if self._read_ahead_thread is None:
            return self._rank_windows(base)
        last = base + self.read_ahead * self.samples_per_step
        for ahead in range(base, last + 1, self.samples_per_step):
            if ahead not in self._pending:
                share, ranges = self._share(ahead)
                self._pending[ahead] = share, self._read_ahead_thread.start(ranges)
        share, reading = self._pending.pop(base)
        reading.result()
        return share

    @property
    def batch_id(self) -> str:
        """Hash of the windows of the last step over all ranks, 12 hex digits.

        Every rank computes the same value without communication, so ranks or runs with different
        values read different data. Raises `DataError` before the first step.
        """
        if self._last_step is None:
            raise DataError(
                "batch_id identifies the last step, and there is none yet: call next(loader) first"
            )
        windows = self._windows(self._last_step, self.samples_per_step)
        return hashlib.blake2b(windows.astype("<i8").tobytes(), digest_size=6).hexdigest()

    @property
    def epochs(self) -> dict[str, float]:
        """Epochs read of each source of a mixture, or of the dataset, keyed by path."""
        if isinstance(self.dataset, Mixture):
            return self.dataset.epochs(self._next_sample)
        return {str(self.dataset.path): self._next_sample / len(self.dataset)}

    def state_dict(self) -> dict[str, Any]:
        """Return the position as a small JSON-serializable dict, equal on all ranks."""
        state = loader_state(self.dataset, self.seed, self.blocks, self._next_sample)
        if self.transform is not None:
            state["objective"] = self.transform.identity
        return state

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Resume at the position of `saved`, with any number of ranks and micro-batches.

        Raises:
            DataError: If `saved` is of another dataset, seed, sequence length, order or tokenizer.
        """
        check_loader_state(saved, self.state_dict(), self.dataset.path)
        self._next_sample, self._last_step = int(saved["next_sample"]), None
        self._pending.clear()

    def _windows(self, first: int, count: int) -> np.ndarray:
        """Return the windows of samples [first, first + count), int64 [count]."""
        chunks = range(first // _AT_ONCE, (first + count - 1) // _AT_ONCE + 1)
        known = [self._chunk(number) for number in chunks]
        known = known[0] if len(known) == 1 else np.concatenate(known)
        return known[first - chunks[0] * _AT_ONCE :][:count]


def evaluation_batches(
    dataset: TokenDataset | Mixture,
    batch_size: int,
    data_rank: int = 0,
    data_ranks: int = 1,
    max_windows: int | None = None,
    masks: Masks = NO_MASKS,
    transform: BatchTransform | None = None,
) -> Iterator[dict[str, torch.Tensor]]:
    """Iterate over every window once, in order.

    Every rank yields the same number of batches of the same shape, so collectives match. Rows past
    the end repeat earlier windows with all labels -100. Weight losses by the number of labels other
    than -100, which can be 0 for a whole batch.

    Args:
        dataset: Dataset or mixture to read.
        batch_size: Windows per batch and rank.
        data_rank: Index among the ranks that read different data.
        data_ranks: Number of ranks that read different data.
        max_windows: Limit on the number of windows over all ranks. They are evenly spaced over the
            split, so a loss over them does not depend on the layout.
        masks: Tokens excluded from attention and loss.
        transform: Changes every batch; the same sequences are changed alike every time.

    Raises:
        DataError: If an argument is out of range.
    """
    _require_positive(batch_size=batch_size)
    _require_rank(data_rank, data_ranks)
    n = len(dataset) if max_windows is None else min(len(dataset), max_windows)
    return _evaluation_batches(dataset, batch_size, data_rank, data_ranks, n, masks, transform)


def _evaluation_batches(dataset, batch_size, data_rank, data_ranks, n, masks, transform):
    for number in range(-(-n // (batch_size * data_ranks))):
        first = (number * data_ranks + data_rank) * batch_size
        rows = np.arange(first, first + batch_size)
        windows = rows % n * len(dataset) // n
        found = make_batch(dataset, windows, masks)
        if transform is not None:
            numbers = windows.tolist()
            found = transform(found, numbers, [key("evaluation", number) for number in numbers])
        found["labels"][torch.from_numpy(rows >= n)] = IGNORED_LABEL
        yield found


def _sample_order(dataset: TokenDataset | Mixture, seed: int) -> ShuffledOrder | MixtureOrder:
    if isinstance(dataset, Mixture):
        return MixtureOrder(dataset, lambda source, epoch: key(seed, "source", source, epoch))
    return ShuffledOrder(len(dataset), lambda epoch: key(seed, epoch))


def _chunk(
    order: ShuffledOrder | MixtureOrder | BlockOrder | MixtureBlockOrder, number: int
) -> np.ndarray:
    """Return the windows of chunk `number` of `_AT_ONCE` samples."""
    samples = np.arange(number * _AT_ONCE, (number + 1) * _AT_ONCE)
    if isinstance(order, BlockOrder | MixtureBlockOrder):
        return order.windows(order.places(samples))
    return order.windows(samples)


def _block_order(
    dataset: TokenDataset | Mixture, blocks: BlockShuffle, seed: int
) -> BlockOrder | MixtureBlockOrder:
    _require_positive(block_mib=blocks.block_mib, blocks=blocks.blocks)

    def order(source: TokenDataset, *words: int | str) -> BlockOrder:
        starts = source.block_starts(blocks.block_mib * UNIT)
        keys = functools.partial(key, seed, *words)
        return BlockOrder(starts, len(source), blocks.blocks, keys)

    if not isinstance(dataset, Mixture):
        return order(dataset)
    orders = [order(source, "source", number) for number, source in enumerate(dataset.sources)]
    return MixtureBlockOrder(dataset, orders)


def _require_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise DataError(f"{name} is {value}: give at least 1")


def _require_rank(data_rank: int, data_ranks: int) -> None:
    if not 0 <= data_rank < data_ranks:
        raise DataError(
            f"data_rank is {data_rank} of {data_ranks}: give a rank from 0 to data_ranks - 1"
        )
