"""Batches of one data rank, in an order that survives a restart with another number of ranks.

The order is a function of (seed, position) alone: sample g is window permute(g mod n) of epoch
g // n, and a step takes the next G samples whoever reads them. So the state is one integer, and
resuming is instant at any position. Source: the elastic resume of OLMo-core and Grain. Where reads
must be large (`BlockShuffle`), another function of the same kind takes permute's place, and the
ranks share a step's samples out by where they lie.
"""

import functools
import hashlib
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch

from .. import runtime
from ..errors import DataError
from . import state
from .blend import Blend
from .blocks import BlockOrder
from .dataset import TokenDataset
from .fetch import Fetcher
from .masking import IGNORED_LABEL, NOTHING, Masks, batch
from .order import Blended, Shuffled, key
from .reads import UNIT

_AT_ONCE = 1024
"""samples whose windows are worked out together: the arithmetic costs little more than of one"""
_CHUNKS = 64
"""times as many are remembered, at 8 bytes each"""


@dataclass(frozen=True)
class BlockShuffle:
    """Shuffle blocks of the files over the split, and windows inside groups of blocks.

    Reads become large and each part of a file is read once, by the rank that uses it. In return an
    epoch mixes less, and a rank's windows of one step are neighbours; the step as a whole is not.
    """

    block_mib: int = 4
    """MiB of a file that are shuffled together"""
    blocks: int = 64
    """of them in a group, the windows of which are mixed; at least as many as there are nodes"""


class Loader:
    """An endless iterator; each `next()` is one optimizer step's work for one data rank.

    A step is a list of `micro_batches` dicts, each {"input_ids", "labels"}: LongTensor [B, S] with
    B = `micro_batch_size` and S = the dataset's sequence length, see `masking.batch`; with
    `masks` that hide documents from each other, "position_ids" too. Over all `data_ranks` a step
    takes
    G = micro_batch_size * micro_batches * data_ranks samples, and which samples depends on G only.
    `data_rank` counts ranks that read different data, not all ranks of the job; both default to
    this rank's place in the mesh of `nearlinear.init`.

    `blocks` takes another order, for file systems that want large reads; None is the order it has
    always been. `read_ahead` steps are read by a thread before they are needed.
    """

    def __init__(
        self,
        dataset: TokenDataset | Blend,
        micro_batch_size: int,
        micro_batches: int = 1,
        data_rank: int | None = None,
        data_ranks: int | None = None,
        seed: int = 0,
        blocks: BlockShuffle | None = None,
        read_ahead: int = 0,
        masks: Masks = NOTHING,
    ):
        _require_positive(micro_batch_size=micro_batch_size, micro_batches=micro_batches)
        if read_ahead < 0:
            raise DataError(f"read_ahead is {read_ahead}: give 0 or more steps")
        if (data_rank is None) != (data_ranks is None):
            raise DataError("give both data_rank and data_ranks, or neither")
        if data_rank is None:
            data_rank, data_ranks = runtime.data_place()
        _require_rank(data_rank, data_ranks)
        self.dataset, self.seed = dataset, seed
        self.micro_batch_size, self.micro_batches = micro_batch_size, micro_batches
        self.data_rank, self.data_ranks = data_rank, data_ranks
        self.blocks, self.read_ahead, self.masks = blocks, read_ahead, masks
        self.order = _block_order(dataset, blocks, seed) if blocks else None
        every = self.order or _order(dataset, seed)
        # Of a partial function, not a method: who drops a loader drops the dataset's maps at once.
        self._chunk = functools.lru_cache(_CHUNKS)(functools.partial(_chunk, every))
        self._fetcher = None
        if blocks or read_ahead:  # of blocks, this group's and the next one's are remembered
            self._fetcher = Fetcher(dataset, 2 * blocks.blocks if blocks else 0)
        self._coming: dict[int, tuple[np.ndarray, Future]] = {}
        self._next_sample = 0
        self._last_step: int | None = None

    @property
    def samples_per_step(self) -> int:
        """G: the windows that one optimizer step consumes over all data ranks."""
        return self.micro_batch_size * self.micro_batches * self.data_ranks

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> list[dict[str, torch.Tensor]]:
        base = self._next_sample
        step = [batch(self.dataset, windows, self.masks) for windows in self._read(base)]
        self._last_step, self._next_sample = base, base + self.samples_per_step
        return step

    def _mine(self, base: int) -> np.ndarray:
        """This rank's windows of the step from sample `base` in the usual order, as `_share`."""
        everyones = self._windows(base, self.samples_per_step)
        shape = self.micro_batches, self.data_ranks, self.micro_batch_size
        return everyones.reshape(shape)[:, self.data_rank]

    def _share(self, base: int) -> tuple[np.ndarray, np.ndarray]:
        """This rank's windows of the step from sample `base`, int64 [micro_batches, B].

        And what to read for them: ranges of windows, [N, 2] of first and end.
        """
        if self.order is None:
            mine = self._mine(base)
            return mine, mine.reshape(-1, 1) + np.array([0, 1])
        size, count = self.micro_batch_size, self.micro_batches
        # Neighbours in the files go to one rank, and to the same one in every step of a group.
        places = self.order.places(np.arange(base, base + self.samples_per_step))
        ranks = np.argsort(places[:, 1], kind="stable").reshape(self.data_ranks, -1)
        places = places[ranks[self.data_rank]]
        mine = self.order.windows(places).reshape(count, size)
        return mine, self.order.ranges(np.unique(places[:, 1]))

    def _read(self, base: int) -> np.ndarray:
        """The windows of `_share`, read from the files, with the steps after it under way."""
        if self._fetcher is None:
            return self._mine(base)
        last = base + self.read_ahead * self.samples_per_step
        for ahead in range(base, last + 1, self.samples_per_step):
            if ahead not in self._coming:
                share, ranges = self._share(ahead)
                self._coming[ahead] = share, self._fetcher.start(ranges)
        share, reading = self._coming.pop(base)
        reading.result()
        return share

    @property
    def batch_id(self) -> str:
        """12 hex digits naming the windows of the step last returned, over all ranks.

        Every rank computes the same without communicating, so ranks (or two runs) that disagree
        are reading different data. Raises `DataError` before the first step.
        """
        if self._last_step is None:
            raise DataError("batch_id names the step last returned: call next(loader) first")
        windows = self._windows(self._last_step, self.samples_per_step)
        return hashlib.blake2b(windows.astype("<i8").tobytes(), digest_size=6).hexdigest()

    @property
    def epochs(self) -> dict[str, float]:
        """How often each source of a blend has been read, by its path; of one dataset its own."""
        if isinstance(self.dataset, Blend):
            return self.dataset.epochs(self._next_sample)
        return {str(self.dataset.path): self._next_sample / len(self.dataset)}

    def state_dict(self) -> dict:
        """The position, small and JSON-able; the same on every rank."""
        return state.of(self.dataset, self.seed, self.blocks, self._next_sample)

    def load_state_dict(self, saved: dict) -> None:
        """Go on where `saved` was taken, whatever the number of ranks and micro-batches was.

        Raises `DataError` when that is of another dataset, seed, sequence length or order, since
        the run would repeat some samples and never see others; and of another tokenizer, whose ids
        are other words than those that a model has learned.
        """
        state.check(saved, self.state_dict(), self.dataset.path)
        self._next_sample, self._last_step = int(saved["next_sample"]), None
        self._coming.clear()

    def _windows(self, first: int, count: int) -> np.ndarray:
        """The windows of samples [first, first + count), int64 [count]."""
        chunks = range(first // _AT_ONCE, (first + count - 1) // _AT_ONCE + 1)
        known = [self._chunk(number) for number in chunks]
        known = known[0] if len(known) == 1 else np.concatenate(known)
        return known[first - chunks[0] * _AT_ONCE :][:count]


def evaluation_batches(
    dataset: TokenDataset | Blend,
    batch_size: int,
    data_rank: int = 0,
    data_ranks: int = 1,
    max_windows: int | None = None,
    masks: Masks = NOTHING,
) -> Iterator[dict[str, torch.Tensor]]:
    """Every window once, in order: batches of `batch_size` as the `Loader` makes them.

    `max_windows` limits them to so many over all ranks, evenly spaced over the split, so that a
    loss over them does not depend on the layout. Every rank yields the same number of batches of
    the same shape, so collectives match. Rows past the end repeat earlier windows with all labels
    -100: weigh losses by the count of labels that are not -100, which can be 0 for a whole batch.
    """
    _require_positive(batch_size=batch_size)
    _require_rank(data_rank, data_ranks)
    return _evaluation_batches(dataset, batch_size, data_rank, data_ranks, max_windows, masks)


def _evaluation_batches(dataset, batch_size, data_rank, data_ranks, max_windows, masks):
    n = len(dataset) if max_windows is None else min(len(dataset), max_windows)
    for number in range(-(-n // (batch_size * data_ranks))):
        first = (number * data_ranks + data_rank) * batch_size
        rows = np.arange(first, first + batch_size)
        found = batch(dataset, rows % n * len(dataset) // n, masks)
        found["labels"][torch.from_numpy(rows >= n)] = IGNORED_LABEL
        yield found


def _order(dataset: TokenDataset | Blend, seed: int) -> Shuffled | Blended:
    if isinstance(dataset, Blend):
        return Blended(dataset, lambda source, epoch: key(seed, "source", source, epoch))
    return Shuffled(len(dataset), lambda epoch: key(seed, epoch))


def _chunk(order: Shuffled | Blended | BlockOrder, number: int) -> np.ndarray:
    """The windows of `_AT_ONCE` samples from `number` times as many on."""
    samples = np.arange(number * _AT_ONCE, (number + 1) * _AT_ONCE)
    return order.windows(order.places(samples) if isinstance(order, BlockOrder) else samples)


def _block_order(dataset: TokenDataset | Blend, blocks: BlockShuffle, seed: int) -> BlockOrder:
    if isinstance(dataset, Blend):
        raise DataError(
            "windows are shuffled by blocks of the files of one dataset, and this is a blend: drop "
            "data.shuffle_block_mib, or data.sources"
        )
    if dataset.packing != "concat":
        raise DataError(
            f"windows are shuffled by blocks of the files in the packing concat, and this is "
            f"{dataset.packing}: drop data.shuffle_block_mib, or data.packing"
        )
    _require_positive(block_mib=blocks.block_mib, blocks=blocks.blocks)
    starts = dataset.block_starts(blocks.block_mib * UNIT)
    return BlockOrder(starts, len(dataset), blocks.blocks, lambda *words: key(seed, *words))


def _require_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise DataError(f"{name} is {value}: give at least 1")


def _require_rank(data_rank: int, data_ranks: int) -> None:
    if not 0 <= data_rank < data_ranks:
        raise DataError(
            f"data_rank is {data_rank} of {data_ranks}: give a rank from 0 to data_ranks - 1"
        )
