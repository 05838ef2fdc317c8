"""Model shapes by name, as arguments of the Hugging Face config of their family.

GPT-2 sizes: Radford et al. 2019; ``gpt2-30b`` is the 30-billion model of the MiCS benchmarks (48
layers, 7168 wide, 64 heads, 2048 tokens). Llama 2: Touvron et al. 2023, table 1 and model cards.
GPT-NeoX: Black et al. 2022. Mistral 7B and Mixtral 8x7B: Jiang et al. 2023 and 2024, model cards.
Dropout is off, as usual in pre-training today. Imports neither torch nor transformers.
"""

from typing import Any, TypedDict

from ..errors import ConfigError
from .schema import unknown_key


class Architecture(TypedDict):
    """A model family and the shape of one model."""

    family: str
    """``model_type`` in transformers."""
    context: int
    """Longest sequence in tokens."""
    shape: dict[str, Any]
    """Arguments of the family's config."""


def _gpt2(width: int, layers: int, heads: int, context: int) -> Architecture:
    return {
        "family": "gpt2",
        "context": context,
        "shape": {
            "n_embd": width,
            "n_layer": layers,
            "n_head": heads,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    }


def _neox(width: int, layers: int, heads: int, context: int) -> Architecture:
    return {
        "family": "gpt_neox",
        "context": context,
        "shape": {
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
        },
    }


def _llama(
    width: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    context: int,
    family: str = "llama",
    **extra,
) -> Architecture:
    return {
        "family": family,
        "context": context,
        "shape": {
            "hidden_size": width,
            "intermediate_size": intermediate,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            **extra,
        },
    }


def _mixtral(*shape, experts: int, **arguments) -> Architecture:
    extra = {"num_local_experts": experts, "num_experts_per_tok": 2}
    return _llama(*shape, **arguments, family="mixtral", **extra)


PRESETS: dict[str, Architecture] = {
    "gpt2-tiny": _gpt2(width=128, layers=4, heads=4, context=256),
    "gpt2-small": _gpt2(width=768, layers=12, heads=12, context=1024),
    "gpt2-xl": _gpt2(width=1600, layers=48, heads=25, context=1024),
    "gpt2-30b": _gpt2(width=7168, layers=48, heads=64, context=2048),
    "llama-tiny": _llama(128, 352, layers=4, heads=4, kv_heads=2, context=256),
    "llama2-7b": _llama(4096, 11008, layers=32, heads=32, kv_heads=32, context=4096),
    "llama2-13b": _llama(5120, 13824, layers=40, heads=40, kv_heads=40, context=4096),
    "llama2-70b": _llama(8192, 28672, layers=80, heads=64, kv_heads=8, context=4096),
    "gpt-neox-tiny": _neox(width=128, layers=4, heads=4, context=256),
    "gpt-neox-20b": _neox(width=6144, layers=44, heads=64, context=2048),
    "mistral-7b": _llama(
        4096, 14336, layers=32, heads=32, kv_heads=8, context=8192, family="mistral"
    ),
    "mixtral-tiny": _mixtral(128, 176, layers=4, heads=4, kv_heads=2, context=256, experts=4),
    "mixtral-8x7b": _mixtral(4096, 14336, layers=32, heads=32, kv_heads=8, context=8192, experts=8),
}

CONFIG_CLASSES = {
    "gpt2": "GPT2Config",
    "llama": "LlamaConfig",
    "gpt_neox": "GPTNeoXConfig",
    "mistral": "MistralConfig",
    "mixtral": "MixtralConfig",
}
"""Config class in transformers of each family."""

CONTEXT_KEY = dict.fromkeys(CONFIG_CLASSES, "max_position_embeddings") | {"gpt2": "n_positions"}
LAYERS_KEY = dict.fromkeys(CONFIG_CLASSES, "num_hidden_layers") | {"gpt2": "n_layer"}


def context_key(family: str) -> str:
    """Return the config key of the longest sequence, also for families without a preset."""
    return CONTEXT_KEY.get(family, "max_position_embeddings")


def layers_key(family: str) -> str:
    """Return the config key of the number of blocks, also for families without a preset."""
    return LAYERS_KEY.get(family, "num_hidden_layers")


def get_preset(name: str) -> Architecture:
    """Return the architecture of the preset ``name``. Raises ConfigError if it is unknown."""
    if name not in PRESETS:
        error = unknown_key(name, "model.preset", PRESETS)
        raise ConfigError(str(error).replace("unknown key", "unknown preset"))
    return PRESETS[name]
