"""Attention masks of whole sequences, as functions of positions, from the model's mask functions.

A model builds its masks with the functions of `transformers.masking_utils`, such as
``create_causal_mask``, from its own rows only. `use_whole_sequences` gives these functions the
arguments of the whole batch instead. They call the registered mask interface, `sequence_mask`,
with a function of (batch, head, query, key) indices, which the model passes to its attention as a
`SequenceMask`. Causal, sliding, chunked and document masks, and any later kind, are therefore the
model's own. A model that does anything else with a mask is refused.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError
from . import batch as zigzag
from .batch import OpaqueMask, PaddingMask, ScoreBlock, WholeBatch, changed_mask

ATTENTION_NAME = "nearlinear_context"
"""Name of the context-parallel attention and of its masks in transformers' registries."""
MAX_VISIBLE = 1 << 24
"""Number of mask elements evaluated at once."""
WRAPPED = "nearlinear_whole_sequences"
"""Attribute of the mask functions of `use_whole_sequences`."""
MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Visibility of keys to queries by broadcast indices of batch, head, query and key."""


current_batch: ContextVar[WholeBatch | None] = ContextVar("current_batch", default=None)
"""Batch of the model that this thread runs; `ContextParallel` sets it for every forward pass."""


@dataclass(eq=False)
class SequenceMask(OpaqueMask):
    """Visibility of every key to every query of a batch of whole sequences."""

    function: MaskFunction | None
    """None for a causal mask without padding."""
    batch: int
    length: int
    """Number of keys; later rows are filled up for the ranks, and no query sees them."""
    _blocks: dict[tuple, list[ScoreBlock]] = field(default_factory=dict)

    def visible(self, query_rows: torch.Tensor, key_rows: torch.Tensor) -> torch.Tensor:
        """Return the mask of the queries and keys at these positions, (B or 1, 1, Q, S)."""
        if self.function is None:
            return (query_rows[:, None] >= key_rows)[None, None]
        device, last = query_rows.device, self.length - 1
        seen = self.function(
            torch.arange(self.batch, device=device)[:, None, None, None],
            torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device),
            query_rows.clamp(max=last)[None, None, :, None],
            key_rows.clamp(max=last)[None, None, None, :],
        )
        seen = seen.expand(-1, -1, len(query_rows), len(key_rows))
        return seen & (key_rows < self.length) if bool(key_rows[-1] > last) else seen

    def blocks(self, rank: int, source: int, ranks: int, chunk: int, device) -> list[ScoreBlock]:
        """List the score blocks of the queries of ``rank`` and the keys of ``source``.

        Pairs of chunks without a visible key are left out.
        """
        if self.function is None:
            return zigzag.causal_blocks(rank, source, chunk)
        key = (rank, source, ranks, chunk)
        if key not in self._blocks:
            self._blocks[key] = self._classify(rank, source, ranks, chunk, device)
        return self._blocks[key]

    def _classify(self, rank: int, source: int, ranks: int, chunk: int, device):
        """Evaluate the mask once to find full, causal and empty pairs of chunks."""
        halves = slice(0, chunk), slice(chunk, 2 * chunk)
        rows, columns = (zigzag.positions(r, ranks, chunk, device) for r in (rank, source))
        step = max(1, MAX_VISIBLE // (self.batch * chunk))
        counts = []
        for queries in halves:
            for keys in halves:
                count = torch.zeros(2, dtype=torch.long, device=device)
                for first in range(0, chunk, step):
                    part = rows[queries][first : first + step]
                    seen = self.visible(part, columns[keys]).expand(self.batch, -1, -1, -1)
                    causal = part[:, None] >= columns[keys]
                    count += torch.stack([seen.sum(), (seen == causal).sum()])
                counts.append(count)
        found = iter(torch.stack(counts).tolist())  # waits for the device, once
        size = self.batch * chunk * chunk
        blocks = []
        for queries, query_chunk in zip(halves, zigzag.chunks_of(rank, ranks), strict=True):
            for keys, key_chunk in zip(halves, zigzag.chunks_of(source, ranks), strict=True):
                visible, as_causal = next(found)
                causal = query_chunk == key_chunk and as_causal == size
                if visible:
                    masked = not causal and visible < size
                    blocks.append(ScoreBlock(queries, keys, causal, masked))
        return blocks


CAUSAL = SequenceMask(None, 1, 0)
"""Every query sees all earlier keys and its own."""


def sequence_mask(
    batch_size: int,
    mask_function: MaskFunction,
    kv_length: int,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    **others: Any,
) -> SequenceMask:
    """Mask interface for transformers: keep the mask as a function. Raises ConfigError.

    ``mask_function`` is without the padding mask, ``attention_mask`` (B, S).
    """
    from transformers.masking_utils import causal_mask_function

    if use_vmap:
        raise ConfigError(
            "context_parallel_degree > 1: the model adds a mask of its own to those of "
            "transformers. Set context_parallel_degree = 1."
        )
    if attention_mask is not None and not bool(attention_mask.all()):
        padding = attention_mask.bool()

        def padded(batch_at, head_at, query_at, key_at):
            return mask_function(batch_at, head_at, query_at, key_at) & padding[batch_at, key_at]

        return SequenceMask(padded, batch_size, kv_length)
    if mask_function is causal_mask_function:
        return CAUSAL
    return SequenceMask(mask_function, batch_size, kv_length)


def use_whole_sequences(model: nn.Module) -> None:
    """Give the mask functions that ``model`` calls the arguments of whole sequences.

    Models import these functions by name, so that there is no other place to change their
    arguments. The functions of other models in the same source file are not affected: the
    replacement looks at the config that they pass.
    """
    from transformers import AttentionMaskInterface

    AttentionMaskInterface.register(ATTENTION_NAME, sequence_mask)
    kinds = {kind for part in model.modules() for kind in type(part).__mro__}
    for source in {kind.__module__ for kind in kinds}:
        for name, function in list(vars(sys.modules.get(source)).items()):
            if _is_mask_function(function):
                setattr(sys.modules[source], name, _on_whole_sequence(function))


def _is_mask_function(function: Any) -> bool:
    return (
        inspect.isfunction(function)
        and function.__module__ == "transformers.masking_utils"
        and not hasattr(function, WRAPPED)
        and {"config", "attention_mask"} <= set(inspect.signature(function).parameters)
        and "recurrent" not in function.__name__
    )


def _on_whole_sequence(function: Callable) -> Callable:
    """Wrap a function such as ``create_causal_mask``."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def create(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        batch = current_batch.get()
        implementation = getattr(bound.arguments["config"], "_attn_implementation", None)
        if implementation != ATTENTION_NAME or batch is None:
            return function(*args, **kwargs)
        return function(**_whole_arguments(bound.arguments, batch))

    setattr(create, WRAPPED, True)
    return create


def _whole_arguments(given: dict[str, Any], batch: WholeBatch) -> dict[str, Any]:
    """Return the arguments of a mask function for the whole batch. Raises ConfigError."""
    extra = given.pop("kwargs", {})
    for name in ("or_mask_function", "and_mask_function", "block_sequence_ids",
                 "encoder_hidden_states"):  # fmt: skip
        if given.get(name) is not None:
            raise ConfigError(
                f"context_parallel_degree > 1: the model builds its attention mask with {name}, "
                "which cannot be divided. Set context_parallel_degree = 1."
            )
    whole = {**given, **extra}
    for name in ("inputs_embeds", "input_embeds"):
        if isinstance(given.get(name), torch.Tensor):
            whole[name] = given[name].new_empty(()).expand(*batch.shape, 1)
    mask = given.get("attention_mask")
    if isinstance(mask, PaddingMask):
        whole["attention_mask"] = batch.padding_BS
    elif mask is not None:  # made by the model itself
        if mask.shape != (batch.shape[0], batch.local_length) or not bool(mask.all()):
            raise changed_mask("a mask of its own")
        whole["attention_mask"] = mask.new_ones(batch.shape)
    if given.get("position_ids") is not None:
        whole["position_ids"] = batch.positions_BS
    if isinstance(given.get("cache_position"), torch.Tensor):
        whole["cache_position"] = torch.arange(
            batch.shape[1], device=given["cache_position"].device
        )
    if "past_key_values" in given:
        whole["past_key_values"] = None
    return whole
