"""Which Hugging Face models can be split along their sequences: those whose only way from token to
token is causal attention through transformers' attention interface. All others are refused."""

from __future__ import annotations

import sys

from torch import nn

from ...errors import ConfigError

KEY = "context_parallel_degree"
KINDS_OF_LAYERS = ("full_attention", "sliding_attention")
LENGTH_DEPENDENT = ("dynamic", "longrope")  # rotary frequencies that change with the batch


def check(model: nn.Module) -> None:
    """Raise ConfigError, with the reason and the remedy, for a model that cannot be split."""
    config = getattr(model, "config", None)
    if not hasattr(config, "_attn_implementation"):
        _no(model, "is no Hugging Face transformer")
    if getattr(config, "is_encoder_decoder", False) or getattr(
        config, "add_cross_attention", False
    ):
        _no(model, "has cross attention")
    if model.get_output_embeddings() is None:
        _no(model, "has no language modelling head")
    causal = [getattr(part, "is_causal", True) for part in (config, *_with_config(model))]
    if not all(causal):
        _no(model, "attends to what comes later (is_causal = False)")
    if any(type(part.config) is not type(config) for part in _with_config(model)):
        _no(model, "is made of several models")
    if not any(_attends_by_interface(part) for part in _with_config(model)):
        _no(model, "does not use transformers' attention interface")
    others = set(getattr(config, "layer_types", None) or ()) - set(KINDS_OF_LAYERS)
    if others or getattr(model, "_is_stateful", False):
        what = ", ".join(sorted(others)) or "a state"
        _no(model, f"passes {what} from token to token, not only attention")
    for name in LENGTH_DEPENDENT:
        if name in _rope_types(config):
            _no(model, f"has rotary frequencies that change with a batch's length ({name!r})")
    if config._attn_implementation == "eager" and getattr(config, "reorder_and_upcast_attn", False):
        raise ConfigError(
            f"{KEY} > 1 with reorder_and_upcast_attn = True: the attention that splits sequences "
            "computes its softmax in float32 always; set reorder_and_upcast_attn = False"
        )
    if getattr(config, "output_router_logits", False):
        raise ConfigError(
            f"{KEY} > 1 with output_router_logits = True: the load-balancing loss of "
            f"{type(model).__name__} would be that of a part of the sequence; set it to False"
        )


def _no(model: nn.Module, why: str) -> None:
    raise ConfigError(
        f"{KEY} > 1: {type(model).__name__} {why}, and nearlinear cannot split its sequences; set "
        f"{KEY} = 1, or use a GPT-2, GPT-NeoX, Llama, Mistral, Mixtral or the like"
    )


def _with_config(model: nn.Module) -> list[nn.Module]:
    return [part for part in model.modules() if hasattr(part, "config")]


def _attends_by_interface(module: nn.Module) -> bool:
    """Whether the file that defines a part of a model looks attention functions up."""
    from transformers import PreTrainedModel

    homes = (sys.modules.get(kind.__module__) for kind in type(module).__mro__)
    return not isinstance(module, PreTrainedModel) and any(
        hasattr(home, "ALL_ATTENTION_FUNCTIONS") for home in homes
    )


def _rope_types(config) -> set[str]:
    """All values named ``rope_type`` or ``type``: of the model, or of each kind of layer."""
    found, todo = set(), []
    for name in ("rope_parameters", "rope_scaling"):
        todo.append(getattr(config, name, None))
    while todo:
        item = todo.pop()
        if isinstance(item, dict):
            found |= {item[key] for key in ("rope_type", "type") if isinstance(item.get(key), str)}
            todo += item.values()
    return found
