"""A batch in which documents that share a sequence do not see each other.

Positions start anew with every document. That is how it is told to Hugging Face models: without an
attention mask and a cache, transformers takes positions that do not go on for another document and
masks attention by blocks (``sdpa``, ``eager``, ``flex_attention``), and so does context
parallelism here. For kernels over sequences of their own lengths `cu_seqlens` are the ends.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

IGNORED_LABEL = -100  # the ignore_index of torch's cross entropy and of Hugging Face models


@dataclass(frozen=True)
class Masks:
    """What a batch hides."""

    documents: bool = False
    """a document's tokens see that document alone, and its first token is nobody's target"""
    eos: bool = False
    """the token that ends a document is no target"""


NOTHING = Masks()


def batch(dataset, windows: np.ndarray, masks: Masks) -> dict[str, torch.Tensor]:
    """The windows [B] of a dataset: ``input_ids`` and ``labels``, LongTensor [B, S] each.

    Labels equal the input ids, for Hugging Face models shift them inside, and are -100 for what is
    no target. ``masks.documents`` adds ``position_ids`` [B, S].
    """
    found = arrays(dataset, windows, masks)
    return {name: torch.from_numpy(array) for name, array in found.items()}


def arrays(dataset, windows: np.ndarray, masks: Masks) -> dict[str, np.ndarray]:
    """As `batch`, int64."""
    rows = dataset.rows(windows, documents=masks.documents)
    labels = rows.tokens.copy()
    if masks.eos:
        labels[rows.tokens == dataset.manifest.eos_id] = IGNORED_LABEL
    if rows.filled is not None:
        for row, count in enumerate(rows.filled.tolist()):
            labels[row, count:] = IGNORED_LABEL
    found = {"input_ids": rows.tokens, "labels": labels}
    if masks.documents:
        labels.reshape(-1)[rows.begins] = IGNORED_LABEL
        found["position_ids"] = _since(rows.begins, labels.size).reshape(labels.shape)
    return found


def cu_seqlens(position_ids: torch.Tensor) -> torch.Tensor:
    """Where documents end in a batch laid end to end: int32 [documents + 1], from 0 to B * S.

    What `flash_attn_varlen_func` calls by that name; `position_ids` [B, S] as `batch` makes them.
    """
    begins = torch.nonzero(position_ids.reshape(-1) == 0)[:, 0]
    ends = begins.new_tensor([position_ids.numel()])
    return torch.cat([begins, ends]).int()


def _since(begins: np.ndarray, count: int) -> np.ndarray:
    """The distance from the last of `begins`, of which 0 is one, of each of `count` places."""
    sizes = np.empty_like(begins)
    np.subtract(begins[1:], begins[:-1], out=sizes[:-1])
    sizes[-1] = count - begins[-1]
    found = np.repeat(begins, sizes)
    return np.subtract(_ramp(count), found, out=found)


@functools.lru_cache(maxsize=4)
def _ramp(count: int) -> np.ndarray:
    return np.arange(count)
