"""Tensor-parallel plans: those of Hugging Face configs, and one for GPT-2, which has none.

Names are patterns in which ``*`` stands for the index of a block. ``base_model_tp_plan`` of a
model's config lists column- and row-parallel layers. The modules that contain both, attention and
MLP, compute with all tokens; all other modules compute with this rank's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from ..errors import ConfigError

COLWISE_STYLES = {"colwise": 1, "colwise_gather_output": 1, "packed_colwise": 2}
"""Column-parallel styles and the number of fused projections in one parameter."""
ROWWISE_STYLES = ("rowwise", "rowwise_split_input")
UNSPLIT_SIDE_STYLES = ("colwise_gather_output", "rowwise_split_input")
REPLICATED_STYLES = ("replicated_with_grad_allreduce", "moe_tp_experts")


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
    sides = [base + name for name, style in styles.items() if style in UNSPLIT_SIDE_STYLES]
    return TensorParallelPlan(columns, tuple(rows), tuple(sides), base + list(order)[-1])


def _parent(name: str) -> str:
    """Return the module that needs all tokens if ``name`` is split; for experts, their mixture."""
    return name.rpartition(".")[0].removesuffix(".experts")


def expand(model: nn.Module, pattern: str) -> list[str]:
    """List the modules and parameters of ``model`` that match ``pattern``, in model order."""
    names = [name for name, _ in model.named_modules()]
    names += [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return [name for name in names if _matches(name, pattern)]


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(
        want == part or (want == "*" and part.isdigit())
        for part, want in zip(parts, wanted, strict=True)
    )
