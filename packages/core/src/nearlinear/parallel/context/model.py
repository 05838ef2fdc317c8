"""Make an untouched Hugging Face causal language model context parallel, in place.

A hook before the model cuts the batch to this rank's rows (`batch`); in between every token is
computed by itself but for attention, which transformers looks up by a name in the model's config:
there stands ours. A hook after the model puts logits together where there are no labels. All that
a call of attention needs comes with its arguments, so that several models, several batches under
way and recomputation in backward do not disturb each other.
"""

from __future__ import annotations

import copy
import inspect

import torch
import torch.distributed as dist
from torch import nn

from ...errors import ConfigError, NearlinearError
from ...runtime import Runtime
from .. import layout, loss
from ..around import around
from ..exchange import summed_back
from .attention import TRAVELS, attention
from .batch import FLAGS, Whole, gather, split
from .check import check

NAME = "nearlinear_context"
"""of our attention, in transformers' registry"""


class Context:
    """The context ranks of one model, and the batch it is computing."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, comm_type: str):
        self.model, self.travel = model, TRAVELS[comm_type](group)
        self.counts_by_mask = _counts_by_mask(model)
        self.batch: Whole | None = None
        self.attended = False

    def split(self, arguments: dict) -> dict:
        """This rank's part of the model's arguments, see `batch.split`."""
        given = {flag: getattr(self.model.config, flag, None) for flag in FLAGS} | arguments
        if self.counts_by_mask and given.get("position_ids") is None:
            if given.get("attention_mask") is not None:
                raise ConfigError(
                    "this model counts positions by its attention_mask: give position_ids too, "
                    "as context_parallel_degree > 1 splits them"
                )
        if isinstance(given.get("inputs_embeds"), torch.Tensor):
            group, ranks = self.travel.group, self.travel.ranks
            given["inputs_embeds"] = summed_back(given["inputs_embeds"], group, times=ranks)
        documents = not self._would_cache(given.get("use_cache"))
        local, self.batch = split(given, self.travel.rank, self.travel.ranks, documents)
        self.attended = False
        return local

    def _would_cache(self, use_cache: bool | None) -> bool:
        """Whether the untouched model would keep keys and values.

        Where it does, transformers does not look for packed documents.
        """
        base = self.model.base_model
        recomputes = base.training and getattr(base, "gradient_checkpointing", False)
        asked = getattr(self.model.config, "use_cache", False) if use_cache is None else use_cache
        return bool(asked) and not recomputes

    def gather(self, output):
        """The model's output, with the logits of all tokens where there were no labels."""
        if not self.attended:
            raise NearlinearError(
                "context parallelism: the model ran without calling the attention that splits "
                "sequences, so that its tokens did not see each other; was its attn_implementation "
                "set after nl.transform? Set it before"
            )
        if self.batch.labelled:
            return output
        if isinstance(output, tuple):
            return (gather(output[0], self.batch, self.travel.group), *output[1:])
        output.logits = gather(output.logits, self.batch, self.travel.group)
        return output


def apply(model: nn.Module, now: Runtime, comm_type: str) -> None:
    """Have ``model`` split sequences over the context ranks. Raises ConfigError.

    ``comm_type``: how keys and values travel, ``"p2p"`` or ``"all_gather"``. Every context rank
    gets the same batch, and the same loss back; with labels, logits are those of its own tokens.
    """
    if comm_type not in TRAVELS:
        raise ConfigError(f"cp_comm_type = {comm_type!r}: allowed are 'p2p' and 'all_gather'")
    check(model)
    context = Context(model, now.group("context"), comm_type)
    _use_our_attention(model, context)
    around(model).before.append(context.split)
    around(model).after.append(context.gather)
    if now.mesh.tensor == 1:  # else `tensor` has, which knows the rank's part of the vocabulary
        loss.install(model, now)
    layout.of(model).axes.add("context")


def _use_our_attention(model: nn.Module, context: Context) -> None:
    """The model gets a config of its own: others made from the same one keep their attention."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention)
    config = copy.deepcopy(model.config)
    config._attn_implementation = NAME
    for module in model.modules():
        if hasattr(module, "config"):
            module.config = config
            module._nearlinear_context = context


def _counts_by_mask(model: nn.Module) -> bool:
    """Whether a model's positions, where none are given, skip what its padding mask hides."""
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding))
    return any("attention_mask" in inspect.signature(table.forward).parameters for table in tables)


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **others,
) -> tuple[torch.Tensor, None]:
    """What transformers calls, (B, H, S, D) each; ``attention_mask`` is what `batch.split` made."""
    context = module._nearlinear_context
    for name in ("softcap", "s_aux", "position_bias", "head_mask"):
        if others.get(name) is not None:
            raise ConfigError(
                f"context_parallel_degree > 1: {type(module).__name__} uses {name}, which the "
                "attention that splits sequences lacks; set context_parallel_degree = 1"
            )
    segments = None if attention_mask is None else attention_mask[:, 0, 0]
    context.attended = True
    out = attention(
        query,
        key,
        value,
        context.travel,
        segments_BS=segments,
        scale=scaling,
        window=sliding_window,
        dropout=dropout,
    )
    return out.transpose(1, 2).contiguous(), None
