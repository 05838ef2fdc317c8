"""Find the mixtures of a Hugging Face model by their structure, not by the model's name.

transformers 5 keeps the experts of a layer in one module, stacked: every parameter's first dim
counts them, and it is called with the tokens, each one's experts and their weights. The router is
its neighbour ``gate`` or ``router``. What is built otherwise is refused.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from torch import nn

from ...config import divisors
from ...errors import ConfigError

KEY = "expert_parallel_degree"
UPGRADE = "pip install -U transformers"


@dataclass(frozen=True)
class Mixture:
    """One layer's experts and what routes tokens to them."""

    name: str
    """of the experts' module in the model"""
    experts: nn.Module
    router: nn.Module | None

    @property
    def parameters(self) -> list[str]:
        """Names, in the model, of what is stacked."""
        return [f"{self.name}.{key}" for key, _ in self.experts.named_parameters()]


def find(model: nn.Module) -> list[Mixture]:
    """The mixtures of ``model`` in forward order. Raises ConfigError where there is none."""
    found = []
    for name, module in model.named_modules():
        if is_stacked(module):
            holder = model.get_submodule(name.rpartition(".")[0])
            router = getattr(holder, "gate", None) or getattr(holder, "router", None)
            found.append(Mixture(name, module, router if isinstance(router, nn.Module) else None))
    if found:
        return found
    kind = type(model).__name__
    for name, module in model.named_modules():
        if name.rpartition(".")[2] != "experts":
            continue
        if isinstance(module, nn.ModuleList):
            raise ConfigError(
                f"{name} of {kind} keeps its experts one by one, as transformers 4 does: {UPGRADE}"
            )
        raise ConfigError(
            f"{name} of {kind} is a {type(module).__name__}, which nearlinear cannot divide: "
            f"set {KEY} = 1 and raise hybrid_shard_degree"
        )
    raise ConfigError(f"{kind} has no experts: set {KEY} = 1, or take a Mixtral or Qwen3-MoE")


def is_stacked(module: nn.Module) -> bool:
    experts = getattr(module, "num_experts", None)
    own = list(module._parameters.values())
    if not isinstance(experts, int) or not own or None in own:
        return False
    if len(own) != sum(1 for _ in module.parameters()):
        return False
    if any(p.shape[0] != experts for p in own) or max(p.dim() for p in own) < 3:
        return False
    taken = list(inspect.signature(type(module).forward).parameters)[1:]
    return len(taken) == 3 and "ind" in taken[1] and "weights" in taken[2]


def check(model: nn.Module, mixtures: list[Mixture], degree: int) -> None:
    """Raise ConfigError where ``degree`` ranks cannot have equally many experts."""
    for mixture in mixtures:
        experts = mixture.experts.num_experts
        if experts % degree:
            raise ConfigError(
                f"{KEY} = {degree} does not divide the {experts} experts of {mixture.name}: "
                f"allowed are {divisors(experts)}"
            )
