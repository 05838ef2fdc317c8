"""A whole batch cut to one context rank's rows of every sequence, and the logits put together.

Everything that depends on the neighbours of a token is settled here, where the sequences are whole:
positions, which labels are whose targets, which keys padding hides, where packed documents end.
Sequences are padded to what zig-zag chunks divide, by their last token and its position, so that
no table of embeddings is exceeded; nothing is predicted there and no token before sees it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn import functional

from ...c10d_names import all_gather
from ...errors import ConfigError, DataError
from . import zigzag

IGNORED_LABEL = -100
TOKENS = ("input_ids", "inputs_embeds", "token_type_ids")
LABELS = ("labels", "shift_labels")
FLAGS = ("output_attentions", "output_hidden_states", "output_router_logits")
KNOWN = (*TOKENS, *LABELS, "position_ids", "attention_mask", "cache_position", "logits_to_keep")


@dataclass(frozen=True)
class Whole:
    """What is remembered of a batch until the model's output is there."""

    length: int
    labelled: bool
    keep: int | torch.Tensor  # HF's ``logits_to_keep``


def split(given: dict, rank: int, ranks: int, documents: bool) -> tuple[dict, Whole]:
    """A Hugging Face causal model's keyword arguments for ``rank``, from those for the whole batch.

    ``documents``: without a mask, ``position_ids`` that start anew begin another document.
    ``labels`` come out shifted, as ``labels`` and as ``shift_labels``; ``attention_mask`` as what
    `attention` calls segments, (B, 1, 1, S) of the whole sequence (four dims, so that transformers
    hands it on as it is), or None where every token sees all before it. Raises ConfigError for
    what cannot be split, DataError for shapes that do not fit.
    """
    given = {name: value for name, value in given.items() if value is not None}
    _refuse(given)
    tokens = next((given[name] for name in TOKENS if name in given), None)
    if tokens is None:
        raise DataError("context parallelism needs the batch's input_ids or inputs_embeds")
    length = tokens.shape[1]
    for name in (*TOKENS, *LABELS, "attention_mask", "position_ids"):
        value = given.get(name)
        if value is not None and (value.dim() < 2 or value.shape[1] != length):
            raise DataError(
                f"{name} has shape {tuple(value.shape)}, and the batch's sequences have {length} "
                "tokens: give one of each token, (batch, tokens)"
            )

    def mine(whole: torch.Tensor, filling=None) -> torch.Tensor:
        return zigzag.take(_longer(whole, ranks, filling), rank, ranks)

    local = {name: value for name, value in given.items() if name not in KNOWN}
    local |= {name: mine(given[name]) for name in TOKENS if name in given}
    positions = given.get("position_ids")
    segments = _segments(given.get("attention_mask"), positions if documents else None)
    if positions is None:
        positions = torch.arange(length, device=tokens.device).unsqueeze(0)
    local["position_ids"] = mine(positions)
    local["attention_mask"] = None
    if segments is not None:
        local["attention_mask"] = _longer(segments, ranks, 0)[:, None, None]
    if "labels" in given:
        shifted = given.get("shift_labels")
        if shifted is None:
            shifted = functional.pad(given["labels"], (0, 1), value=IGNORED_LABEL)[:, 1:]
        local["labels"] = local["shift_labels"] = mine(shifted, IGNORED_LABEL)
    local["use_cache"] = False
    return local, Whole(length, "labels" in given, given.get("logits_to_keep", 0))


def gather(logits: torch.Tensor, whole: Whole, group: dist.ProcessGroup) -> torch.Tensor:
    """Logits (B, S, V) of the whole sequence, in order, or those that were asked for.

    All ranks do the same with them: what comes back as a gradient needs no communication.
    """
    logits, keep = _AllRows.apply(logits, whole.length, group), whole.keep
    if _all_logits(keep):
        return logits
    return logits[:, -keep:] if isinstance(keep, int) else logits[:, keep]


class _AllRows(torch.autograd.Function):
    """(B, S, V) from every rank's rows of it."""

    @staticmethod
    def forward(ctx, mine, length, group):
        ctx.rank, ctx.ranks = dist.get_rank(group), group.size()
        everyones = mine.new_empty(ctx.ranks, *mine.shape)
        all_gather(everyones.flatten(0, 1), mine.contiguous(), group=group)
        return zigzag.restore(everyones.unbind(0))[:, :length].contiguous()

    @staticmethod
    def backward(ctx, gradient):
        # times the ranks: each has but a part of the way back, and sharding averages over them
        gradient = _longer(gradient, ctx.ranks, 0)
        return zigzag.take(gradient, ctx.rank, ctx.ranks) * ctx.ranks, None, None


def _longer(whole: torch.Tensor, ranks: int, filling=None) -> torch.Tensor:
    """``whole`` (B, S, ...) with ``filling``, or the last of each row, up to what chunks divide."""
    missing = zigzag.padded(whole.shape[1], ranks) - whole.shape[1]
    if missing == 0:
        return whole
    tail = whole[:, -1:].expand(-1, missing, *whole.shape[2:])
    return torch.cat([whole, tail if filling is None else torch.full_like(tail, filling)], 1)


def _segments(mask_BS: torch.Tensor | None, positions_BS: torch.Tensor | None):
    """Segments as in `attention`, or None: from a padding mask, else positions that start anew."""
    if mask_BS is not None:
        seen = mask_BS != 0
        # waits for the device, as transformers does; without a mask the flash kernels can be used
        return None if bool(seen.all()) else seen.int()
    if positions_BS is None:
        return None
    anew = positions_BS.diff(dim=1) != 1
    return functional.pad(anew.int().cumsum(1), (1, 0)) + 1 if bool(anew.any()) else None


def _refuse(given: dict) -> None:
    """ConfigError for arguments whose meaning a rank with a part of the sequence cannot keep."""
    if "past_key_values" in given or given.get("use_cache"):
        raise ConfigError(
            "context parallelism has no cache of keys and values: pass use_cache=False (to "
            "generate too), or evaluate with context_parallel_degree = 1"
        )
    for name in FLAGS:
        if given.get(name):
            raise ConfigError(
                f"{name} = True: with context_parallel_degree > 1 every rank has only its part of "
                "them; leave it out, or evaluate with context_parallel_degree = 1"
            )
    mask = given.get("attention_mask")
    if mask is not None and not (isinstance(mask, torch.Tensor) and mask.dim() == 2):
        shape = f"has shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else "is a dict"
        raise ConfigError(
            f"attention_mask {shape}: context parallelism takes a padding mask (batch, tokens); "
            "for packed documents give position_ids that start anew with each, use_cache=False, "
            "and no mask"
        )
    if given.get("is_causal") is False:
        raise ConfigError(
            "is_causal = False: context parallelism splits causal attention only; leave it out, "
            "or set context_parallel_degree = 1"
        )
    if "labels" in given and not _all_logits(given.get("logits_to_keep", 0)):
        raise ConfigError("logits_to_keep with labels: leave one of them out")
    for name, value in given.items():
        if name not in KNOWN and isinstance(value, torch.Tensor) and value.dim() > 0:
            raise ConfigError(
                f"{name}: context parallelism does not know how to split it among the ranks of a "
                "sequence; leave it out, or set context_parallel_degree = 1"
            )


def _all_logits(keep: int | torch.Tensor) -> bool:
    return isinstance(keep, int) and keep == 0
