"""Split a batch into the tokens of one context rank, and gather logits to whole sequences.

A sequence is divided into 2C chunks for C ranks; rank r has chunks r and 2C-1-r. Causal attention
of an early chunk is cheap and that of a late one expensive, and every such pair costs the same.
Source: the zig-zag variant of Ring Attention (Liu et al. 2023), known from its public
implementations. The rows of a rank are its early chunk followed by its late one.

Everything that depends on neighboring tokens is computed here from whole sequences: positions,
shifted labels, padding, the ends of packed documents. Sequences are padded to a multiple of 2C with
their last token and its position, so that embedding tables are not exceeded; padding has no labels,
and no earlier token attends to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn import functional

from .._torch import all_gather
from ..errors import ConfigError, DataError
from ..fsdp.targets import IGNORED_LABEL

ALL = slice(None)


@dataclass(frozen=True)
class ScoreBlock:
    """A rectangle of attention scores to compute."""

    queries: slice
    keys: slice
    causal: bool = False
    """True on the diagonal, where queries and keys are the same rows."""
    windowed: bool = False
    """True if the sliding window hides a part of the block."""


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """Return the indices of the two chunks of ``rank``."""
    return rank, 2 * ranks - 1 - rank


def padded_length(length: int, ranks: int) -> int:
    """Round ``length`` up to a multiple of ``2 * ranks``."""
    return -(-length // (2 * ranks)) * 2 * ranks


def take(whole: torch.Tensor, rank: int, ranks: int, dim: int = 1) -> torch.Tensor:
    """Take the rows of ``rank`` from ``whole``, whose ``dim`` is a multiple of ``2 * ranks``."""
    chunks = whole.chunk(2 * ranks, dim)
    return torch.cat([chunks[chunk] for chunk in chunks_of(rank, ranks)], dim)


def restore(parts: list[torch.Tensor], dim: int = 1) -> torch.Tensor:
    """Join the rows of all ranks to the whole sequence; the inverse of `take`."""
    early, late = zip(*(part.chunk(2, dim) for part in parts), strict=True)
    return torch.cat([*early, *reversed(late)], dim)


def positions(rank: int, ranks: int, chunk: int, device) -> torch.Tensor:
    """Return the positions of the rows of ``rank`` in the sequence: LongTensor (2 * chunk,)."""
    inside = torch.arange(chunk, device=device)
    return torch.cat([inside + each * chunk for each in chunks_of(rank, ranks)])


def score_blocks(
    rank: int, source: int, ranks: int, chunk: int, window: int | None = None
) -> list[ScoreBlock]:
    """List the score blocks of the queries of ``rank`` and the keys of ``source``.

    Args:
        rank: Rank of the queries.
        source: Rank of the keys.
        ranks: Number of context ranks.
        chunk: Rows per chunk.
        window: Number of keys that a query sees, itself the last; None for all.
    """
    early, late = slice(0, chunk), slice(chunk, 2 * chunk)
    if window is None or window >= 2 * ranks * chunk:
        if source == rank:
            return [ScoreBlock(ALL, ALL, causal=True)]
        return [ScoreBlock(ALL, early)] if source < rank else [ScoreBlock(late, ALL)]
    seen = []
    for queries, query_chunk in zip((early, late), chunks_of(rank, ranks), strict=True):
        for keys, key_chunk in zip((early, late), chunks_of(source, ranks), strict=True):
            apart = (query_chunk - key_chunk) * chunk
            if apart >= 0 and apart - chunk + 1 < window:
                seen.append(
                    ScoreBlock(queries, keys, apart == 0, windowed=apart + chunk - 1 >= window)
                )
    return seen


TOKEN_ARGUMENTS = ("input_ids", "inputs_embeds", "token_type_ids")
LABEL_ARGUMENTS = ("labels", "shift_labels")
FLAGS = ("output_attentions", "output_hidden_states", "output_router_logits")
SUPPORTED_ARGUMENTS = (
    *TOKEN_ARGUMENTS,
    *LABEL_ARGUMENTS,
    "position_ids",
    "attention_mask",
    "cache_position",
    "logits_to_keep",
)


@dataclass(frozen=True)
class FullBatch:
    """Properties of the whole batch that are needed for the model's output."""

    length: int
    has_labels: bool
    logits_to_keep: int | torch.Tensor


def split_arguments(given: dict, rank: int, ranks: int, documents: bool) -> tuple[dict, FullBatch]:
    """Take the part of ``rank`` of a Hugging Face causal model's keyword arguments.

    ``labels`` are returned shifted, as ``labels`` and as ``shift_labels``. ``attention_mask``
    becomes the segments of `attention`, (B, 1, 1, S) of the whole sequence (four dimensions, so
    that transformers passes it on unchanged), or None if every token sees all earlier ones.

    Args:
        given: Keyword arguments for the whole batch.
        rank: Context rank.
        ranks: Number of context ranks.
        documents: Whether ``position_ids`` that restart begin a new document, without a mask.

    Raises:
        ConfigError: An argument cannot be split.
        DataError: Shapes do not match.
    """
    given = {name: value for name, value in given.items() if value is not None}
    _check_arguments(given)
    tokens = next((given[name] for name in TOKEN_ARGUMENTS if name in given), None)
    if tokens is None:
        raise DataError("context parallelism needs the batch's input_ids or inputs_embeds")
    length = tokens.shape[1]
    for name in (*TOKEN_ARGUMENTS, *LABEL_ARGUMENTS, "attention_mask", "position_ids"):
        value = given.get(name)
        if value is not None and (value.dim() < 2 or value.shape[1] != length):
            raise DataError(
                f"{name} has shape {tuple(value.shape)}, but the sequences of the batch have "
                f"{length} tokens. Pass one value per token, (batch, tokens)."
            )

    def local_part(whole: torch.Tensor, fill=None) -> torch.Tensor:
        return take(_pad(whole, ranks, fill), rank, ranks)

    local = {name: value for name, value in given.items() if name not in SUPPORTED_ARGUMENTS}
    local |= {name: local_part(given[name]) for name in TOKEN_ARGUMENTS if name in given}
    positions = given.get("position_ids")
    segments = _segments(given.get("attention_mask"), positions if documents else None)
    if positions is None:
        positions = torch.arange(length, device=tokens.device).unsqueeze(0)
    local["position_ids"] = local_part(positions)
    local["attention_mask"] = None
    if segments is not None:
        local["attention_mask"] = _pad(segments, ranks, 0)[:, None, None]
    if "labels" in given:
        shifted = given.get("shift_labels")
        if shifted is None:
            shifted = functional.pad(given["labels"], (0, 1), value=IGNORED_LABEL)[:, 1:]
        local["labels"] = local["shift_labels"] = local_part(shifted, IGNORED_LABEL)
    local["use_cache"] = False
    return local, FullBatch(length, "labels" in given, given.get("logits_to_keep", 0))


def gather_logits(logits: torch.Tensor, batch: FullBatch, group: dist.ProcessGroup) -> torch.Tensor:
    """All-gather logits (B, S, V) of the whole sequence in order, reduced to ``logits_to_keep``.

    All ranks use them identically, so the backward pass needs no communication.
    """
    logits, keep = _AllRows.apply(logits, batch.length, group), batch.logits_to_keep
    if _all_logits(keep):
        return logits
    return logits[:, -keep:] if isinstance(keep, int) else logits[:, keep]


class _AllRows(torch.autograd.Function):
    """All-gather rows to (B, S, V)."""

    @staticmethod
    def forward(ctx, mine, length, group):
        ctx.rank, ctx.ranks = dist.get_rank(group), group.size()
        everyones = mine.new_empty(ctx.ranks, *mine.shape)
        all_gather(everyones.flatten(0, 1), mine.contiguous(), group=group)
        return restore(everyones.unbind(0))[:, :length].contiguous()

    @staticmethod
    def backward(ctx, gradient):
        # times the ranks: sharding averages gradients over the context ranks
        gradient = _pad(gradient, ctx.ranks, 0)
        return take(gradient, ctx.rank, ctx.ranks) * ctx.ranks, None, None


def _pad(whole: torch.Tensor, ranks: int, fill=None) -> torch.Tensor:
    """Pad ``whole`` (B, S, ...) to `padded_length` with ``fill``, or with its last element."""
    missing = padded_length(whole.shape[1], ranks) - whole.shape[1]
    if missing == 0:
        return whole
    tail = whole[:, -1:].expand(-1, missing, *whole.shape[2:])
    return torch.cat([whole, tail if fill is None else torch.full_like(tail, fill)], 1)


def _segments(mask_BS: torch.Tensor | None, positions_BS: torch.Tensor | None):
    """Derive the segments of `attention` from a padding mask or from restarting positions."""
    if mask_BS is not None:
        seen = mask_BS != 0
        # waits for the device, as transformers does; flash kernels need the absence of a mask
        return None if bool(seen.all()) else seen.int()
    if positions_BS is None:
        return None
    restarts = positions_BS.diff(dim=1) != 1
    if not bool(restarts.any()):
        return None
    return functional.pad(restarts.int().cumsum(1), (1, 0)) + 1


def _check_arguments(given: dict) -> None:
    """Raise ConfigError for arguments that cannot be split over the ranks of a sequence."""
    if "past_key_values" in given or given.get("use_cache"):
        raise ConfigError(
            "context parallelism has no cache of keys and values. Pass use_cache=False (also to "
            "generate), or evaluate with context_parallel_degree = 1."
        )
    for name in FLAGS:
        if given.get(name):
            raise ConfigError(
                f"{name} = True: with context_parallel_degree > 1 every rank has only its part of "
                "them. Leave it out, or evaluate with context_parallel_degree = 1."
            )
    mask = given.get("attention_mask")
    if mask is not None and not (isinstance(mask, torch.Tensor) and mask.dim() == 2):
        shape = f"has shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else "is a dict"
        raise ConfigError(
            f"attention_mask {shape}: context parallelism needs a padding mask (batch, tokens). "
            "For packed documents pass position_ids that restart with each document, "
            "use_cache=False, and no mask."
        )
    if given.get("is_causal") is False:
        raise ConfigError(
            "is_causal = False: context parallelism supports causal attention only. Leave it "
            "out, or set context_parallel_degree = 1."
        )
    if "labels" in given and not _all_logits(given.get("logits_to_keep", 0)):
        raise ConfigError("logits_to_keep cannot be combined with labels. Leave one of them out.")
    for name, value in given.items():
        if name not in SUPPORTED_ARGUMENTS and isinstance(value, torch.Tensor) and value.dim() > 0:
            raise ConfigError(
                f"{name}: context parallelism does not support this argument. Leave it out, or "
                "set context_parallel_degree = 1."
            )


def _all_logits(keep: int | torch.Tensor) -> bool:
    return isinstance(keep, int) and keep == 0
