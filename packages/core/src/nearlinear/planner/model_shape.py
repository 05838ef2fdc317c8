"""Shape of a decoder: matrix sizes and parameter counts.

The shapes of the presets' families follow from the keys of their configs, without importing torch
or transformers. Those of other families are read from the parameters of transformers' own class,
built on the meta device, without memory and weights. Every matrix must then have a known role, and
all blocks must have the same matrices: a model of which the planner knew only a part would be
planned as a smaller one.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from ..config.architecture import context_key, layers_key
from ..config.schema import coerce
from ..config.train import ModelConfig
from ..errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from torch.nn import Module

VOCABULARY = {
    "gpt2": 50257,
    "gpt_neox": 50432,
    "llama": 32000,
    "mistral": 32000,
    "mixtral": 32000,
}
"""Published vocabulary of each family: the default if neither data, overrides nor the preset set
one."""

MAX_LAYERS = 10_000
"""Memory and time are laid out block by block; no published model has a tenth of that."""

ACTIVATIONS = {"gelu_new": (6, 2), "gelu": (1, 0), "silu": (1, 0)}
"""Unary and binary operators of an activation function that is not fused by a compiler.

GPT-2's ``gelu_new`` is written out with a cube and a tanh: eight operators, as listed in
`memory.block_ops`."""


_ATTENTION = r"(?:self_attn|attention|self_attention)\."
_FEED_FORWARD = r"(?:mlp|feed_forward|block_sparse_moe|moe)\."
ROLES = {
    "query": _ATTENTION + r"q_proj\.weight",
    "key": _ATTENTION + r"k_proj\.weight",
    "value": _ATTENTION + r"v_proj\.weight",
    "query, key and value": _ATTENTION + r"qkv_proj\.weight",
    "compressed query": _ATTENTION + r"q_a_proj\.weight",
    "expanded query": _ATTENTION + r"q_b_proj\.weight",
    "compressed key": _ATTENTION + r"kv_a_proj_with_mqa\.weight",
    "expanded key": _ATTENTION + r"kv_b_proj\.weight",
    "output": _ATTENTION + r"(?:o_proj|out_proj)\.weight",
    "gate": _FEED_FORWARD + r"gate_proj\.weight",
    "up": "(?:" + _FEED_FORWARD + r"up_proj|fc1)\.weight",
    "gate and up": _FEED_FORWARD + r"gate_up_proj\.weight",
    "down": "(?:" + _FEED_FORWARD + r"down_proj|fc2)\.weight",
    "router": _FEED_FORWARD + r"(?:gate|router)\.weight",
    "experts' gate and up": _FEED_FORWARD + r"experts\.gate_up_proj",
    "experts' down": _FEED_FORWARD + r"experts\.down_proj",
    "shared gate": _FEED_FORWARD + r"shared_experts?\.gate_proj\.weight",
    "shared up": _FEED_FORWARD + r"shared_experts?\.up_proj\.weight",
    "shared down": _FEED_FORWARD + r"shared_experts?\.down_proj\.weight",
    "shared share": _FEED_FORWARD + r"shared_expert_gate\.weight",
    "bias": r".*(?:bias|_bias)",
}
"""Regular expressions of the names of a block's matrices, by role; vectors need no role."""

_DENSE = ({"gate", "up", "down"}, {"gate and up", "down"}, {"up", "down"})
_COMPRESSED = {"compressed key", "expanded key", "output"}
_ATTENTIONS = (
    {"query", "key", "value", "output"},
    {"query, key and value", "output"},
    {"query", *_COMPRESSED},
    {"compressed query", "expanded query", *_COMPRESSED},
)
_EXPERTS = {"router", "experts' gate and up", "experts' down"}
_SHARED = {"shared gate", "shared up", "shared down"}


@dataclass(frozen=True)
class LatentAttention:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), in elements."""

    query_rank: int
    """Width of the compressed queries; 0 if they are not compressed."""
    rank: int
    """Width of the compressed keys and values."""
    rotary: int
    """Part of a head's queries and keys with rotary positions; all heads share that of the keys."""
    value: int
    """Width of a head's values."""

    def matrices(self, width: int, heads: int, head: int) -> tuple[tuple[int, int], ...]:
        """Return (inputs, outputs) of the products, in order; ``head``: width of its queries."""
        queries = heads * head
        keys_values = heads * (head - self.rotary + self.value)
        query = ((width, self.query_rank), (self.query_rank, queries))
        return (
            *(query if self.query_rank else ((width, queries),)),
            (width, self.rank + self.rotary),
            (self.rank, keys_values),
            (heads * self.value, width),
        )


@dataclass(frozen=True)
class ModelShape:
    """Shape of a decoder with identical blocks; matrix sizes are in elements."""

    layers: int
    width: int
    """Hidden size."""
    heads: int
    inner: int
    """Width of the feed-forward layer."""
    vocabulary: int
    kv_heads: int = 0
    """Key-value heads; 0 means one per query head."""
    head_dim: int = 0
    """Width of a head; 0 means that all heads together are as wide as the hidden states."""
    gated: bool = False
    """SwiGLU: a second matrix next to the first one of the feed-forward layer."""
    tied: bool = True
    """The head shares the embedding's matrix."""
    positions: int = 0
    """Rows of a learned position table."""
    experts: int = 1
    experts_per_token: int = 1
    shared_inner: int = 0
    """Width of the experts that all tokens share, together; they are gated like the others."""
    latent: LatentAttention | None = None
    """Attention with compressed keys and values."""
    dense_blocks: int = 0
    """Blocks with a dense feed-forward layer in a model of mixtures."""
    other_parameters: int = 0
    """Parameters of norms and biases, if they are known, less those that dense blocks have fewer
    than mixtures."""
    activation: str = "gelu"
    """Activation function, a key of `ACTIVATIONS`."""

    @property
    def head_width(self) -> int:
        return self.head_dim or self.width // self.heads

    @property
    def attention_width(self) -> int:
        """Width of the queries of all heads."""
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        return (self.kv_heads or self.heads) * self.head_width

    @property
    def attention_matrices(self) -> int:
        """Attention parameters of a block."""
        if self.latent is not None:
            products = self.latent.matrices(self.width, self.heads, self.head_width)
            return sum(inputs * outputs for inputs, outputs in products)
        return 2 * self.width * (self.attention_width + self.kv_width)

    @property
    def feed_forward_matrices(self) -> int:
        """Parameters of one expert, or of the dense feed-forward layer."""
        return (3 if self.gated else 2) * self.width * self.inner

    @property
    def shared_matrices(self) -> int:
        """Parameters of the shared experts of an MoE block."""
        return 3 * self.width * self.shared_inner

    @property
    def router(self) -> int:
        """Router parameters of an MoE block."""
        return self.width * self.experts if self.experts > 1 else 0

    @property
    def block_parameters(self) -> int:
        """Parameters of one block, without norms and biases (about 0.1 %)."""
        feed_forward = self.experts * self.feed_forward_matrices
        return self.attention_matrices + feed_forward + self.shared_matrices + self.router

    @property
    def root_parameters(self) -> int:
        """Parameters of the embeddings and the head."""
        tables = (1 if self.tied else 2) * self.vocabulary + self.positions
        return tables * self.width

    @property
    def ends(self) -> tuple[int, int]:
        """Parameters of a pipeline's first and last stage, without blocks.

        Both stages hold a tied table.
        """
        table = self.vocabulary * self.width
        return table + self.positions * self.width, table

    @property
    def parameters(self) -> int:
        return self.layers * self.block_parameters + self.root_parameters + self.other_parameters

    def flops_per_token(self, sequence: int) -> float:
        """Model FLOPs per token, forward and backward, as in `train.model` (PaLM, appendix B)."""
        active = self.attention_matrices + self.shared_matrices + self.router
        active += self.experts_per_token * self.feed_forward_matrices
        matrices = self.layers * active + self.vocabulary * self.width
        wide = self.attention_width
        if self.latent is not None:  # the scores take queries, their sums take values
            wide = (wide + self.heads * self.latent.value) / 2
        return 6.0 * matrices + 12.0 * self.layers * wide * sequence


def model_shape(model: ModelConfig, vocabulary: int = 0) -> ModelShape:
    """Return the shape of ``model`` with ``vocabulary`` ids (0: the family's own).

    Raises ConfigError if the architecture lacks the keys of a decoder.
    """
    family = model.family
    if model.trained_objective != "causal":
        raise ConfigError(
            f"{model.name} is trained on {model.trained_objective!r}, and the planner models "
            "decoders only: choose a causal language model"
        )
    if family not in VOCABULARY:
        return _shape_of_modules(model, vocabulary)
    keys = {**model.architecture["shape"], **model.overrides}
    aliases = {
        "layers": [layers_key(family), "num_hidden_layers"],
        "width": ["n_embd", "hidden_size"],
        "heads": ["n_head", "num_attention_heads"],
    }
    sizes = {name: _first_key(keys, names, model.name) for name, names in aliases.items()}
    gpt, table = family == "gpt2", "model.overrides"
    longest = check_positive_int(model.longest_sequence, f"{table}.{context_key(family)}")
    words = vocabulary or keys.get("vocab_size") or model.architecture.get("vocabulary")
    words = words or VOCABULARY.get(family, 0)
    if not words:
        raise ConfigError(
            f"the vocabulary of {model.name} is unknown. Set model.overrides.vocab_size."
        )
    shape = ModelShape(
        layers=sizes["layers"],
        width=sizes["width"],
        heads=sizes["heads"],
        inner=_optional_int(keys, "n_inner" if gpt else "intermediate_size", 4 * sizes["width"]),
        vocabulary=check_positive_int(words, f"{table}.vocab_size"),
        kv_heads=_optional_int(keys, "num_key_value_heads", sizes["heads"]),
        head_dim=_optional_int(keys, "head_dim", 0) if keys.get("head_dim") else 0,
        gated=family not in ("gpt2", "gpt_neox"),
        tied=coerce(keys.get("tie_word_embeddings", gpt), bool, f"{table}.tie_word_embeddings"),
        positions=longest if gpt else 0,
        experts=_optional_int(keys, "num_local_experts", 1),
        experts_per_token=_optional_int(keys, "num_experts_per_tok", 1),
        activation=_activation(family, keys),
    )
    _check_shape(shape, model.name)
    return shape


def _check_shape(shape: ModelShape, name: str) -> None:
    """Raise ConfigError for too many layers, or heads and experts that do not divide."""
    if shape.layers > MAX_LAYERS:
        raise ConfigError(
            f"{name} has {shape.layers:,} layers; the planner supports {MAX_LAYERS:,} at most. "
            "Lower the number of layers in model.overrides."
        )
    if shape.width % shape.heads and not shape.head_dim:
        raise ConfigError(
            f"{name}: {shape.heads} heads do not divide its hidden size of {shape.width}"
        )
    if shape.heads % shape.kv_heads:
        raise ConfigError(
            f"{name}: num_key_value_heads = {shape.kv_heads} does not divide its {shape.heads} "
            "query heads"
        )
    if shape.experts_per_token > shape.experts > 1:
        raise ConfigError(
            f"{name}: num_experts_per_tok = {shape.experts_per_token} exceeds its {shape.experts} "
            "experts. Lower it."
        )


def _activation(family: str, keys: dict) -> str:
    """Return the activation function; an unknown one counts as a single operator."""
    usual = {"gpt2": "gelu_new", "gpt_neox": "gelu"}.get(family, "silu")
    key = "activation_function" if family == "gpt2" else "hidden_act"
    return _activation_of(coerce(keys.get(key, usual), str, f"model.overrides.{key}"))


def _activation_of(name: str) -> str:
    """Return a key of `ACTIVATIONS`; an unknown function counts as a single operator."""
    return name if name in ACTIVATIONS else "gelu"


def _first_key(keys: dict, names: list[str], model: str) -> int:
    for name in names:
        if name in keys:
            return check_positive_int(keys[name], f"model.overrides.{name}")
    raise ConfigError(
        f"the config of {model} has no {' or '.join(names)}, which the planner requires"
    )


def _optional_int(keys: dict, name: str, default: int) -> int:
    """Return ``keys[name]``, or ``default`` if it is missing or null."""
    value = keys.get(name)
    return default if value is None else check_positive_int(value, f"model.overrides.{name}")


def check_positive_int(value: Any, key: str) -> int:
    """Return ``value`` as an integer. Raises ConfigError unless it is one, and at least 1."""
    number = coerce(value, int, key)
    if number < 1:
        raise ConfigError(f"{key} = {number}: must be at least 1")
    return number


def _shape_of_modules(model: ModelConfig, vocabulary: int) -> ModelShape:
    """Return the shape of ``model`` with ``vocabulary`` ids; 0: as its config says.

    Raises ConfigError, which names a matrix or a block, if the planner cannot model it.
    """
    described = {"model_type": model.family, **model.architecture["shape"], **model.overrides}
    described |= {"vocab_size": vocabulary} if vocabulary else {}
    return _read_shape(model.name, json.dumps(described))


@cache
def _read_shape(model: str, described: str) -> ModelShape:
    """Return the shape of the model ``model`` with the config.json ``described``."""
    from ..checkpoint.hf.meta_model import build_from_config
    from ..fsdp.model_state import find_blocks

    try:
        built = build_from_config(json.loads(described))
    except CheckpointError as error:
        raise ConfigError(f"{model}: {error}") from None
    blocks = find_blocks(built)
    matrices = [_matrices(model, block) for block in blocks]
    sizes = max(matrices, key=lambda found: sum(map(math.prod, found.values())))
    config = built.config
    dense = 0
    for number, found in enumerate(matrices):
        if found == sizes:
            continue
        roles = [role for role in {**sizes, **found} if found.get(role) != sizes.get(role)]
        if not sizes.keys() >= _EXPERTS or not set(roles) & found.keys() <= _DENSE[0] | _DENSE[1]:
            raise ConfigError(
                f"{model}: block {number} has another {roles[0]} matrix than others. The "
                "planner models equal blocks, and dense ones beside mixtures"
            )
        dense += 1
    attention = _attention(model, built, sizes)
    mixture = _EXPERTS & sizes.keys()
    feed_forward = _mixture(model, config, sizes) if mixture else _dense(model, sizes, blocks[0])
    tables = built.get_input_embeddings().weight, built.get_output_embeddings().weight
    positions = _other_tables(model, built, blocks, tables)
    shape = ModelShape(
        layers=len(blocks),
        vocabulary=tables[0].shape[0],
        tied=tables[0] is tables[1],
        positions=positions,
        dense_blocks=dense,
        activation=_activation_of(getattr(config, "hidden_act", None) or "silu"),
        **attention,
        **feed_forward,
    )
    everything = sum(p.numel() for p in built.parameters())
    shape = replace(shape, other_parameters=everything - shape.parameters)
    _check_shape(shape, model)
    return shape


def _matrices(model: str, block: Module) -> dict[str, tuple[int, ...]]:
    """Return the dims of a block's matrices by role."""
    found: dict[str, tuple[int, ...]] = {}
    for name, parameter in block.named_parameters():
        if parameter.dim() < 2:
            continue
        role = next((role for role, names in ROLES.items() if re.fullmatch(names, name)), None)
        if role is None:
            raise ConfigError(
                f"{model}: the planner does not know the matrix {name} {tuple(parameter.shape)} of "
                f"{type(block).__name__}, so that it cannot plan this model"
            )
        found[role] = tuple(parameter.shape)
    return found


def _attention(model: str, built: Any, sizes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    present = set(sizes) & set().union(*_ATTENTIONS)
    heads = getattr(built.config, "num_attention_heads", 0)
    if present not in _ATTENTIONS or not heads:
        raise ConfigError(
            f"{model}: its blocks have no attention that the planner knows "
            f"(matrices: {', '.join(sorted(sizes))})"
        )
    width, wide = sizes["output"]
    if "expanded key" in sizes:
        return {"width": width, "heads": heads, **_latent_attention(model, heads, sizes)}
    head_width, rest = divmod(wide, heads)
    keys = sizes["key"][0] if "key" in sizes else (sizes["query, key and value"][0] - wide) // 2
    if rest or keys % head_width or (sizes.get("value") or (keys,))[0] != keys:
        raise ConfigError(
            f"{model}: queries {wide} wide and keys {keys} wide do not divide into {heads} heads "
            "of one width, which the planner requires"
        )
    return {"width": width, "heads": heads, "head_dim": head_width, "kv_heads": keys // head_width}


def _latent_attention(model: str, heads: int, sizes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    queries = sizes["expanded query" if "expanded query" in sizes else "query"][0]
    expanded, rank = sizes["expanded key"]
    rotary, value = sizes["compressed key"][0] - rank, sizes["output"][1]
    if queries % heads or value % heads or expanded != queries - heads * rotary + value:
        raise ConfigError(
            f"{model}: queries {queries} wide, keys and values {expanded} wide and a rotary part "
            f"of {rotary} are not those of latent attention with {heads} heads"
        )
    latent = LatentAttention(sizes.get("compressed query", (0,))[0], rank, rotary, value // heads)
    return {"head_dim": queries // heads, "kv_heads": heads, "latent": latent}


def _dense(model: str, sizes: dict[str, tuple[int, ...]], block: Module) -> dict[str, Any]:
    present = set(sizes) & set().union(*_DENSE)
    if present not in _DENSE:
        raise ConfigError(
            f"{model}: {type(block).__name__} has no feed-forward layer that the planner knows "
            f"(matrices: {', '.join(sorted(sizes))})"
        )
    return {"inner": sizes["down"][1], "gated": "up" not in present or "gate" in present}


def _mixture(model: str, config: Any, sizes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    shared = set(sizes) & _SHARED
    if not _EXPERTS <= sizes.keys() or shared not in (set(), _SHARED) or "down" in sizes:
        raise ConfigError(
            f"{model}: its blocks have experts in a form that the planner does not know "
            f"(matrices: {', '.join(sorted(sizes))})"
        )
    chosen = next(
        (getattr(config, key) for key in ("num_experts_per_tok", "num_experts_per_token", "top_k")
         if isinstance(getattr(config, key, None), int)), 0,
    )  # fmt: skip
    if chosen < 1:
        raise ConfigError(f"{model}: its config does not say how many experts a token has")
    up, down = sizes["experts' gate and up"], sizes["experts' down"]
    experts, *sides = down
    width = sizes["output"][0]
    inner = sides[0] if sides[1] == width and sides[0] != width else sides[1]
    expected = sorted((experts, width, 2 * inner)), sorted((width, inner))
    if (sorted(up), sorted(sides)) != expected:
        raise ConfigError(
            f"{model}: experts of {up} and {down} are not those of a gated feed-forward layer, the "
            "only kind that the planner knows"
        )
    return {
        "experts": experts,
        "experts_per_token": chosen,
        "inner": inner,
        "gated": True,
        "shared_inner": sizes["shared down"][1] if shared else 0,
    }


def _other_tables(model: str, built: Any, blocks: list[Module], tables: tuple) -> int:
    """Return the rows of a table of positions; there may be no other matrix outside the blocks."""
    inside = {id(p) for block in blocks for p in block.parameters()} | {id(t) for t in tables}
    rows = 0
    for name, parameter in built.named_parameters():
        if parameter.dim() < 2 or id(parameter) in inside:
            continue
        if rows or not re.search(r"(?:position|wpe)", name):
            raise ConfigError(
                f"{model}: the planner does not know the matrix {name} {tuple(parameter.shape)}, "
                "so that it cannot plan this model"
            )
        rows = parameter.shape[0]
    return rows
