"""Shape of a decoder: matrix sizes and parameter counts, from the keys of its config.

No model is built, and neither torch nor transformers is imported.
"""

from dataclasses import dataclass
from typing import Any

from ..config.architecture import context_key, layers_key
from ..config.schema import coerce
from ..config.train import ModelConfig
from ..errors import ConfigError

VOCABULARY = {
    "gpt2": 50257,
    "gpt_neox": 50432,
    "llama": 32000,
    "mistral": 32000,
    "mixtral": 32000,
}
"""Published vocabulary of each family: the default if neither data nor overrides set one."""

MAX_LAYERS = 10_000
"""Memory and time are laid out block by block; no published model has a tenth of that."""

ACTIVATIONS = {"gelu_new": (6, 2), "gelu": (1, 0), "silu": (1, 0)}
"""Unary and binary operators of an activation function that is not fused by a compiler.

GPT-2's ``gelu_new`` is written out with a cube and a tanh: eight operators, as listed in
`memory.block_ops`."""


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
    gated: bool = False
    """SwiGLU: a second matrix next to the first one of the feed-forward layer."""
    tied: bool = True
    """The head shares the embedding's matrix."""
    positions: int = 0
    """Rows of a learned position table."""
    experts: int = 1
    experts_per_token: int = 1
    activation: str = "gelu"
    """Activation function, a key of `ACTIVATIONS`."""

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def kv_width(self) -> int:
        return (self.kv_heads or self.heads) * self.head_width

    @property
    def attention_matrices(self) -> int:
        """Attention parameters of a block."""
        return 2 * self.width * (self.width + self.kv_width)

    @property
    def feed_forward_matrices(self) -> int:
        """Parameters of one expert, or of the dense feed-forward layer."""
        return (3 if self.gated else 2) * self.width * self.inner

    @property
    def router(self) -> int:
        """Router parameters of an MoE block."""
        return self.width * self.experts if self.experts > 1 else 0

    @property
    def block_parameters(self) -> int:
        """Parameters of one block, without norms and biases (about 0.1 %)."""
        feed_forward = self.experts * self.feed_forward_matrices
        return self.attention_matrices + feed_forward + self.router

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
        return self.layers * self.block_parameters + self.root_parameters

    def flops_per_token(self, sequence: int) -> float:
        """Model FLOPs per token, forward and backward, as in `train.model` (PaLM, appendix B)."""
        active = self.attention_matrices + self.experts_per_token * self.feed_forward_matrices
        matrices = self.layers * (active + self.router) + self.vocabulary * self.width
        return 6.0 * matrices + 12.0 * self.layers * self.width * sequence


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
    keys = {**model.architecture["shape"], **model.overrides}
    aliases = {
        "layers": [layers_key(family), "num_hidden_layers"],
        "width": ["n_embd", "hidden_size"],
        "heads": ["n_head", "num_attention_heads"],
    }
    sizes = {name: _first_key(keys, names, model.name) for name, names in aliases.items()}
    gpt, table = family == "gpt2", "model.overrides"
    longest = check_positive_int(model.longest_sequence, f"{table}.{context_key(family)}")
    words = vocabulary or keys.get("vocab_size") or VOCABULARY.get(family, 0)
    if not words:
        raise ConfigError(
            f"the vocabulary of {model.name} is unknown. Set model.overrides.vocab_size."
        )
    shape = ModelShape(
        **sizes,
        inner=_optional_int(keys, "n_inner" if gpt else "intermediate_size", 4 * sizes["width"]),
        vocabulary=check_positive_int(words, f"{table}.vocab_size"),
        kv_heads=_optional_int(keys, "num_key_value_heads", sizes["heads"]),
        gated=family not in ("gpt2", "gpt_neox"),
        tied=coerce(keys.get("tie_word_embeddings", gpt), bool, f"{table}.tie_word_embeddings"),
        positions=longest if gpt else 0,
        experts=_optional_int(keys, "num_local_experts", 1),
        experts_per_token=_optional_int(keys, "num_experts_per_tok", 1),
        activation=_activation(family, keys),
    )
    _check_shape(shape, model.name, own_head_width=keys.get("head_dim") is not None)
    return shape


def _check_shape(shape: ModelShape, name: str, own_head_width: bool) -> None:
    """Raise ConfigError for too many layers, or heads and experts that do not divide."""
    if shape.layers > MAX_LAYERS:
        raise ConfigError(
            f"{name} has {shape.layers:,} layers; the planner supports {MAX_LAYERS:,} at most. "
            "Lower the number of layers in model.overrides."
        )
    if shape.width % shape.heads and not own_head_width:
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
    name = coerce(keys.get(key, usual), str, f"model.overrides.{key}")
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
