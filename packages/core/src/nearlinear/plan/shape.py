"""The shape of a decoder: its matrices and its parameters, from the keys of its config alone.

No model is built, and neither torch nor transformers is imported.
"""

from dataclasses import dataclass

from ..errors import ConfigError
from ..schema import coerce
from ..train.presets import context_key, layers_key
from ..train.tables import ModelConfig

VOCABULARY = {
    "gpt2": 50257,
    "gpt_neox": 50432,
    "llama": 32000,
    "mistral": 32000,
    "mixtral": 32000,
}
"""Of each family as it was published: what a model has unless its data or overrides say more."""


MOST_LAYERS = 10_000
"""Memory and time are laid out block by block; no model has a tenth of that."""

ACTIVATIONS = {"gelu_new": (6, 2), "gelu": (1, 0), "silu": (1, 0)}
"""Operators of an activation function that no compiler has fused: of one tensor, and of two.

GPT-2's is written out with a cube and a tanh: eight, as `memory.blocks` lists them."""


@dataclass(frozen=True)
class Shape:
    """A decoder of equal blocks; sizes of matrices are in elements."""

    layers: int
    width: int
    heads: int
    inner: int
    """width inside the feed-forward part"""
    vocabulary: int
    kv_heads: int = 0
    """heads of keys and values; 0 = as many as of queries"""
    gated: bool = False
    """SwiGLU: a second matrix beside the first of the feed-forward part"""
    tied: bool = True
    """the head's matrix is the embedding"""
    positions: int = 0
    """rows of a learned position table"""
    experts: int = 1
    experts_per_token: int = 1
    activation: str = "gelu"
    """one of `ACTIVATIONS`"""

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def kv_width(self) -> int:
        return (self.kv_heads or self.heads) * self.head_width

    @property
    def attention_matrices(self) -> int:
        """Parameters of a block's attention."""
        return 2 * self.width * (self.width + self.kv_width)

    @property
    def feed_forward_matrices(self) -> int:
        """Parameters of one expert, or of the one feed-forward part."""
        return (3 if self.gated else 2) * self.width * self.inner

    @property
    def router(self) -> int:
        """Parameters that choose a token's experts."""
        return self.width * self.experts if self.experts > 1 else 0

    @property
    def block_parameters(self) -> int:
        """Of one block; vectors (norms, biases) are left out, they are parts of a thousand."""
        feed_forward = self.experts * self.feed_forward_matrices
        return self.attention_matrices + feed_forward + self.router

    @property
    def root_parameters(self) -> int:
        """Of the embeddings and the head."""
        tables = (1 if self.tied else 2) * self.vocabulary + self.positions
        return tables * self.width

    @property
    def ends(self) -> tuple[int, int]:
        """Parameters of a pipeline's first stage and of its last, beside blocks.

        Both hold a tied table.
        """
        table = self.vocabulary * self.width
        return table + self.positions * self.width, table

    @property
    def parameters(self) -> int:
        return self.layers * self.block_parameters + self.root_parameters

    def flops_per_token(self, sequence: int) -> float:
        """Model FLOPS of a token, forward and backward, as `train.flops` counts them (PaLM)."""
        active = self.attention_matrices + self.experts_per_token * self.feed_forward_matrices
        matrices = self.layers * (active + self.router) + self.vocabulary * self.width
        return 6.0 * matrices + 12.0 * self.layers * self.width * sequence


def of_model(model: ModelConfig, vocabulary: int = 0) -> Shape:
    """The shape of what ``model`` names, with ``vocabulary`` ids (0: its family's own).

    Raises ConfigError for an architecture whose keys are not those of a decoder.
    """
    family = model.family
    keys = {**model.architecture["shape"], **model.overrides}
    first = {
        "layers": [layers_key(family), "num_hidden_layers"],
        "width": ["n_embd", "hidden_size"],
        "heads": ["n_head", "num_attention_heads"],
    }
    sizes = {name: _first(keys, names, model.name) for name, names in first.items()}
    gpt, own = family == "gpt2", "model.overrides"
    longest = at_least_one(model.longest_sequence, f"{own}.{context_key(family)}")
    words = vocabulary or keys.get("vocab_size") or VOCABULARY.get(family, 0)
    if not words:
        raise ConfigError(f"{model.name}: model.overrides.vocab_size is not known: give it")
    found = Shape(
        **sizes,
        inner=_count(keys, "n_inner" if gpt else "intermediate_size", 4 * sizes["width"]),
        vocabulary=at_least_one(words, f"{own}.vocab_size"),
        kv_heads=_count(keys, "num_key_value_heads", sizes["heads"]),
        gated=family not in ("gpt2", "gpt_neox"),
        tied=coerce(keys.get("tie_word_embeddings", gpt), bool, f"{own}.tie_word_embeddings"),
        positions=longest if gpt else 0,
        experts=_count(keys, "num_local_experts", 1),
        experts_per_token=_count(keys, "num_experts_per_tok", 1),
        activation=_activation(family, keys),
    )
    _check(found, model.name, own_head_width=keys.get("head_dim") is not None)
    return found


def _check(found: Shape, name: str, own_head_width: bool) -> None:
    """Raise ConfigError for too many layers, and heads and experts that do not go together."""
    if found.layers > MOST_LAYERS:
        raise ConfigError(
            f"{name}: {found.layers:,} layers, of which the planner takes {MOST_LAYERS:,} at most: "
            "lower model.overrides"
        )
    if found.width % found.heads and not own_head_width:
        raise ConfigError(f"{name}: {found.heads} heads do not divide its width of {found.width}")
    if found.heads % found.kv_heads:
        raise ConfigError(
            f"{name}: num_key_value_heads = {found.kv_heads} does not divide its {found.heads} "
            "heads of queries"
        )
    if found.experts_per_token > found.experts > 1:
        raise ConfigError(
            f"{name}: num_experts_per_tok = {found.experts_per_token}, of {found.experts} experts: "
            "lower it"
        )


def _activation(family: str, keys: dict) -> str:
    """As the family's code has it, unless its config names another; a name unknown here is one
    operator."""
    usual = {"gpt2": "gelu_new", "gpt_neox": "gelu"}.get(family, "silu")
    key = "activation_function" if family == "gpt2" else "hidden_act"
    asked = coerce(keys.get(key, usual), str, f"model.overrides.{key}")
    return asked if asked in ACTIVATIONS else "gelu"


def _first(keys: dict, names: list[str], model: str) -> int:
    for name in names:
        if name in keys:
            return at_least_one(keys[name], f"model.overrides.{name}")
    raise ConfigError(f"{model}: its config has no {' or '.join(names)}: the planner needs it")


def _count(keys: dict, name: str, usual: int) -> int:
    """What ``name`` is there; ``usual`` where it is not or null, as in Hugging Face's configs."""
    value = keys.get(name)
    return usual if value is None else at_least_one(value, f"model.overrides.{name}")


def at_least_one(value, key: str) -> int:
    """``value`` as a whole number. Raises ConfigError for what is none, and below 1."""
    found = coerce(value, int, key)
    if found < 1:
        raise ConfigError(f"{key} = {found}: must be at least 1")
    return found
