"""Split a Hugging Face causal language model over the tensor ranks, in place.

Source: Megatron-LM (Shoeybi et al. 2019, section 3) with sequence parallelism (see `rows`): of each
pair of matrices the first is split by columns and the second by rows, so that one gather before and
one reduce-scatter behind them are all that travels; attention is split by heads, embeddings and
head by vocabulary.
"""

from __future__ import annotations

import torch
from torch import nn

from ...errors import ConfigError
from ...runtime import Runtime
from .. import layout, loss
from ..around import around
from ..blocks import find_blocks
from ..exchange import summed_back
from ..layout import even
from . import modules
from .degree import advise, check
from .plan import Plan, expand, plan_of
from .rows import Rows


def apply(model: nn.Module, now: Runtime) -> None:
    """Cut the parameters of ``model`` and have its modules work together. Raises ConfigError."""
    plan = plan_of(model)
    check(model, plan, now.mesh)
    if now.rank == 0:
        advise(now.mesh)
    rows = Rows(now.group("tensor"))
    for pattern, parts in plan.columns.items():
        for name in expand(model, pattern):
            _split_columns(model, name, parts, rows)
            if pattern in plan.whole:
                module = model.get_submodule(name)
                module.__class__, module.rows = modules.GatheredColumnLinear, rows
    for pattern in plan.rows:
        for name in expand(model, pattern):
            _split_rows(model, name, rows)
            if pattern in plan.whole:
                model.get_submodule(name).takes_all = True
    for pattern, attributes in plan.widths.items():
        for name in expand(model, pattern):
            for attribute in attributes:
                module = model.get_submodule(name)
                setattr(module, attribute, getattr(module, attribute) // rows.ranks)
    first = _split_vocabulary(model, rows)
    _connect(model, plan, rows)
    loss.install(model, now, first)
    layout.of(model).axes.add("tensor")


def _cut(model: nn.Module, name: str, dim: int, rows: Rows, parts: int = 1) -> None:
    size = model.get_parameter(name).shape[dim]
    layout.of(model).cut(model, name, even("tensor", dim, size, rows.rank, rows.ranks, parts))


def _split_columns(model: nn.Module, name: str, parts: int, rows: Rows) -> None:
    if _is_parameter(model, name):  # stacked experts: (experts, outputs, inputs)
        _cut(model, name, 1, rows, parts)
        return
    module = model.get_submodule(name)
    outputs = 0 if isinstance(module, nn.Linear) else 1
    _cut(model, f"{name}.weight", outputs, rows, parts)
    if module.bias is not None:
        _cut(model, f"{name}.bias", 0, rows, parts)
    if isinstance(module, nn.Linear):
        module.out_features //= rows.ranks


def _split_rows(model: nn.Module, name: str, rows: Rows) -> None:
    if _is_parameter(model, name):
        _cut(model, name, 2, rows)
        return
    module = model.get_submodule(name)
    if isinstance(module, nn.Linear):
        _cut(model, f"{name}.weight", 1, rows)
        module.in_features //= rows.ranks
        module.__class__ = modules.RowParallelLinear
    else:
        _cut(model, f"{name}.weight", 0, rows)
        module.nx //= rows.ranks
        module.__class__ = modules.row_parallel_conv1d()
    module.rows = rows


def _split_vocabulary(model: nn.Module, rows: Rows) -> int:
    """Split embeddings and head; the id of this rank's first logit."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {module: name for name, module in model.named_modules()}
    vocabulary = embedding.weight.shape[0]
    pieces = [even("tensor", 0, vocabulary, r, rows.ranks).mine[0] for r in range(rows.ranks)]
    tied = head.weight is embedding.weight
    _cut(model, f"{names[embedding]}.weight", 0, rows)
    if not tied:
        _cut(model, f"{names[head]}.weight", 0, rows)
    if head.bias is not None:
        _cut(model, f"{names[head]}.bias", 0, rows)
    embedding.__class__ = modules.VocabularyParallelEmbedding
    head.__class__ = modules.VocabularyParallelHead
    embedding.rows = head.rows = rows
    embedding.first = pieces[rows.rank][0]
    head.counts = [count for _, count in pieces]
    return pieces[rows.rank][0]


def _is_parameter(model: nn.Module, name: str) -> bool:
    holder, _, last = name.rpartition(".")
    return last in model.get_submodule(holder)._parameters


def _connect(model: nn.Module, plan: Plan, rows: Rows) -> None:
    """Take and gather rows where layers begin and end."""
    first = find_blocks(model)[0]
    first.register_forward_pre_hook(_on_hidden_states(rows.mine), with_kwargs=True)
    split = [name for pattern in plan.rows for name in expand(model, pattern)]
    stacked = [name for name in split if _is_parameter(model, name)]
    for pattern in plan.regions:
        for name in expand(model, pattern):
            region = model.get_submodule(name)
            region.register_forward_pre_hook(_on_hidden_states(rows.gather), with_kwargs=True)
            if any(part.startswith(f"{name}.") for part in stacked):  # no module of ours is last
                region.register_forward_hook(lambda _, args, output: rows.sum(output))
    norm = model.get_submodule(plan.norm)
    norm.register_forward_hook(lambda _, args, output: rows.gather(output))
    around(model).before.append(_before_model(model.config, rows))
    model._nearlinear_rows = rows  # for the stages of a pipeline


def _on_hidden_states(change):
    """A pre-forward hook that changes the hidden states, a module's first argument."""

    def hook(module, args, kwargs):
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": change(kwargs["hidden_states"])}

    return hook


def _before_model(config, rows: Rows):
    """Without labels the logits are wanted, of the whole vocabulary."""

    def before(given: dict) -> dict:
        for name in ("output_hidden_states", "output_attentions"):
            asked = given.get(name)
            if getattr(config, name, False) if asked is None else asked:
                raise ConfigError(
                    f"{name} = True with tensor_parallel_degree > 1: every rank has only its part "
                    "of them; leave it out, or run the model without tensor parallelism"
                )
        if given.get("output_router_logits") and not config.output_router_logits:
            raise ConfigError(
                "output_router_logits = True of one call, with tensor_parallel_degree > 1: set it "
                "in the model's config before nl.transform, which then adds the loss once"
            )
        rows.gathers_logits = not isinstance(given.get("labels"), torch.Tensor)
        if isinstance(given.get("inputs_embeds"), torch.Tensor):
            given = given | {"inputs_embeds": summed_back(given["inputs_embeds"], rows.group)}
        return given

    return before
