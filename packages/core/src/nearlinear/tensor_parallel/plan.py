"""Tensor-parallel plans: those of Hugging Face configs, and one for GPT-2, which has none.

Names are patterns in which ``*`` stands for the index of a block. ``base_model_tp_plan`` of a
model's config lists column- and row-parallel layers. The modules that contain both, attention and
MLP, compute with all tokens; all other modules compute with this rank's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeGuard

from torch import nn

from ..errors import ConfigError

COLWISE_STYLES = {"colwise": 1, "colwise_gather_output": 1, "packed_colwise": 2}
"""Column-parallel styles and the number of fused projections in one parameter."""
ROWWISE_STYLES = ("rowwise", "rowwise_split_input")
UNSPLIT_SIDE_STYLES = ("colwise_gather_output", "rowwise_split_input")
REPLICATED_STYLES = ("replicated_with_grad_allreduce", "moe_tp_experts", "mla_kv_a_proj")
EQUIVALENT_LINEAR = ("FalconLinear",)
"""Subclasses of `torch.nn.Linear` whose ``forward`` gives the same result."""
SHARED_EXPERTS = ("shared_expert", "shared_experts")
"""MLPs whose outputs a mixture adds to those of its experts."""


@dataclass(frozen=True)
class TensorParallelPlan:
    """Modules of one model to split, as name patterns."""

    columns: dict[str, int]
    """Modules or stacked parameters split by outputs, with their number of fused projections."""
    rows: tuple[str, ...]
    """Modules or stacked parameters split by inputs, whose outputs are partial sums."""
    unsplit_side: tuple[str, ...]
    """Modules of both kinds whose split side is unsplit for the modules around them."""
    norm: str
    """The last norm, after which the head needs all tokens."""
    widths: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Attributes that hold a width, by module; they are divided by the ranks."""
    whole_states: bool = False
    """Hidden states are whole on every rank, instead of its rows of the tokens."""
    summed: tuple[str, ...] = ()
    """Modules whose outputs are partial sums (stacked experts), with whole hidden states."""
    transposed: frozenset[str] = frozenset()
    """Stacked parameters stored as (experts, inputs, outputs)."""
    by_heads: dict[str, int] = field(default_factory=dict)
    """Number of heads of parameters with one value per head, and of modules that take a bias."""
    shared_biases: tuple[str, ...] = ()
    """Biases of experts that every rank adds to its partial sum."""

    @property
    def regions(self) -> tuple[str, ...]:
        """Modules that compute with all tokens and a part of every matrix."""
        parents = {_parent(name) for name in self.columns} & {_parent(name) for name in self.rows}
        return tuple(sorted(parents))


GPT2 = TensorParallelPlan(
    columns={"transformer.h.*.attn.c_attn": 3, "transformer.h.*.mlp.c_fc": 1},
    rows=("transformer.h.*.attn.c_proj", "transformer.h.*.mlp.c_proj"),
    unsplit_side=(),
    norm="transformer.ln_f",
    widths={
        "transformer.h.*.attn": ("split_size",),
        "transformer.h.*.attn.c_attn": ("nf",),
        "transformer.h.*.mlp.c_fc": ("nf",),
    },
)


def find_plan(model: nn.Module) -> TensorParallelPlan:
    """Return the plan of ``model``. Raises ConfigError if the model has none."""
    config = getattr(model, "config", None)
    if getattr(config, "model_type", None) == "gpt2":
        return GPT2
    styles = getattr(config, "base_model_tp_plan", None)
    order = getattr(config, "base_model_pp_plan", None)
    if not styles or not order:
        raise ConfigError(
            f"tensor_parallel_degree > 1: {type(model).__name__} has no tensor-parallel plan (its "
            "config lacks base_model_tp_plan or base_model_pp_plan). Set "
            "tensor_parallel_degree = 1 and raise hybrid_shard_degree, or use a Llama, Mistral, "
            "Mixtral, Qwen, GPT-NeoX or GPT-2 model."
        )
    base = f"{model.base_model_prefix}." if model.base_model is not model else ""
    columns, rows = {}, []
    for name, style in styles.items():
        if style in COLWISE_STYLES:
            columns[base + name] = COLWISE_STYLES[style]
        elif style in ROWWISE_STYLES:
            rows.append(base + name)
        elif style not in REPLICATED_STYLES:
            raise ConfigError(
                f"tensor_parallel_degree > 1: the plan of {type(model).__name__} splits {name} in "
                f"the style {style!r}, which is not supported. Set tensor_parallel_degree = 1 and "
                "raise hybrid_shard_degree."
            )
    _add_shared_experts(model, columns, rows)
    sides = [base + name for name, style in styles.items() if style in UNSPLIT_SIDE_STYLES]
    return TensorParallelPlan(columns, tuple(rows), tuple(sides), base + list(order)[-1])


def _add_shared_experts(model: nn.Module, columns: dict[str, int], rows: list[str]) -> None:
    """Split shared experts beside split experts also if the config's plan forgets them."""
    for stacked in [name for name in rows if name.endswith(".experts.down_proj")]:
        mixture = stacked.removesuffix(".experts.down_proj")
        for shared in SHARED_EXPERTS:
            if expand(model, f"{mixture}.{shared}.down_proj"):
                for name, parts in (("gate_proj", 1), ("up_proj", 1), ("gate_up_proj", 2)):
                    if expand(model, f"{mixture}.{shared}.{name}"):
                        columns.setdefault(f"{mixture}.{shared}.{name}", parts)
                if f"{mixture}.{shared}.down_proj" not in rows:
                    rows.append(f"{mixture}.{shared}.down_proj")


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether the module computes as `torch.nn.Linear` does."""
    return type(module) is nn.Linear or type(module).__name__ in EQUIVALENT_LINEAR


def matching_style(model: nn.Module, name: str) -> str | None:
    """Return the style of the config's plan for the module or parameter ``name``, if any."""
    styles = getattr(model.config, "base_model_tp_plan", None) or {}
    for pattern, style in styles.items():
        inner = name.split(".")[-1 - pattern.count(".") :]
        if _matches(".".join(inner), pattern):
            return style
    return None


def _parent(name: str) -> str:
    """Return the module that needs all tokens if ``name`` is split; for experts, their mixture."""
    parent, _, last = name.rpartition(".")[0].rpartition(".")
    return parent if last in ("experts", *SHARED_EXPERTS) else f"{parent}.{last}"


def expand(model: nn.Module, pattern: str) -> list[str]:
    """List the modules and parameters of ``model`` that match ``pattern``, in model order."""
    if "*" not in pattern:
        parent, _, last = pattern.rpartition(".")
        try:
            holder = model.get_submodule(parent)
        except AttributeError:
            return []
        return [pattern] if last in holder._modules or last in holder._parameters else []
    names = [name for name, _ in model.named_modules()]
    names += [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return [name for name in names if _matches(name, pattern)]


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(
        want == part or (want == "*" and part.isdigit())
        for part, want in zip(parts, wanted, strict=True)
    )
