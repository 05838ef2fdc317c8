"""Whether a model can be split over so many tensor ranks, and whether that is wise.

The advice is SMP's own: tensor ranks talk several times in every layer and so belong on one node,
and the shapes that kernels like are powers of two.
"""

from __future__ import annotations

import logging

from torch import nn

from ...config import divisors
from ...errors import ConfigError
from ...mesh import Mesh
from ..blocks import find_blocks
from .modules import row_parallel_conv1d
from .plan import Plan, expand

log = logging.getLogger(__name__)

KEY = "tensor_parallel_degree"
_REMEDY = f"set {KEY} = 1 and raise hybrid_shard_degree"


def check(model: nn.Module, plan: Plan, mesh: Mesh) -> None:
    """Raise ConfigError where ``model`` cannot be split over ``mesh.tensor`` ranks."""
    config, degree = model.config, mesh.tensor
    if model.get_output_embeddings() is None:
        raise ConfigError(
            f"{KEY} > 1: {type(model).__name__} has no language model's head: use it with {KEY} = "
            "1, or take the causal language model"
        )
    _check_regions(model, plan)
    for name in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(config, name, None)
        if isinstance(count, int):
            _divides(degree, count, name)
    if getattr(config, "router_jitter_noise", 0.0):
        raise ConfigError(
            f"router_jitter_noise = {config.router_jitter_noise} with {KEY} > 1: tensor ranks see "
            "the same tokens and would each draw another noise; set it to 0"
        )
    for pattern, parts in plan.columns.items():
        for name in expand(model, pattern):
            _divides(degree, _outputs(model, name) // parts, f"the width of {name}")
    vocabulary = model.get_input_embeddings().weight.shape[0]
    if model.get_output_embeddings().weight.shape[0] != vocabulary:
        raise ConfigError(
            "tensor_parallel_degree > 1: the embedding and the head of the model have vocabularies "
            "of different sizes; resize_token_embeddings makes them one"
        )
    if degree > vocabulary:
        raise ConfigError(f"{KEY} = {degree}: there are only {vocabulary} ids in the vocabulary")
    _check_modules(model, plan)


def advise(mesh: Mesh) -> None:
    """Say where a degree is possible but not wise."""
    degree, nodes = mesh.tensor, mesh.nodes_spanned("tensor")
    if degree & (degree - 1):
        log.warning(
            "%s = %d is no power of two: matrices are cut to widths that kernels are slow with; "
            "take %d or %d",
            KEY, degree, 1 << degree.bit_length() - 1, 1 << degree.bit_length(),
        )  # fmt: skip
    if nodes > 1:
        log.warning(
            "%s = %d puts tensor ranks on %d nodes: they talk four times in every layer, over the "
            "network then; take at most %d, and raise hybrid_shard_degree or "
            "pipeline_parallel_degree instead",
            KEY, degree, nodes, mesh.ranks_per_node,
        )  # fmt: skip


def _check_regions(model: nn.Module, plan: Plan) -> None:
    """Between regions a rank has but its rows of the tokens: only norms can do with them."""
    regions = [name for pattern in plan.regions for name in expand(model, pattern)]
    names = {module: name for name, module in model.named_modules()}
    columns = [name for pattern in plan.columns for name in expand(model, pattern)]
    rows = [name for pattern in plan.rows for name in expand(model, pattern)]
    for name in regions:
        inside = f"{name}."
        if any(name.startswith(f"{other}.") for other in regions):
            raise ConfigError(f"{KEY} > 1: {name} is split inside another split module; {_REMEDY}")
        for kind in (columns, rows):
            if not any(part.startswith(inside) for part in kind):
                raise ConfigError(
                    f"{KEY} > 1: the plan of {type(model).__name__} splits modules like {name}, "
                    f"but nothing in that one; {_REMEDY}"
                )
        if any(part.startswith(f"{inside}experts") for part in rows):
            _check_mixture(model, name)
    for block in find_blocks(model):
        for child in block.children():
            norm = "norm" in type(child).__name__.lower()
            if not norm and names[child] not in regions and any(True for _ in child.parameters()):
                raise ConfigError(
                    f"{KEY} > 1: the plan of {type(model).__name__} does not split "
                    f"{names[child]}, a {type(child).__name__}, which needs all tokens; {_REMEDY}"
                )


def _check_mixture(model: nn.Module, name: str) -> None:
    """What comes out of it is added up over ranks: beside its experts nothing may add to that."""
    for child_name, child in model.get_submodule(name).named_children():
        whole = child_name not in ("experts", "gate", "router")
        if whole and any(True for _ in child.parameters()):
            raise ConfigError(
                f"{KEY} > 1: {name}.{child_name} is beside the experts, whole on every rank, and "
                f"would be added up with them; {_REMEDY}"
            )


def _divides(degree: int, count: int, what: str) -> None:
    if count % degree:
        raise ConfigError(
            f"{KEY} = {degree} does not divide {what}, {count}: allowed are {divisors(count)}"
        )


def _outputs(model: nn.Module, name: str) -> int:
    holder, _, last = name.rpartition(".")
    parameter = model.get_submodule(holder)._parameters.get(last)
    if parameter is not None:
        return parameter.shape[1]
    module = model.get_submodule(name)
    return module.weight.shape[0 if isinstance(module, nn.Linear) else 1]


def _check_modules(model: nn.Module, plan: Plan) -> None:
    """Classes are exchanged, so that they must be the ones that are known."""
    known = (nn.Linear, row_parallel_conv1d().__base__)
    split = [name for pattern in (*plan.columns, *plan.rows) for name in expand(model, pattern)]
    wanted = {name: known for name in split if name in dict(model.named_modules())}
    names = {module: name for name, module in model.named_modules()}
    wanted[names[model.get_input_embeddings()]] = (nn.Embedding,)
    wanted[names[model.get_output_embeddings()]] = (nn.Linear,)
    for name, classes in wanted.items():
        found = type(model.get_submodule(name))
        if found not in classes:
            raise ConfigError(
                f"{KEY} > 1: {name} of {type(model).__name__} is a {found.__name__}, which "
                f"nearlinear cannot split: {_REMEDY}"
            )
