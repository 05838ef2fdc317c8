"""Batches of token windows with labels, and document masking through position ids.

Position ids restart at each document. Without an attention mask and a cache, Hugging Face
transformers treats such a restart as a new document and masks attention block-diagonally (`sdpa`,
`eager`, `flex_attention`). Context parallelism in this library does the same. `cu_seqlens` converts
position ids for variable-length attention kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .dataset import TokenDataset
from .mixture import Mixture

IGNORED_LABEL = -100  # the ignore_index of torch's cross entropy and of Hugging Face models


@dataclass(frozen=True)
class Masks:
    """Tokens excluded from attention and from the loss."""

    documents: bool = False
    """Restrict attention to one document, and exclude its first token from the loss."""
    eos: bool = False
    """Exclude EOS tokens from the loss."""


NO_MASKS = Masks()


def make_batch(dataset, windows: np.ndarray, masks: Masks) -> dict[str, torch.Tensor]:
    """Read the windows [B] of a dataset as `input_ids` and `labels`, LongTensor [B, S] each.

    Labels equal the input ids, because Hugging Face models shift them internally, and are -100 for
    excluded tokens. `masks.documents` adds `position_ids` [B, S].
    """
    found = batch_arrays(dataset, windows, masks)
    return {name: torch.from_numpy(array) for name, array in found.items()}


def batch_arrays(dataset, windows: np.ndarray, masks: Masks) -> dict[str, np.ndarray]:
    """Return the batch of `make_batch` as int64 arrays."""
    rows = dataset.rows(windows, documents=masks.documents)
    # As fast as a copy, and ten times as fast where memcpy is slow: on AMD EPYC, from 2 KiB to
    # 256 KiB, if the target lies 16 bytes further in its page, as malloc often places it.
    labels = np.positive(rows.tokens)
    if rows.ignored is not None:
        labels[rows.ignored] = IGNORED_LABEL
    if masks.eos:
        labels[rows.tokens == dataset.manifest.eos_id] = IGNORED_LABEL
    if rows.filled is not None:
        for row, count in enumerate(rows.filled.tolist()):
            if count < labels.shape[1]:
                labels[row, count:] = IGNORED_LABEL
    found = {"input_ids": rows.tokens, "labels": labels}
    if masks.documents:
        labels.reshape(-1)[rows.begins] = IGNORED_LABEL
        found["position_ids"] = _positions(rows.begins, labels.size).reshape(labels.shape)
    return found


def cu_seqlens(position_ids: torch.Tensor) -> torch.Tensor:
    """Return cumulative document lengths of a flattened batch, int32 [documents + 1], 0 to B * S.

    The result is the `cu_seqlens` argument of `flash_attn_varlen_func`. `position_ids` [B, S] come
    from `make_batch`.
    """
    begins = torch.nonzero(position_ids.reshape(-1) == 0)[:, 0]
    ends = begins.new_tensor([position_ids.numel()])
    return torch.cat([begins, ends]).int()


def _positions(begins: np.ndarray, count: int) -> np.ndarray:
    """Return the distance of `count` positions from the preceding start. `begins` contains 0."""
    sizes = np.empty_like(begins)
    np.subtract(begins[1:], begins[:-1], out=sizes[:-1])
    sizes[-1] = count - begins[-1]
    found = np.repeat(begins, sizes)
    return np.subtract(_ramp(count), found, out=found)


@functools.lru_cache(maxsize=4)
def _ramp(count: int) -> np.ndarray:
    return np.arange(count)


class GrainSource:
    """Random-access Grain source. Element i is window i: the arrays [S] of `make_batch`.

    Example::

        source = grain.MapDataset.source(nl.data.GrainSource(dataset)).shuffle(seed=0).repeat()
        share = grain.sharding.ShardOptions(rank, ranks)
        batches = grain.experimental.ElasticIterator(source, 24, share)

    `nl.data.Loader` does not use Grain: its order is equally elastic, its state equally small, its
    cost per window a fraction (`python -m ci.benchmarks.reader`), and it needs only numpy. Checked
    with Grain 0.2.18, which this module does not import.
    """

    def __init__(self, dataset: TokenDataset | Mixture, masks: Masks = NO_MASKS):
        self.dataset: TokenDataset | Mixture = dataset
        self.masks: Masks = masks

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self._getitems([index])[0]

    def _getitems(self, indices: Sequence[int]) -> list[dict[str, np.ndarray]]:
        """Return several elements at once. Grain calls this method by its name."""
        found = batch_arrays(self.dataset, np.asarray(indices, dtype=np.int64), self.masks)
        return [{name: array[i] for name, array in found.items()} for i in range(len(indices))]

    def __repr__(self) -> str:
        return f"GrainSource({self.dataset!r})"
