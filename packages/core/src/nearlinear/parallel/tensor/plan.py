"""Which modules of a model are split how: what Hugging Face models say of themselves, and GPT-2.

Names are patterns in which ``*`` stands for a block's number. ``base_model_tp_plan`` of a model's
config calls layers column- and row-parallel; where tokens must be whole follows from it: in the
module that holds both, attention or MLP.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from ...errors import ConfigError

COLUMNS = {"colwise": 1, "colwise_gather_output": 1, "packed_colwise": 2}
"""by outputs, and of how many fused ones: packed are gate and up projection in one parameter"""
ROWS = ("rowwise", "rowwise_split_input")
WHOLE = ("colwise_gather_output", "rowwise_split_input")
UNSPLIT = ("replicated_with_grad_allreduce", "moe_tp_experts")


@dataclass(frozen=True)
class Plan:
    """How to split one model."""

    columns: dict[str, int]
    """modules or stacked parameters that are split by outputs, and of how many fused ones each"""
    rows: tuple[str, ...]
    """modules or stacked parameters that are split by inputs: what comes out are parts of sums"""
    whole: tuple[str, ...]
    """of those the ones whose split side is whole for the modules around them"""
    norm: str
    """the last norm, after which the head needs all tokens"""
    widths: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """attributes that hold a width, by module: they become the rank's"""

    @property
    def regions(self) -> tuple[str, ...]:
        """Modules that compute with all tokens and a part of every matrix."""
        holders = {_holder(name) for name in self.columns} & {_holder(name) for name in self.rows}
        return tuple(sorted(holders))


GPT2 = Plan(
    columns={"transformer.h.*.attn.c_attn": 3, "transformer.h.*.mlp.c_fc": 1},
    rows=("transformer.h.*.attn.c_proj", "transformer.h.*.mlp.c_proj"),
    whole=(),
    norm="transformer.ln_f",
    widths={
        "transformer.h.*.attn": ("split_size",),
        "transformer.h.*.attn.c_attn": ("nf",),
        "transformer.h.*.mlp.c_fc": ("nf",),
    },
)


def plan_of(model: nn.Module) -> Plan:
    """The plan for ``model``. Raises ConfigError for a model that has none."""
    config = getattr(model, "config", None)
    if getattr(config, "model_type", None) == "gpt2":
        return GPT2
    said = getattr(config, "base_model_tp_plan", None)
    order = getattr(config, "base_model_pp_plan", None)
    if not said or not order:
        raise ConfigError(
            f"tensor_parallel_degree > 1: {type(model).__name__} says not how it can be split (no "
            "base_model_tp_plan and base_model_pp_plan in its config): set "
            "tensor_parallel_degree = 1 and raise hybrid_shard_degree, or use a Llama, Mistral, "
            "Mixtral, Qwen, GPT-NeoX or GPT-2"
        )
    base = f"{model.base_model_prefix}." if model.base_model is not model else ""
    columns, rows = {}, []
    for name, how in said.items():
        if how in COLUMNS:
            columns[base + name] = COLUMNS[how]
        elif how in ROWS:
            rows.append(base + name)
        elif how not in UNSPLIT:
            raise ConfigError(
                f"tensor_parallel_degree > 1: {type(model).__name__} wants {name} split as "
                f"{how!r}, which nearlinear does not do: set tensor_parallel_degree = 1 and raise "
                "hybrid_shard_degree"
            )
    whole = tuple(base + name for name, how in said.items() if how in WHOLE)
    return Plan(columns, tuple(rows), whole, base + list(order)[-1])


def _holder(name: str) -> str:
    """The module that needs all tokens where ``name`` is split: of experts, their router's too."""
    return name.rpartition(".")[0].removesuffix(".experts")


def expand(model: nn.Module, pattern: str) -> list[str]:
    """The names of ``model``'s modules and parameters that ``pattern`` fits, in their order."""
    names = [name for name, _ in model.named_modules()]
    names += [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return [name for name in names if _fits(name, pattern)]


def _fits(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(
        want == part or (want == "*" and part.isdigit())
        for part, want in zip(parts, wanted, strict=True)
    )
