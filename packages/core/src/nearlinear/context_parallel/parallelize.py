"""Apply context parallelism to an untouched Hugging Face causal language model, in place.

A hook before the model takes this rank's part of the batch (`batch.split_arguments`). All
operations but attention work token by token. Attention and masks are looked up in transformers'
registries by a name in the model's config, which is set to ours. A hook after the model gathers the
logits if there are no labels. Attention receives its whole context through its arguments, so
several models, batches in flight and recomputation in backward do not interfere.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..distributed.collectives import all_reduce_grad
from ..distributed.runtime import Runtime
from ..errors import ConfigError, NearlinearError
from ..fsdp.forward_transforms import forward_transforms
from ..fsdp.model_state import HuggingFaceModel, ShardingExtension, model_state, set_model_state
from ..fsdp.targets import IGNORED_LABEL, TargetRule
from ..tensor_parallel.loss import install_loss
from .batch import (
    FLAGS,
    FullBatch,
    gather_logits,
    join_split_batch,
    predicts_from_padding,
    split_arguments,
)
from .masks import ATTENTION_NAME, SequenceMask, current_batch, use_whole_sequences
from .ring_attention import EXCHANGES, attention

KEY = "context_parallel_degree"
SUPPORTED_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def check_model(model: HuggingFaceModel) -> None:
    """Raise ConfigError for a model whose sequences cannot be split.

    Supported are models in which tokens interact only in causal attention through transformers'
    attention interface.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "_attn_implementation"):
        raise _unsupported(model, "is not a Hugging Face transformer")
    if getattr(config, "is_encoder_decoder", False) or getattr(
        config, "add_cross_attention", False
    ):
        raise _unsupported(model, "has cross attention")
    if model.get_output_embeddings() is None:
        raise _unsupported(model, "has no language model head")
    causal = [getattr(part, "is_causal", True) for part in (config, *_with_config(model))]
    if not all(causal):
        raise _unsupported(model, "attends to later tokens (is_causal = False)")
    if any(type(part.config) is not type(config) for part in _with_config(model)):
        raise _unsupported(model, "consists of several models")
    if not any(_attends_by_interface(part) for part in _with_config(model)):
        raise _unsupported(model, "does not use transformers' attention interface")
    others = set(getattr(config, "layer_types", None) or ()) - set(SUPPORTED_LAYER_TYPES)
    if others or getattr(model, "_is_stateful", False):
        channels = ", ".join(sorted(others)) or "a state"
        raise _unsupported(model, f"passes {channels} from token to token besides attention")
    if any(isinstance(part, nn.Conv1d) for part in model.modules()):
        raise _unsupported(model, "has convolutions over tokens")
    if not any(_takes_positions(part) for part in (model, *_with_config(model))):
        raise _unsupported(model, "takes no position_ids")
    for name in LENGTH_DEPENDENT_ROPE:
        if name in _rope_types(config):
            raise _unsupported(model, f"has rotary frequencies that depend on length ({name!r})")
    if config._attn_implementation == "eager" and getattr(config, "reorder_and_upcast_attn", False):
        raise ConfigError(
            f"{KEY} > 1 with reorder_and_upcast_attn = True: context-parallel attention always "
            "computes its softmax in float32. Set reorder_and_upcast_attn = False."
        )
    if config._attn_implementation == "sdpa" and getattr(config, "attn_logit_softcapping", None):
        raise ConfigError(
            f"{KEY} > 1 with attn_logit_softcapping: context-parallel attention applies it, and "
            'the attention "sdpa" of this model does not. Build the model with '
            'attn_implementation="eager".'
        )
    if getattr(config, "output_router_logits", False):
        raise ConfigError(
            f"{KEY} > 1 with output_router_logits = True: the load-balancing loss of "
            f"{type(model).__name__} would cover a part of the sequence only. Set it to False."
        )


def _unsupported(model: HuggingFaceModel, why: str) -> ConfigError:
    name = type(model).__name__.removeprefix("FSDP")
    return ConfigError(
        f"{KEY} > 1: {name} {why}, so its sequences cannot be split. Set {KEY} = 1, or use a model "
        "such as GPT-2, GPT-NeoX, Llama, Mistral or Mixtral."
    )


def _with_config(model: HuggingFaceModel) -> list[nn.Module]:
    return [part for part in model.modules() if hasattr(part, "config")]


def _takes_positions(module: nn.Module) -> bool:
    from transformers import PreTrainedModel

    parameters = inspect.signature(type(module).forward).parameters
    return isinstance(module, PreTrainedModel) and "position_ids" in parameters


def _attends_by_interface(module: nn.Module) -> bool:
    """Return whether the module's source file uses transformers' attention registry."""
    from transformers import PreTrainedModel

    sources = (sys.modules.get(kind.__module__) for kind in type(module).__mro__)
    return not isinstance(module, PreTrainedModel) and any(
        hasattr(source, "ALL_ATTENTION_FUNCTIONS") for source in sources
    )


def _rope_types(config) -> set[str]:
    """Collect the values of ``rope_type`` and ``type`` of the model and of its layer types."""
    found, todo = set(), []
    for name in ("rope_parameters", "rope_scaling"):
        todo.append(getattr(config, name, None))
    while todo:
        item = todo.pop()
        if isinstance(item, dict):
            found |= {item[key] for key in ("rope_type", "type") if isinstance(item.get(key), str)}
            todo += item.values()
    return found


UNSUPPORTED_ATTENTION_ARGUMENTS = ("position_bias", "head_mask", "indices", "cache")


class ContextParallel(ShardingExtension):
    """Context ranks of one model and its current batch."""

    def __init__(
        self,
        model: HuggingFaceModel,
        group: dist.ProcessGroup,
        comm_type: str,
        batch_is_split: bool = False,
    ):
        self.model, self.exchange = model, EXCHANGES[comm_type](group)
        self.batch_is_split = batch_is_split
        self.counts_by_mask = _counts_by_mask(model)
        self.eager = model.config._attn_implementation == "eager"
        self.batch: FullBatch | None = None
        self.attended = False

    def split(self, arguments: dict) -> dict:
        """Take this rank's part of the model's arguments, see `batch.split_arguments`."""
        own_embeddings = arguments.get("inputs_embeds")
        if self.batch_is_split:
            arguments = join_split_batch(arguments, self.exchange.group)
        given = {flag: getattr(self.model.config, flag, None) for flag in FLAGS} | arguments
        if self.counts_by_mask and given.get("position_ids") is None:
            if given.get("attention_mask") is not None:
                raise ConfigError(
                    "this model derives positions from attention_mask, which "
                    "context_parallel_degree > 1 splits. Pass position_ids too."
                )
        if self.eager and predicts_from_padding(given):
            raise ConfigError(
                "a label is predicted from a padded token. Its eager attention averages all "
                "tokens, later ones included, which context_parallel_degree > 1 does not "
                "reproduce. Pad on the right, or set the label of the first token after padding "
                "to -100."
            )
        embeddings = given.get("inputs_embeds")
        if isinstance(embeddings, torch.Tensor) and not self.batch_is_split:
            group, ranks = self.exchange.group, self.exchange.ranks
            given["inputs_embeds"] = all_reduce_grad(embeddings, group, times=ranks)
        documents = not self._would_cache(given.get("use_cache"))
        local, self.batch = split_arguments(
            given, self.exchange.rank, self.exchange.ranks, documents
        )
        if self.batch_is_split and own_embeddings is not None:
            local["inputs_embeds"] = own_embeddings  # with their graph
        current_batch.set(self.batch.masks)
        self.attended = False
        return local

    def _would_cache(self, use_cache: bool | None) -> bool:
        """Return whether the original model would cache keys and values.

        transformers does not detect packed documents if it does.
        """
        base = self.model.base_model
        recomputes = base.training and getattr(base, "gradient_checkpointing", False)
        if use_cache is None:
            use_cache = getattr(self.model.config, "use_cache", False)
        return bool(use_cache) and not recomputes

    def gather(self, output):
        """Return the model's output, with the logits of all tokens if there were no labels.

        Whoever splits batches gets the logits of his own part.
        """
        current_batch.set(None)
        if not self.attended:
            raise NearlinearError(
                "context parallelism: the model did not call the context-parallel attention, so "
                "its tokens did not attend to each other. Set attn_implementation before "
                "nl.transform, not after it."
            )
        assert self.batch is not None
        if self.batch.has_labels or self.batch_is_split:
            return output
        if isinstance(output, tuple):
            return (gather_logits(output[0], self.batch, self.exchange.group), *output[1:])
        output.logits = gather_logits(output.logits, self.batch, self.exchange.group)
        return output


@dataclass(frozen=True)
class SplitTargets(TargetRule):
    """Counts the targets of a whole batch from the parts of the context ranks."""

    runtime: Runtime | None = None

    def count(self, batch: Mapping[str, Any]) -> float:
        """Return the number of targets of the whole batch. A collective call."""
        assert self.runtime is not None
        group = self.runtime.group("context")
        targets = batch["labels"] if batch.get("shift_labels") is None else batch["shift_labels"]
        if batch.get("shift_labels") is None and dist.get_rank(group) == 0:
            targets = targets[..., 1:]  # the first token of a sequence is no target
        count = (targets != IGNORED_LABEL).sum().double().to(self.runtime.device)
        dist.all_reduce(count, group=group)
        return count.item()


def apply_context_parallel(
    model: HuggingFaceModel, now: Runtime, comm_type: str, batch_is_split: bool = False
) -> None:
    """Split the sequences of ``model`` over the context ranks. Raises ConfigError.

    Every context rank passes the same batch and gets the same loss. With labels, the logits are
    those of the rank's own tokens.

    Args:
        model: The model.
        now: This rank's runtime.
        comm_type: Exchange of keys and values, ``"p2p"`` or ``"all_gather"``.
        batch_is_split: Every context rank passes its own part of the batch, see
            `batch.join_split_batch`, and gets the logits of that part.
    """
    if comm_type not in EXCHANGES:
        raise ConfigError(f"cp_comm_type = {comm_type!r}: allowed are 'p2p' and 'all_gather'")
    check_model(model)
    context = ContextParallel(model, now.group("context"), comm_type, batch_is_split)
    _install_attention(model, context)
    forward_transforms(model).before.append(context.split)
    forward_transforms(model).after.append(context.gather)
    if now.mesh.tensor == 1:  # tensor parallelism has installed it, with its vocabulary offset
        install_loss(model, now)
    if batch_is_split:
        model_state(model).target_rule = SplitTargets(shifted=True, runtime=now)
    model_state(model).layout.axes.add("context")


def _install_attention(model: HuggingFaceModel, context: ContextParallel) -> None:
    """Set the attention in a copy of the config, since other models may share the original."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, _attention)
    use_whole_sequences(model)
    state = model_state(model)
    state.extensions.append(context)
    config = copy.deepcopy(model.config)
    config._attn_implementation = ATTENTION_NAME
    for module in model.modules():
        if hasattr(module, "config"):
            module.config = config
            set_model_state(module, state)


def _counts_by_mask(model: HuggingFaceModel) -> bool:
    """Return whether the model derives missing positions from its padding mask."""
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding))
    return any("attention_mask" in inspect.signature(table.forward).parameters for table in tables)


def _attention(
    module: HuggingFaceModel,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: SequenceMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others,
) -> tuple[torch.Tensor, None]:
    """Attention function for transformers; tensors (B, H, S, D).

    The mask is that of the model's mask function. Other descriptions of it, such as
    ``sliding_window``, are ignored as by transformers' SDPA attention.
    """
    context = model_state(module).extension(ContextParallel)
    assert context is not None
    if not isinstance(attention_mask, SequenceMask):
        raise _unsupported(context.model, "does not use transformers' mask functions")
    for name in UNSUPPORTED_ATTENTION_ARGUMENTS:
        if others.get(name) is not None:
            raise ConfigError(
                f"context_parallel_degree > 1: {type(module).__name__} uses {name}, which "
                "context-parallel attention does not support. Set context_parallel_degree = 1."
            )
    context.attended = True
    out = attention(
        query,
        key,
        value,
        context.exchange,
        mask=attention_mask,
        scale=scaling,
        softcap=softcap,
        sinks_H=s_aux,
        dropout=dropout,
    )
    return out.transpose(1, 2).contiguous(), None
