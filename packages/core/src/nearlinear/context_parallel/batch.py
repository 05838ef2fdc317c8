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
from ..distributed.consensus import all_gather_ints
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
    masked: bool = False
    """True if the mask hides a part of the block that is not the causal triangle."""


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


SEQUENCE_ARGUMENTS = (
    *("input_ids", "inputs_embeds", "token_type_ids", "labels", "shift_labels"),
    *("attention_mask", "position_ids"),
)
"""Arguments of a model with one value per token, (B, S, ...)."""


def join_split_batch(given: dict, group: dist.ProcessGroup) -> dict:
    """Return the arguments for the whole batch from those of this rank, which are split already.

    The split is that of `take`, and no row is padding. Positions, shifted labels and masks depend
    on neighboring tokens, so that the whole sequence is needed for them. A collective call of the
    context ranks. Raises DataError on all of them if their parts have different shapes.
    """
    device = next((v.device for v in given.values() if isinstance(v, torch.Tensor)), "cpu")
    parts = {
        name: given[name]
        for name in SEQUENCE_ARGUMENTS
        if isinstance(given.get(name), torch.Tensor) and given[name].dim() > 1
    }
    described = [size for name in SEQUENCE_ARGUMENTS for size in _rows_of(parts.get(name))]
    shapes = all_gather_ints(described, torch.device(device), group)
    if any(shape != described for shape in shapes) or any(v.shape[1] % 2 for v in parts.values()):
        raise DataError(
            "batch_is_split = True, but the context ranks were given parts of different shapes or "
            f"of an odd length ({ {name: tuple(v.shape) for name, v in parts.items()} } here): "
            "pad sequences to a multiple of 2 x context_parallel_degree, divide them into that "
            "many chunks on dim 1, and give rank r the chunks r and 2 x degree - 1 - r"
        )
    whole = {}
    for name, part in parts.items():
        gathered = part.new_empty(group.size(), *part.shape)
        all_gather(gathered.flatten(0, 1), part.detach().contiguous(), group=group)
        whole[name] = restore(list(gathered.unbind(0)))
    return given | whole


def _rows_of(part: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if part is None else (part.shape[0], part.shape[1])


def positions(rank: int, ranks: int, chunk: int, device) -> torch.Tensor:
    """Return the positions of the rows of ``rank`` in the sequence: LongTensor (2 * chunk,)."""
    inside = torch.arange(chunk, device=device)
    return torch.cat([inside + each * chunk for each in chunks_of(rank, ranks)])


def causal_blocks(rank: int, source: int, chunk: int) -> list[ScoreBlock]:
    """List the score blocks of the queries of ``rank`` and the keys of ``source``, of 2 chunks."""
    if source == rank:
        return [ScoreBlock(ALL, ALL, causal=True)]
    if source < rank:
        return [ScoreBlock(ALL, slice(0, chunk))]
    return [ScoreBlock(slice(chunk, 2 * chunk), ALL)]


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


class MissingAttribute(ConfigError, AttributeError):
    """An attribute that a mask has not: an error of the user's config, and False to `hasattr`."""


class OpaqueMask:
    """Base of masks that a model may only pass on: every operation on them raises ConfigError."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise changed_mask(getattr(function, "__name__", str(function)))

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        raise MissingAttribute(str(changed_mask(name)))


def _refuse(name: str):
    def operation(self, *args):
        raise changed_mask(name)

    return operation


for _name in ("getitem", "add", "radd", "sub", "rsub", "mul", "rmul", "and", "or", "invert",
              "neg", "len", "bool", "iter", "eq", "ne", "lt", "le", "gt", "ge"):  # fmt: skip
    setattr(OpaqueMask, f"__{_name}__", _refuse(_name))


def changed_mask(operation: str) -> ConfigError:
    """Return the error for a model that computes with its mask."""
    return ConfigError(
        f"context_parallel_degree > 1: the model computes with its attention mask ({operation}), "
        "of which every rank has a part only. Set context_parallel_degree = 1."
    )


class PaddingMask(OpaqueMask):
    """Stands for the padding mask of the whole batch among the arguments of a rank.

    A model may ask for its rank and change its dtype, or view it as the (B, S) that it is.
    """

    ndim = 2

    def dim(self) -> int:
        return 2

    def to(self, *args, **kwargs) -> PaddingMask:
        return self

    def view(self, *shape: int) -> PaddingMask:
        if len(shape) != 2 or shape[1] != -1:
            raise changed_mask("view")
        return self


@dataclass(frozen=True, eq=False)
class WholeBatch:
    """Arguments of the model's mask functions for the whole batch."""

    shape: tuple[int, int]
    """(B, S)."""
    local_length: int
    """Number of rows of every rank."""
    padding_BS: torch.Tensor | None
    """The padding mask; None if the model was given none."""
    positions_BS: torch.Tensor | None
    """Positions that may begin documents; None if the model was given none."""


@dataclass(frozen=True)
class FullBatch:
    """Properties of the whole batch that are needed for the model's output."""

    length: int
    has_labels: bool
    logits_to_keep: int | torch.Tensor
    masks: WholeBatch


def split_arguments(given: dict, rank: int, ranks: int, documents: bool) -> tuple[dict, FullBatch]:
    """Take the part of ``rank`` of a Hugging Face causal model's keyword arguments.

    ``labels`` are returned shifted, as ``labels`` and as ``shift_labels``. A `PaddingMask` stands
    for ``attention_mask``, since masks are built from the whole batch (`masks`).

    Args:
        given: Keyword arguments for the whole batch.
        rank: Context rank.
        ranks: Number of context ranks.
        documents: Whether ``position_ids`` that restart may begin a new document.

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
    positions, mask = given.get("position_ids"), given.get("attention_mask")
    whole = WholeBatch(
        (tokens.shape[0], length),
        padded_length(length, ranks) // ranks,
        None if mask is None else mask != 0,
        positions if documents else None,
    )
    if positions is None:
        positions = torch.arange(length, device=tokens.device).unsqueeze(0)
    local["position_ids"] = local_part(positions)
    local["attention_mask"] = None if mask is None else PaddingMask()
    shifted = _shifted_labels(given)
    if shifted is not None:
        local["labels"] = local["shift_labels"] = local_part(shifted, IGNORED_LABEL)
    local["use_cache"] = False
    keep = given.get("logits_to_keep", 0)
    return local, FullBatch(length, "labels" in given, keep, whole)


def _shifted_labels(given: dict) -> torch.Tensor | None:
    """Return the label that each token predicts (B, S), or None without labels."""
    if "labels" not in given:
        return None
    shifted = given.get("shift_labels")
    if shifted is None:
        shifted = functional.pad(given["labels"], (0, 1), value=IGNORED_LABEL)[:, 1:]
    return shifted


def predicts_from_padding(given: dict) -> bool:
    """Return whether a token that ``attention_mask`` hides predicts a label."""
    mask, shifted = given.get("attention_mask"), _shifted_labels(given)
    if mask is None or shifted is None or mask.shape != shifted.shape:
        return False
    return bool(((mask == 0) & (shifted != IGNORED_LABEL)).any())


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
