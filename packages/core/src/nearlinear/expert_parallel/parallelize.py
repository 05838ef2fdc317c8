"""Divide the experts of a Hugging Face model over the expert ranks, in place.

Mixtures are found by structure, not by the name of the model. transformers 5 keeps the experts of a
layer in one module with stacked parameters: the first dim of each counts the experts, and the
module is called with tokens, their experts and weights. The router is its sibling ``gate`` or
``router``. Other structures are refused.

Every rank keeps consecutive experts of the stack. Routers are replicated, and are the model's own
unless `MoEConfig` selects another assignment.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..config import moe
from ..config.moe import MoEConfig
from ..config.parallel import divisors
from ..distributed.runtime import Runtime
from ..errors import ConfigError
from ..fsdp.model_state import ShardingExtension, model_state, split_evenly
from .routing import (
    ParallelExperts,
    RouterLosses,
    TokenShuffle,
    install_assignment,
    install_parallel_experts,
)

KEY = "expert_parallel_degree"
UPGRADE = "pip install -U transformers"


@dataclass(frozen=True)
class MoELayer:
    """Experts and router of one layer."""

    name: str
    """Name of the experts' module in the model."""
    experts: Any
    """Module of stacked experts, with ``num_experts``."""
    router: Any
    """Router module, or None if it was not found."""

    @property
    def parameters(self) -> list[str]:
        """Names of the stacked parameters in the model."""
        return [f"{self.name}.{key}" for key, _ in self.experts.named_parameters()]


def find_mixtures(model: nn.Module) -> list[MoELayer]:
    """Return the mixtures of ``model`` in forward order. Raises ConfigError if there is none."""
    found = []
    for name, module in model.named_modules():
        if is_stacked(module):
            parent = model.get_submodule(name.rpartition(".")[0])
            # GPT-OSS of transformers 4 passes the weights of all experts, by keyword
            if "router_indices=" in inspect.getsource(type(parent).forward):
                raise ConfigError(
                    f"{name} of {type(model).__name__} is called as in transformers 4: {UPGRADE}"
                )
            router = getattr(parent, "gate", None) or getattr(parent, "router", None)
            found.append(MoELayer(name, module, router if isinstance(router, nn.Module) else None))
    if found:
        return found
    kind = type(model).__name__
    for name, module in model.named_modules():
        if name.rpartition(".")[2] != "experts":
            continue
        if isinstance(module, nn.ModuleList):
            raise ConfigError(
                f"{name} of {kind} has one module per expert, as in transformers 4: {UPGRADE}"
            )
        raise ConfigError(
            f"{name} of {kind} is a {type(module).__name__}, which cannot be divided. "
            f"Set {KEY} = 1 and raise hybrid_shard_degree."
        )
    raise ConfigError(f"{kind} has no experts. Set {KEY} = 1, or use a Mixtral or Qwen3-MoE model.")


def is_stacked(module: nn.Module) -> bool:
    """Return whether ``module`` holds stacked experts in the structure of transformers 5."""
    experts = getattr(module, "num_experts", None)
    own = list(module._parameters.values())
    if not isinstance(experts, int) or not own or None in own:
        return False
    if len(own) != sum(1 for _ in module.parameters()):
        return False
    parameters = [p for p in own if p is not None]
    if any(p.shape[0] != experts for p in parameters) or max(p.dim() for p in parameters) < 3:
        return False
    arguments = list(inspect.signature(type(module).forward).parameters)[1:]
    return len(arguments) == 3 and "ind" in arguments[1] and "weights" in arguments[2]


def check_divides(mixtures: list[MoELayer], degree: int) -> None:
    """Raise ConfigError if ``degree`` does not divide the experts of every mixture."""
    for mixture in mixtures:
        experts = mixture.experts.num_experts
        if experts % degree:
            raise ConfigError(
                f"{KEY} = {degree} does not divide the {experts} experts of {mixture.name}: "
                f"allowed are {divisors(experts)}"
            )


def apply_expert_parallel(model: Any, now: Runtime, config: MoEConfig | dict | None = None) -> None:
    """Divide the experts of ``model`` and install routing and router losses. A collective call.

    With one expert rank only routing and losses change. Raises ConfigError.
    """
    settings, mesh = moe.load(config), now.mesh
    degree = mesh.expert
    if not settings.smp_moe:
        settings.check_degrees(degree, mesh.pipeline, mesh.context, own_loss=False)
        return
    mixtures = find_mixtures(model)
    check_divides(mixtures, degree)
    aux, z = _loss_factors(model, settings)
    # the losses installed here replace those that the model would add by itself
    own = bool(getattr(model.config, "output_router_logits", False))
    if aux or z or settings.assigns or own:
        _check_routers(mixtures)
        settings.check_degrees(degree, mesh.pipeline, mesh.context, own)
    group = now.group("expert") if degree > 1 else None
    for mixture in mixtures:
        if settings.assigns:
            shuffle = None
            if group is not None and settings.global_token_shuffle:
                shuffle = TokenShuffle(group, settings.random_seed)
            install_assignment(mixture.router, str(settings.moe_load_balancing), shuffle)
        if group is not None:
            _divide(model, mixture, group, settings.moe_all_to_all_dispatcher)
    if aux or z or own:
        routers = [mixture.router for mixture in mixtures]
        RouterLosses(aux, z, now.mesh.tensor).install(model, routers)
    if group is not None:
        state = model_state(model)
        state.layout.axes.add("expert")
        state.extensions.append(ExpertParallel())


def parallel_experts(module: nn.Module) -> list[nn.Module]:
    """List the modules in ``module`` with divided experts, which are sharded separately."""
    return [child for child in module.modules() if isinstance(child.forward, ParallelExperts)]


class ExpertParallel(ShardingExtension):
    """Shard divided experts over the ranks that hold the same experts."""

    def expert_units(self, module: nn.Module) -> list[nn.Module]:
        return parallel_experts(module)


def _divide(model: nn.Module, mixture: MoELayer, group, by_all_to_all: bool) -> None:
    rank, ranks = group.rank(), group.size()
    for name in mixture.parameters:
        split = split_evenly("expert", 0, mixture.experts.num_experts, rank, ranks)
        model_state(model).layout.split_parameter(model, name, split)
    install_parallel_experts(mixture.experts, group, by_all_to_all)


def _loss_factors(model: Any, config: MoEConfig) -> tuple[float, float]:
    """Return the factors of the load-balancing loss and the z-loss, 0 for none."""
    balancing, hf_config = config.moe_load_balancing, model.config
    if balancing is None:
        balancing = "aux_loss" if getattr(hf_config, "output_router_logits", False) else "none"
    aux = 0.0
    if balancing == "aux_loss":
        aux = config.moe_aux_loss_coeff
        if aux is None:
            aux = getattr(hf_config, "router_aux_loss_coef", None)
        if aux is None:
            raise ConfigError(
                f"{type(model).__name__} has no router_aux_loss_coef in its config. Set "
                "moe_aux_loss_coeff."
            )
    return aux, config.moe_z_loss_coeff


def _check_routers(mixtures: list[MoELayer]) -> None:
    for mixture in mixtures:
        if mixture.router is None or not hasattr(mixture.router, "top_k"):
            raise ConfigError(
                f"{mixture.name} has no supported router beside it. Set "
                f"moe_load_balancing = 'none' and moe_z_loss_coeff = 0, or {UPGRADE}"
            )
