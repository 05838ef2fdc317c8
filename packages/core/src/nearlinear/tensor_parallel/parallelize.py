"""Split a Hugging Face causal language model over the tensor ranks, in place.

Source: Megatron-LM (Shoeybi et al. 2019, section 3) with sequence parallelism, see
`modules.TokenRows`. The first matrix of each pair is split by columns and the second by rows, so
that one all-gather before and one reduce-scatter after them suffice. Attention is split by heads,
embeddings and head by vocabulary.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from torch import nn

from ..config.parallel import divisors
from ..distributed.collectives import all_reduce_grad, sum_over_ranks
from ..distributed.mesh import Mesh
from ..distributed.runtime import Runtime
from ..errors import ConfigError
from ..fsdp.forward_transforms import forward_transforms
from ..fsdp.model_state import HuggingFaceModel, find_blocks, model_state, split_evenly
from . import modules
from .loss import install_loss
from .modules import TokenRows
from .plan import SHARED_EXPERTS, TensorParallelPlan, expand, find_plan, is_linear
from .structure import derive_plan

log = logging.getLogger(__name__)

KEY = "tensor_parallel_degree"
HEAD_BIASES = ("alibi", "position_bias", "attention_mask")
_REMEDY = f"set {KEY} = 1 and raise hybrid_shard_degree"


def check_model(model: HuggingFaceModel, plan: TensorParallelPlan | None, mesh: Mesh) -> None:
    """Raise ConfigError if ``model`` cannot be split over ``mesh.tensor`` ranks.

    Without ``plan``, only what every plan needs is checked.
    """
    config, degree = model.config, mesh.tensor
    if model.get_output_embeddings() is None:
        raise ConfigError(
            f"{KEY} > 1: {type(model).__name__} has no language model head. Set {KEY} = 1, or use "
            "the causal language model."
        )
    if getattr(config, "is_encoder_decoder", False) or not _has_causal_loss(model):
        raise ConfigError(
            f"{KEY} > 1: {type(model).__name__} is not a causal language model, whose loss can be "
            f"computed from a divided vocabulary. Set {KEY} = 1."
        )
    if plan is not None and not plan.whole_states:
        _check_regions(model, plan)
        for name in ("num_attention_heads", "num_key_value_heads"):
            count = getattr(config, name, None)
            if isinstance(count, int):
                _check_divides(degree, count, name)
    if getattr(config, "router_jitter_noise", 0.0):
        raise ConfigError(
            f"router_jitter_noise = {config.router_jitter_noise} with {KEY} > 1: tensor ranks "
            "route the same tokens and would draw different noise. Set it to 0."
        )
    for pattern, parts in ({} if plan is None else plan.columns).items():
        for name in expand(model, pattern):
            width = _outputs(model, name, pattern in plan.transposed) if plan else 0
            _check_divides(degree, width // parts, f"the width of {name}")
    for name, module in model.named_modules():
        if getattr(module, "activation_sparsity", 0.0):
            raise ConfigError(
                f"{KEY} > 1: {name} of {type(model).__name__} keeps the largest activations only, "
                f"by statistics over columns of which every rank has a part; {_REMEDY}."
            )
    vocabulary = model.get_input_embeddings().weight.shape[0]
    if model.get_output_embeddings().weight.shape[0] != vocabulary:
        raise ConfigError(
            "tensor_parallel_degree > 1: the embedding and the head of the model have vocabularies "
            "of different sizes. Call model.resize_token_embeddings."
        )
    if degree > vocabulary:
        raise ConfigError(
            f"{KEY} = {degree} is larger than the vocabulary, {vocabulary}. Lower it."
        )
    _check_modules(model, plan)


def _has_causal_loss(model: HuggingFaceModel) -> bool:
    """Return whether transformers gives ``model`` the loss of causal language models."""
    from transformers.loss import loss_utils

    causal = loss_utils.ForCausalLMLoss
    return loss_utils.LOSS_MAPPING.get(str(getattr(model, "loss_type", "")), causal) is causal


def choose_plan(model: HuggingFaceModel, mesh: Mesh) -> TensorParallelPlan:
    """Return the config's plan of ``model``, or one derived from its structure.

    The first is preferred, since it splits hidden states too. Raises ConfigError.
    """
    plan = None
    try:
        plan = find_plan(model)
        _check_regions(model, plan)
    except ConfigError:
        if not hasattr(model, "get_output_embeddings"):
            raise
        plan = None
    if plan is None:
        check_model(model, None, mesh)
        plan = derive_plan(model, mesh.tensor)
    check_model(model, plan, mesh)
    return plan


def warn_inefficient(mesh: Mesh) -> None:
    """Log a warning for degrees that are supported but slow.

    Tensor ranks communicate several times per layer and belong on one node; kernels prefer powers
    of two. Source: the SMP documentation.
    """
    degree, nodes = mesh.tensor, mesh.nodes_spanned("tensor")
    if degree & (degree - 1):
        log.warning(
            "%s = %d is not a power of two: kernels are slow with the resulting matrix widths. "
            "Use %d or %d.",
            KEY, degree, 1 << degree.bit_length() - 1, 1 << degree.bit_length(),
        )  # fmt: skip
    if nodes > 1:
        log.warning(
            "%s = %d spreads tensor ranks over %d nodes: they communicate four times per layer, "
            "over the network. Use at most %d, and raise hybrid_shard_degree or "
            "pipeline_parallel_degree instead.",
            KEY, degree, nodes, mesh.ranks_per_node,
        )  # fmt: skip


def _check_regions(model: HuggingFaceModel, plan: TensorParallelPlan) -> None:
    """Check the modules between regions, which see only a rank's rows of tokens: norms only."""
    if not expand(model, plan.norm):
        raise ConfigError(
            f"{KEY} > 1: {type(model).__name__} has no module {plan.norm}; {_REMEDY}."
        )
    regions = [name for pattern in plan.regions for name in expand(model, pattern)]
    names = {module: name for name, module in model.named_modules()}
    columns = [name for pattern in plan.columns for name in expand(model, pattern)]
    rows = [name for pattern in plan.rows for name in expand(model, pattern)]
    for name in regions:
        inside = f"{name}."
        if any(name.startswith(f"{other}.") for other in regions):
            raise ConfigError(f"{KEY} > 1: {name} is split inside another split module; {_REMEDY}.")
        for kind in (columns, rows):
            if not any(part.startswith(inside) for part in kind):
                raise ConfigError(
                    f"{KEY} > 1: the plan of {type(model).__name__} splits modules like {name}, "
                    f"but nothing in that one; {_REMEDY}."
                )
        if any(part.startswith(f"{inside}experts") for part in rows):
            _check_mixture(model, name)
    for block in find_blocks(model):
        for child in block.children():
            norm = "norm" in type(child).__name__.lower()
            if not norm and names[child] not in regions and any(True for _ in child.parameters()):
                raise ConfigError(
                    f"{KEY} > 1: the plan of {type(model).__name__} does not split "
                    f"{names[child]}, a {type(child).__name__}, which needs all tokens; {_REMEDY}."
                )


def _check_mixture(model: HuggingFaceModel, name: str) -> None:
    """Check that only experts contribute to the output of a mixture, which is summed over ranks."""
    for child_name, child in model.get_submodule(name).named_children():
        whole = child_name not in (
            "experts",
            "gate",
            "router",
            "shared_expert_gate",
            *SHARED_EXPERTS,
        )
        if whole and any(True for _ in child.parameters()):
            raise ConfigError(
                f"{KEY} > 1: {name}.{child_name} is replicated beside the experts, and the sum "
                f"over ranks would count it several times; {_REMEDY}."
            )


def _check_divides(degree: int, count: int, name: str) -> None:
    if count % degree:
        raise ConfigError(
            f"{KEY} = {degree} does not divide {name}, {count}: allowed are {divisors(count)}"
        )


def _outputs(model: HuggingFaceModel, name: str, transposed: bool) -> int:
    parent, _, last = name.rpartition(".")
    parameter = model.get_submodule(parent)._parameters.get(last)
    if parameter is not None:
        return parameter.shape[2 if transposed else 1]
    module = model.get_submodule(name)
    return module.weight.shape[0 if isinstance(module, nn.Linear) else 1]


def _check_modules(model: HuggingFaceModel, plan: TensorParallelPlan | None) -> None:
    """Raise ConfigError for modules whose ``forward`` is not a known one that can be replaced."""
    from transformers.pytorch_utils import Conv1D

    known = (nn.Linear, Conv1D)
    patterns = () if plan is None else (*plan.columns, *plan.rows)
    split = [name for pattern in patterns for name in expand(model, pattern)]
    wanted: dict[str, tuple[type, ...]] = {
        name: known for name in split if name in dict(model.named_modules())
    }
    names = {module: name for name, module in model.named_modules()}
    embedding = model.get_input_embeddings()
    if not isinstance(embedding, nn.Embedding):
        wanted[names[embedding]] = (nn.Embedding,)
    wanted[names[model.get_output_embeddings()]] = (nn.Linear,)
    for name, classes in wanted.items():
        module = model.get_submodule(name)
        found = type(module)
        if found not in classes and not (nn.Linear in classes and is_linear(module)):
            raise ConfigError(
                f"{KEY} > 1: {name} of {type(model).__name__} is a {found.__name__}, which cannot "
                f"be split; {_REMEDY}."
            )


def apply_tensor_parallel(model: HuggingFaceModel, now: Runtime) -> None:
    """Split the parameters of ``model`` and connect its modules. Raises ConfigError."""
    plan = choose_plan(model, now.mesh)
    if now.rank == 0:
        warn_inefficient(now.mesh)
    rows = TokenRows(now.group("tensor"))
    for pattern, parts in plan.columns.items():
        for name in expand(model, pattern):
            _split_columns(model, name, parts, rows, pattern in plan.transposed)
            if pattern in plan.unsplit_side:
                module = model.get_submodule(name)
                module.forward = modules.GatheredColumnLinear(module, rows)
    for pattern in plan.rows:
        for name in expand(model, pattern):
            _split_rows(model, name, rows, plan, pattern)
    for pattern, attributes in plan.widths.items():
        for name in expand(model, pattern):
            for attribute in attributes:
                module = model.get_submodule(name)
                setattr(module, attribute, getattr(module, attribute) // rows.ranks)
    first = _split_vocabulary(model, rows, plan.whole_states)
    if plan.whole_states:
        _sum_outputs(model, plan, rows)
    else:
        _connect(model, plan, rows)
    forward_transforms(model).before.append(_before_model(model.config, rows))
    install_loss(model, now, first)
    state = model_state(model)
    state.layout.axes.add("tensor")
    state.extensions.append(modules.TensorParallel(rows, plan.whole_states))


def _split_parameter(
    model: HuggingFaceModel, name: str, dim: int, rows: TokenRows, parts: int = 1
) -> None:
    size = model.get_parameter(name).shape[dim]
    split = split_evenly("tensor", dim, size, rows.rank, rows.ranks, parts)
    model_state(model).layout.split_parameter(model, name, split)


def _split_columns(
    model: HuggingFaceModel, name: str, parts: int, rows: TokenRows, transposed: bool
) -> None:
    if _is_parameter(model, name):  # stacked experts: (experts, outputs, inputs)
        is_bias = model.get_parameter(name).dim() == 2
        _split_parameter(model, name, 2 if transposed and not is_bias else 1, rows, parts)
        return
    module = model.get_submodule(name)
    outputs = 0 if isinstance(module, nn.Linear) else 1
    _split_parameter(model, f"{name}.weight", outputs, rows, parts)
    if module.bias is not None:
        _split_parameter(model, f"{name}.bias", 0, rows, parts)
    if isinstance(module, nn.Linear):
        module.out_features //= rows.ranks


def _split_rows(
    model: HuggingFaceModel, name: str, rows: TokenRows, plan: TensorParallelPlan, pattern: str
) -> None:
    if _is_parameter(model, name):
        _split_parameter(model, name, 1 if pattern in plan.transposed else 2, rows)
        return
    module: Any = model.get_submodule(name)
    if isinstance(module, nn.Linear):
        _split_parameter(model, f"{name}.weight", 1, rows)
        module.in_features //= rows.ranks
        output = "whole" if plan.whole_states else "rows"
        if not plan.whole_states and name.split(".")[-2] in SHARED_EXPERTS:
            output = "partial"  # the mixture's output is summed
        split_inputs = pattern in plan.unsplit_side
        forward = modules.RowParallelLinear(module, rows, split_inputs, output)
    else:
        _split_parameter(model, f"{name}.weight", 0, rows)
        module.nx //= rows.ranks
        forward = modules.RowParallelConv1D(module, rows)
    setattr(module, "forward", forward)  # noqa: B010 - pyright knows forward as a method


def _split_vocabulary(model: HuggingFaceModel, rows: TokenRows, whole_states: bool) -> int:
    """Split the embedding and the head; return the id of this rank's first logit."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {module: name for name, module in model.named_modules()}
    vocabulary = embedding.weight.shape[0]
    pieces = [
        split_evenly("tensor", 0, vocabulary, r, rows.ranks).ranges[0] for r in range(rows.ranks)
    ]
    tied = head.weight is embedding.weight
    _split_parameter(model, f"{names[embedding]}.weight", 0, rows)
    if not tied:
        _split_parameter(model, f"{names[head]}.weight", 0, rows)
    if head.bias is not None:
        _split_parameter(model, f"{names[head]}.bias", 0, rows)
    counts = [count for _, count in pieces]
    embedding.forward = modules.VocabularyParallelEmbedding(
        embedding, rows, pieces[rows.rank][0], whole_states
    )
    head.forward = modules.VocabularyParallelHead(head, rows, counts)
    return pieces[rows.rank][0]


def _is_parameter(model: HuggingFaceModel, name: str) -> bool:
    parent, _, last = name.rpartition(".")
    return last in model.get_submodule(parent)._parameters


def _connect(model: HuggingFaceModel, plan: TensorParallelPlan, rows: TokenRows) -> None:
    """Register hooks: take this rank's rows before the first block, gather rows in regions."""
    first = find_blocks(model)[0]
    first.register_forward_pre_hook(_on_hidden_states(rows.take), with_kwargs=True)
    split = [name for pattern in plan.rows for name in expand(model, pattern)]
    stacked = [name for name in split if _is_parameter(model, name)]
    for pattern in plan.regions:
        for name in expand(model, pattern):
            region = model.get_submodule(name)
            region.register_forward_pre_hook(_on_hidden_states(rows.gather), with_kwargs=True)
            if any(part.startswith(f"{name}.") for part in stacked):  # no split module comes last
                region.register_forward_hook(lambda _, args, output: rows.sum(output))
    norm = model.get_submodule(plan.norm)
    norm.register_forward_hook(lambda _, args, output: rows.gather(output))


def _sum_outputs(model: HuggingFaceModel, plan: TensorParallelPlan, rows: TokenRows) -> None:
    """Sum the outputs of experts over the ranks, and take this rank's heads of biases."""
    for name in plan.summed:
        model.get_submodule(name).register_forward_hook(
            lambda _, args, output: sum_over_ranks(output, rows.group)
        )
    for name in plan.shared_biases:
        module, _, bias = name.rpartition(".")
        experts: Any = model.get_submodule(module)
        experts.forward = modules.SharedBias(experts, bias, rows)
    for name, heads in plan.by_heads.items():
        if _is_parameter(model, name):
            _split_parameter(model, name, 0, rows)
        else:
            hook = _on_head_bias(heads, rows)
            model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)


def _on_head_bias(heads: int, rows: TokenRows):
    """Build a pre-forward hook that takes this rank's heads of (heads or B x heads, ...) biases."""

    def take(name: str, bias: Any) -> Any:
        if name not in HEAD_BIASES or not isinstance(bias, torch.Tensor):
            return bias
        if bias.dim() == 4:  # (B, heads or 1, Q, S)
            return bias.chunk(rows.ranks, 1)[rows.rank] if bias.shape[1] == heads else bias
        if name == "attention_mask":
            return bias
        by_head = bias.unflatten(0, (-1, heads))
        return by_head.chunk(rows.ranks, 1)[rows.rank].flatten(0, 1)

    def hook(module, args, kwargs):
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        args = tuple(take(name, value) for name, value in zip(names, args, strict=False))
        return args, {name: take(name, value) for name, value in kwargs.items()}

    return hook


def _on_hidden_states(change):
    """Build a pre-forward hook that changes the hidden states, the first argument of a module."""

    def hook(module, args, kwargs):
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": change(kwargs["hidden_states"])}

    return hook


def _before_model(config, rows: TokenRows):
    """Build a transform of the model's arguments; without labels, all logits are gathered."""

    def before(given: dict) -> dict:
        for name in ("output_hidden_states", "output_attentions"):
            asked = given.get(name)
            if getattr(config, name, False) if asked is None else asked:
                raise ConfigError(
                    f"{name} = True with tensor_parallel_degree > 1: every rank has only a part of "
                    "them. Leave it out, or run the model without tensor parallelism."
                )
        if given.get("output_router_logits") and not config.output_router_logits:
            raise ConfigError(
                "output_router_logits = True as an argument with tensor_parallel_degree > 1: set "
                "it in the model's config before nl.transform, which then adds the loss once."
            )
        rows.gathers_logits = not isinstance(given.get("labels"), torch.Tensor)
        if isinstance(given.get("inputs_embeds"), torch.Tensor):
            given = given | {"inputs_embeds": all_reduce_grad(given["inputs_embeds"], rows.group)}
        return given

    return before
