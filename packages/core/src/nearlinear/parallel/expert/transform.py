"""Divide the experts of a Hugging Face model over the expert ranks, in place.

Every rank keeps the experts that stand next to one another in its part of the stack. Routers stay
whole on every rank, and are the model's own unless `MoEConfig` asks for another assignment.
"""

from __future__ import annotations

from torch import nn

from ... import moe
from ...errors import ConfigError
from ...moe import MoEConfig
from ...runtime import Runtime
from .. import layout
from ..layout import even
from .dispatch import ParallelExperts, divide
from .layers import UPGRADE, Mixture, check, find
from .losses import RouterLosses
from .routing import Shuffle, assign_together


def apply(model: nn.Module, now: Runtime, config: MoEConfig | dict | None = None) -> None:
    """Divide the experts of ``model`` and route as ``config`` says. Raises ConfigError.

    A collective call. With one expert rank only the routing and its losses change.
    """
    config, mesh = moe.load(config), now.mesh
    degree = mesh.expert
    if not config.smp_moe:
        config.check_degrees(degree, mesh.pipeline, mesh.context, own_loss=False)
        return
    mixtures = find(model)
    check(model, mixtures, degree)
    aux, z = _loss_factors(model, config)
    # what the model would add by itself is what was asked for here, and nothing else
    own = bool(getattr(model.config, "output_router_logits", False))
    if aux or z or config.assigns or own:
        _check_routers(mixtures)
        config.check_degrees(degree, mesh.pipeline, mesh.context, own)
    group = now.group("expert") if degree > 1 else None
    for mixture in mixtures:
        if config.assigns:
            apart = group is not None and config.global_token_shuffle
            shuffle = Shuffle(group, config.random_seed) if apart else None
            assign_together(mixture.router, config.moe_load_balancing, shuffle)
        if group is not None:
            _divide(model, mixture, group, config.moe_all_to_all_dispatcher)
    if aux or z or own:
        routers = [mixture.router for mixture in mixtures]
        RouterLosses(aux, z, now.mesh.tensor).install(model, routers)
    if group is not None:
        layout.of(model).axes.add("expert")


def parallel_experts(module: nn.Module) -> list[nn.Module]:
    """The modules in ``module`` whose experts are divided: states of their own to be sharded."""
    return [child for child in module.modules() if isinstance(child, ParallelExperts)]


def _divide(model: nn.Module, mixture: Mixture, group, by_all_to_all: bool) -> None:
    rank, ranks = group.rank(), group.size()
    for name in mixture.parameters:
        cut = even("expert", 0, mixture.experts.num_experts, rank, ranks)
        layout.of(model).cut(model, name, cut)
    divide(mixture.experts, group, by_all_to_all)


def _loss_factors(model: nn.Module, config: MoEConfig) -> tuple[float, float]:
    """Of load balancing and z-loss, 0 where there is none."""
    balancing, said = config.moe_load_balancing, model.config
    if balancing is None:
        balancing = "aux_loss" if getattr(said, "output_router_logits", False) else "none"
    aux = 0.0
    if balancing == "aux_loss":
        aux = config.moe_aux_loss_coeff
        if aux is None:
            aux = getattr(said, "router_aux_loss_coef", None)
        if aux is None:
            raise ConfigError(
                f"{type(model).__name__} has no router_aux_loss_coef in its config: give "
                "moe_aux_loss_coeff"
            )
    return aux, config.moe_z_loss_coeff


def _check_routers(mixtures: list[Mixture]) -> None:
    for mixture in mixtures:
        if mixture.router is None or not hasattr(mixture.router, "top_k"):
            raise ConfigError(
                f"{mixture.name} has no router beside it that nearlinear knows: set "
                f"moe_load_balancing = 'none' and moe_z_loss_coeff = 0, or {UPGRADE}"
            )
