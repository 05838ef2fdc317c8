"""Batches that reveal wrong masks, weights and labels: padding, packed documents, uneven labels.

Every batch consists of equal parts: one for each data rank and micro-batch. One row has no label at
all, and rows have different numbers of labels.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...data.masking import IGNORED_LABEL

KINDS = ("plain", "left", "right", "packed")
"""Padding of the rows: none, on the left, on the right, or several documents in each row."""

FIRST_ID = 10
"""Ids below are special in many models: padding, start, end, mask."""

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Probe:
    """Shape of a probe batch."""

    parts: int
    rows: int
    """Rows of each part."""
    tokens: int

    @classmethod
    def for_degrees(cls, data_ranks: int, microbatches: int, context: int) -> Probe:
        """Return a probe with two micro-batches, whose length no number of chunks divides."""
        return cls(2 * data_ranks, max(2, microbatches), 16 * max(1, context // 2) + 3)


def kinds_of(model: nn.Module) -> tuple[str, ...]:
    """Return the kinds of batches that ``model`` takes."""
    names = _arguments(model)
    if "pixel_values" in names and "input_ids" not in names:
        return ("plain",)
    kinds = ["plain"]
    kinds += ["left", "right"] if "attention_mask" in names else []
    encoder_decoder = getattr(model.config, "is_encoder_decoder", False)
    kinds += ["packed"] if "position_ids" in names and not encoder_decoder else []
    return tuple(kinds)


def probe_batches(model: nn.Module, probe: Probe, kind: str, vocabulary: int) -> list[Batch]:
    """Return the parts of a batch for ``model``, the same on every rank.

    Args:
        model: The twin, whose signature and config determine the arguments.
        probe: Shape of the batch.
        kind: One of `KINDS`.
        vocabulary: Number of ids.
    """
    generator = torch.Generator().manual_seed(1 + KINDS.index(kind))
    rows = probe.parts * probe.rows
    names = _arguments(model)
    if "pixel_values" in names and "input_ids" not in names:
        whole = _images(model, rows, generator)
    elif "input_features" in names and "input_ids" not in names:
        whole = _speech(model, probe, rows, vocabulary, generator)
    else:
        whole = _text(model, probe, rows, kind, vocabulary, generator)
    pieces = {name: value.chunk(probe.parts) for name, value in whole.items()}
    return [{name: value[part] for name, value in pieces.items()} for part in range(probe.parts)]


def _text(
    model: nn.Module, probe: Probe, rows: int, kind: str, vocabulary: int, generator: Any
) -> Batch:
    tokens = probe.tokens
    ids = torch.randint(FIRST_ID, vocabulary - 40, (rows, tokens), generator=generator)
    labels = ids.clone()
    if getattr(model.config, "is_encoder_decoder", False):
        labels = torch.randint(FIRST_ID, vocabulary - 40, (rows, tokens - 4), generator=generator)
    _ignore_unevenly(labels)
    batch = {"input_ids": ids, "labels": labels}
    if kind == "packed":
        positions = torch.stack([_documents(row, tokens) for row in range(rows)])
        batch["position_ids"] = positions
    elif kind in ("left", "right"):
        mask = torch.ones_like(ids)
        for row in range(rows):
            padded = (2 + 3 * row) % (tokens // 2)
            where = slice(0, padded) if kind == "left" else slice(tokens - padded, tokens)
            mask[row, where] = 0
            if labels.shape == ids.shape:
                labels[row, where] = IGNORED_LABEL
        batch["attention_mask"] = mask
    return batch


_IGNORED_AT_FRONT = (0, 0, 3, 7, 0, 1, 9, 2)
"""Labels without a target at the beginning of the rows, in turn. The first label counts in models
that do not shift labels, and in no others."""


def _ignore_unevenly(labels: torch.Tensor) -> None:
    """Ignore a different number of labels in each row, and all labels of one row."""
    for row in range(len(labels)):
        labels[row, : _IGNORED_AT_FRONT[row % len(_IGNORED_AT_FRONT)]] = IGNORED_LABEL
        labels[row, 1 + row % 3 :: 5] = IGNORED_LABEL
    labels[1] = IGNORED_LABEL


def _documents(row: int, tokens: int) -> torch.Tensor:
    """Return positions (tokens,) of three documents of different lengths."""
    first, second = 3 + row % 5, tokens // 2 + row % 3
    ends: Sequence[int] = (first, second - first, tokens - second)
    return torch.cat([torch.arange(length) for length in ends])


def _images(model: nn.Module, rows: int, generator: Any) -> Batch:
    config: Any = model.config
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", 32) or 32
    height, width = size if isinstance(size, list | tuple) else (size, size)
    channels = getattr(vision, "num_channels", 3)
    pixels = torch.randn(rows, channels, height, width, generator=generator)
    labels = torch.randint(0, max(2, config.num_labels), (rows,), generator=generator)
    return {"pixel_values": pixels, "labels": labels}


def _speech(model: nn.Module, probe: Probe, rows: int, vocabulary: int, generator: Any) -> Batch:
    config: Any = model.config
    frames = 2 * getattr(config, "max_source_positions", 64)
    features = torch.randn(rows, config.num_mel_bins, frames, generator=generator)
    labels = torch.randint(FIRST_ID, vocabulary - 40, (rows, probe.tokens), generator=generator)
    _ignore_unevenly(labels)
    return {"input_features": features, "labels": labels}


def _arguments(model: nn.Module) -> set[str]:
    return set(inspect.signature(model.forward).parameters)
