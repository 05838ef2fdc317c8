"""Tensor-parallel plans derived from the structure of a model's blocks.

For models whose blocks are more than norms, attention and MLP, or whose config has no plan. Hidden
states stay whole on every rank (Megatron-LM without sequence parallelism), so that any operation
between the split layers computes as in one process. Every layer falls in one of these cases:

- Attention with separate projections, multi-head latent attention and the fused projections of
  `FUSED_PROJECTIONS` are split by heads.
- MLPs, a layer or two into a width and one out of it, are split by that width.
- Stacked experts are split as the config's plan says.
- Any other linear layer is split by outputs, which are all-gathered.
- Everything else is computed by every rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..errors import ConfigError
from ..fsdp.model_state import HuggingFaceModel, find_blocks
from .plan import TensorParallelPlan, is_linear, matching_style

QUERIES, KEYS, VALUES = ("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value")
OUTPUTS = ("o_proj", "out_proj", "dense")
HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
KEY_HEAD_COUNTS = ("num_key_value_heads", "num_kv_heads")
HEAD_SIZES = ("head_dim", "attention_head_size", "head_size")
WIDTHS = ("hidden_size", "embed_dim", "all_head_size", "split_size", "d_model", "inner_dim")
"""Attributes that a module may use as the width of all heads together."""
FUSED_PROJECTIONS = {
    "bloom": ("query_key_value", 1, "dense"),
    "falcon": ("query_key_value", 1, "dense"),
    "mpt": ("Wqkv", 3, "out_proj"),
    "gpt_bigcode": ("c_attn", 1, "c_proj"),
}
"""By ``model_type``: the projection to queries, keys and values; 1 if heads come first and 3 if the
three come first; the projection of the outputs."""
STACKED_EXPERTS = {"gpt_oss": "rowwise"}
"""Styles of stacked experts by ``model_type``, for configs without a plan. GPT-OSS stores them as
(experts, inputs, outputs) and interleaves gates with the rest."""
SMALLEST_SHARE = 0.5
"""Least share of the blocks' parameters that a plan must split."""


def derive_plan(model: HuggingFaceModel, degree: int) -> TensorParallelPlan:
    """Derive the plan of ``model`` for ``degree`` ranks. Raises ConfigError."""
    _check_dropout(model)
    plan = _Plan(model, degree)
    for block in find_blocks(model):
        for module in block.modules():
            plan.add(module)
    plan.check_share()
    return TensorParallelPlan(
        columns=plan.columns,
        rows=tuple(plan.rows),
        unsplit_side=tuple(plan.unsplit_side),
        norm="",
        widths=plan.widths,
        whole_states=True,
        summed=tuple(plan.summed),
        transposed=frozenset(plan.transposed),
        by_heads=plan.by_heads,
        shared_biases=tuple(plan.shared_biases),
    )


def _check_dropout(model: HuggingFaceModel) -> None:
    """Check that ranks, which draw different random numbers, compute equal hidden states."""
    for name, value in _values(model.config.to_dict()):
        random = "drop" in name or "jitter" in name
        used = not any(word in name for word in ("attention", "attn", "classifier", "summary"))
        if random and used and isinstance(value, float) and value > 0:
            raise ConfigError(
                f"tensor_parallel_degree > 1 with {name} = {value}: tensor ranks compute whole "
                f"hidden states of {type(model).__name__} and would draw different masks. Set it "
                "to 0, or set tensor_parallel_degree = 1 and raise hybrid_shard_degree."
            )


def _values(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a config and of the configs in it."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _values(value)
        else:
            yield str(name), value


class _Plan:
    """A plan under construction, by names of modules and parameters."""

    def __init__(self, model: HuggingFaceModel, degree: int):
        self.model, self.degree = model, degree
        self.names = {module: name for name, module in model.named_modules()}
        self.model_type = getattr(model.config, "model_type", "")
        self.columns: dict[str, int] = {}
        self.rows: list[str] = []
        self.unsplit_side: list[str] = []
        self.widths: dict[str, tuple[str, ...]] = {}
        self.summed: list[str] = []
        self.transposed: list[str] = []
        self.by_heads: dict[str, int] = {}
        self.shared_biases: list[str] = []
        self.split = 0

    def add(self, module: nn.Module) -> None:
        """Add the layers that ``module`` holds itself."""
        linear = {
            name: child
            for name, child in module.named_children()
            if is_linear(child) and not _reads_weight(module, name)
        }
        if self._add_experts(module):
            return
        done = (
            self._add_attention(module, linear)
            or self._add_latent_attention(module, linear)
            or self._add_fused_attention(module, linear)
            or self._add_mlp(module, linear)
        )
        if not done:
            for name, child in linear.items():
                if child.out_features % self.degree == 0 and name not in ("gate", "router"):
                    self._columns(module, name, gathered=True)

    def check_share(self) -> None:
        """Raise ConfigError if hardly anything is split."""
        total = sum(p.numel() for block in find_blocks(self.model) for p in block.parameters())
        if self.split < SMALLEST_SHARE * total:
            raise ConfigError(
                f"tensor_parallel_degree = {self.degree}: only {self.split / total:.0%} of the "
                f"parameters in the blocks of {type(self.model).__name__} can be split. Set "
                "tensor_parallel_degree = 1 and raise hybrid_shard_degree."
            )

    def _name(self, module: nn.Module, child: str) -> str:
        return f"{self.names[module]}.{child}"

    def _columns(self, module: nn.Module, name: str, parts: int = 1, gathered=False) -> None:
        self.columns[self._name(module, name)] = parts
        self.split += module.get_parameter(f"{name}.weight").numel()
        if gathered:
            self.unsplit_side.append(self._name(module, name))

    def _row(self, module: nn.Module, name: str) -> None:
        self.rows.append(self._name(module, name))
        self.split += module.get_parameter(f"{name}.weight").numel()

    def _add_experts(self, module: nn.Module) -> bool:
        """Split stacked experts as the config's plan or `STACKED_EXPERTS` says."""
        stacked = dict(module.named_parameters(recurse=False))
        outs = [name for name in ("gate_up_proj", "up_proj") if name in stacked]
        if len(outs) != 1 or "down_proj" not in stacked or stacked["down_proj"].dim() != 3:
            return False
        out, biases = outs[0], {f"{outs[0]}_bias", "down_proj_bias"} & set(stacked)
        style = STACKED_EXPERTS.get(self.model_type) or matching_style(
            self.model, self._name(module, out)
        )
        more = any(isinstance(part, nn.Identity) for part in module.modules())
        if style is None or more or set(stacked) != {out, "down_proj", *biases}:
            return True  # experts that copy their input would be counted by every rank
        transposed, parts = style.endswith("rowwise"), 2 if "packed" in style else 1
        width = stacked["down_proj"].shape[1 if transposed else 2]
        outputs = stacked[out].shape[2 if transposed else 1]
        if width % self.degree or outputs not in (width * 2, width):
            return True
        self.columns[self._name(module, out)] = parts
        self.rows.append(self._name(module, "down_proj"))
        if transposed:
            self.transposed += [self._name(module, out), self._name(module, "down_proj")]
        if f"{out}_bias" in biases:
            self.columns[self._name(module, f"{out}_bias")] = parts
        if "down_proj_bias" in biases:
            self.shared_biases.append(self._name(module, "down_proj_bias"))
        self.summed.append(self.names[module])
        self.split += stacked[out].numel() + stacked["down_proj"].numel()
        return True

    def _add_mlp(self, module: nn.Module, linear: dict[str, nn.Linear]) -> bool:
        """Split one or two layers into a width, and one out of it."""
        if set(linear) != {"fc1", "fc2"}:  # layers of the block itself in OPT
            whole = [name for name, child in module.named_children() if _has_parameters(child)]
            if set(whole) - set(linear) - {"act_fn", "act"} or _own_parameters(module):
                return False
        if len(linear) not in (2, 3):
            return False
        for last, out in linear.items():
            others = {name: child for name, child in linear.items() if name != last}
            is_out = any(
                part in last for part in ("down", "fc2", "c_proj", "4h_to_h", "fc_out", "w2")
            )
            fits = all(child.out_features == out.in_features for child in others.values())
            if is_out and fits and out.in_features % self.degree == 0:
                for name in others:
                    self._columns(module, name)
                self._row(module, last)
                return True
        return False

    def _add_attention(self, module: nn.Module, linear: dict[str, nn.Linear]) -> bool:
        """Split queries, keys and values by heads, and the output by its inputs."""
        q, k, v = (_one_of(linear, names) for names in (QUERIES, KEYS, VALUES))
        out = _one_of(linear, OUTPUTS)
        if q is None or out is None or (k is None) != (v is None and k is None):
            return False
        gates = [
            name
            for name in linear
            if name not in (q, k, v, out)
            and matching_style(self.model, self._name(module, name)) == "colwise"
        ]
        if set(linear) - {q, k, v, out, *gates} or _uses_widths(module):
            return False
        size = _first_attribute(module, HEAD_SIZES)
        heads = _first_attribute(module, HEAD_COUNTS)
        if size is None and heads is not None:
            size = linear[q].out_features // heads
        if size is None or linear[q].out_features % size:
            return False
        heads = linear[q].out_features // size
        key_heads = heads if k is None else linear[k].out_features // size
        per_head = [linear[name].out_features for name in gates]
        if heads % self.degree or key_heads % self.degree or key_heads == 0:
            return False
        if linear[out].in_features % heads or any(each % heads for each in per_head):
            return False
        value_size = linear[out].in_features // heads
        if not self._only_per_head(module, linear, {size, value_size}, heads):
            return False
        for name in (q, k, v, *gates):
            if name is not None:
                self._columns(module, name)
        self._row(module, out)
        self._divide(module)
        return True

    def _only_per_head(self, module: nn.Module, linear, sizes: set[int], heads: int) -> bool:
        """Check that other parameters act on one head at a time; split those with one per head."""
        for name, parameter in module.named_parameters():
            child = name.partition(".")[0]
            if child in linear:
                continue
            if name == "sinks" and tuple(parameter.shape) == (heads,):
                self.by_heads[self._name(module, name)] = heads
            elif name.count(".") != 1 or parameter.dim() != 1 or len(parameter) not in sizes:
                return False
        return True

    def _add_latent_attention(self, module: nn.Module, linear: dict[str, nn.Linear]) -> bool:
        """Split multi-head latent attention (DeepSeek-V2); the latent states are whole."""
        heads = _first_attribute(module, HEAD_COUNTS)
        q = _one_of(linear, ("q_b_proj", "q_proj"))
        known = {q, "q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
        needed = {"kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
        if heads is None or q is None or set(linear) - known or not needed <= set(linear):
            return False
        norms = {"q_a_layernorm", "kv_a_layernorm", "q_a_norm", "kv_a_norm"}
        others = {n.partition(".")[0] for n, _ in module.named_parameters()} - set(linear) - norms
        widths = linear[q].out_features, linear["kv_b_proj"].out_features
        widths += (linear["o_proj"].in_features,)
        if others or heads % self.degree or any(width % heads for width in widths):
            return False
        self._columns(module, q)
        self._columns(module, "kv_b_proj")
        self._row(module, "o_proj")
        self._divide(module)
        return True

    def _add_fused_attention(self, module: nn.Module, linear: dict[str, nn.Linear]) -> bool:
        fused, parts, out = FUSED_PROJECTIONS.get(self.model_type, ("", 1, ""))
        heads = _first_attribute(module, HEAD_COUNTS)
        if set(linear) != {fused, out} or heads is None or not self._one_group_per_head(module):
            return False
        key_heads = getattr(module, "num_kv_heads", heads)
        key_heads = key_heads if isinstance(key_heads, int) else heads
        if heads % self.degree or key_heads % self.degree:
            return False
        others = {name.partition(".")[0] for name, _ in module.named_parameters()}
        if others - set(linear):
            return False
        self._columns(module, fused, parts)
        self._row(module, out)
        self._divide(module)
        self.by_heads[self.names[module]] = heads
        return True

    def _one_group_per_head(self, module: nn.Module) -> bool:
        """Return whether every head, or group of heads, has its own keys and values."""
        config = self.model.config
        if self.model_type == "falcon":
            return config.new_decoder_architecture or not config.multi_query
        return not getattr(module, "multi_query", False)

    def _divide(self, module: nn.Module) -> None:
        counts = [name for name in (*HEAD_COUNTS, *KEY_HEAD_COUNTS)
                  if isinstance(getattr(module, name, None), int)]  # fmt: skip
        if self.model_type == "gpt_bigcode":
            counts += ["embed_dim", "kv_heads", "kv_dim", "split_size"]
        if self.model_type == "falcon":
            counts += ["hidden_size", "split_size"]
        if self.model_type == "bloom":
            counts += ["hidden_size", "split_size"]
        self.widths[self.names[module]] = tuple(
            name for name in dict.fromkeys(counts) if isinstance(getattr(module, name, None), int)
        )


def _one_of(linear: dict[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in linear), None)


def _first_attribute(module: nn.Module, names: tuple[str, ...]) -> int | None:
    found = (getattr(module, name, None) for name in names)
    return next((value for value in found if isinstance(value, int)), None)


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _own_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def _methods(module: nn.Module) -> str:
    """Return the source of the methods of a module's class except for its constructor."""
    members = vars(type(module)).items()
    functions = [f for name, f in members if inspect.isfunction(f) and name != "__init__"]
    return "\n".join(inspect.getsource(inspect.unwrap(function)) for function in functions)


def _reads_weight(module: nn.Module, child: str) -> bool:
    """Return whether the module uses the weight of a child without calling it."""
    return f"self.{child}.weight" in _methods(module)


def _uses_widths(module: nn.Module) -> bool:
    source = _methods(module)
    return any(f"self.{name}" in source for name in WIDTHS)
