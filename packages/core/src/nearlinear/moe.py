"""What was asked of a mixture of experts, in the names of SMP v2's ``MoEConfig``.

SMP's own defaults change the model (Sinkhorn routing, both losses on); these leave it as its
Hugging Face config describes it, so that a transformed model trains like the untouched one.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal, get_args

from . import schema
from .errors import ConfigError

log = logging.getLogger(__name__)

LoadBalancing = Literal["sinkhorn", "balanced", "aux_loss", "none"]


@dataclass(frozen=True)
class MoEConfig:
    """How tokens find their experts; SMP v2's defaults, where they differ, in brackets."""

    smp_moe: bool = True
    """use these mixtures; false = the model's own, which expert_parallel_degree > 1 cannot have"""
    random_seed: int = 12345
    """seed of global_token_shuffle; the place in the expert group is added to it"""
    moe_load_balancing: LoadBalancing | None = None
    """sinkhorn and balanced assign tokens evenly in training, aux_loss adds the Switch loss; not
    given = aux_loss where the model's config has output_router_logits, else none ["sinkhorn"]"""
    global_token_shuffle: bool = False
    """sinkhorn and balanced assign a random part of the expert group's tokens, not a rank's own"""
    moe_all_to_all_dispatcher: bool = True
    """tokens travel to their experts; false = all tokens to all ranks, and sums back"""
    moe_aux_loss_coeff: float | None = None
    """factor of aux_loss; not given = the model's own, router_aux_loss_coef [0.001]"""
    moe_z_loss_coeff: float = 0.0
    """factor of the router z-loss, which is added with any load balancing [0.001]"""

    def __post_init__(self):
        for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
            if (getattr(self, name) or 0.0) < 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be 0 or more")
        allowed = get_args(LoadBalancing)
        if self.moe_load_balancing not in (None, *allowed):
            raise ConfigError(
                f"moe_load_balancing = {self.moe_load_balancing!r}: allowed are "
                f"{', '.join(map(repr, allowed))}"
            )
        if self.global_token_shuffle and not self.assigns:
            log.warning(
                "global_token_shuffle has no effect: it is for moe_load_balancing = sinkhorn and "
                "balanced; otherwise every token chooses by itself"
            )
        added = self.moe_load_balancing in (None, "aux_loss")
        if self.moe_aux_loss_coeff is not None and not added:
            log.warning(
                "moe_aux_loss_coeff = %s has no effect with moe_load_balancing = %r: only aux_loss "
                "has one",
                self.moe_aux_loss_coeff,
                self.moe_load_balancing,
            )

    def check_degrees(self, expert: int, pipeline: int, context: int, own_loss: bool) -> None:
        """Raise ConfigError where a model with mixtures cannot be divided so.

        ``own_loss``: whether the model's config asks for its router loss itself.
        """
        if not self.smp_moe:
            if expert > 1:
                raise ConfigError(
                    "smp_moe = false keeps the model's own mixtures, whole on every rank: set "
                    "expert_parallel_degree = 1, or smp_moe = true"
                )
            return
        if not (own_loss or self.assigns or self.moe_z_loss_coeff or self._adds_loss):
            return
        for key, degree, looked_at in (
            ("pipeline_parallel_degree", pipeline, "all layers, which are not on one rank"),
            ("context_parallel_degree", context, "the tokens of one rank, which are not a batch"),
        ):
            if degree > 1:
                raise ConfigError(
                    f"router losses and assignments look at {looked_at} with {key} > 1: set it to "
                    "1, or moe_load_balancing = 'none' and moe_z_loss_coeff = 0"
                )

    @property
    def _adds_loss(self) -> bool:
        return self.moe_load_balancing == "aux_loss" and self.moe_aux_loss_coeff != 0

    @property
    def assigns(self) -> bool:
        """Whether tokens are assigned together, in training, instead of choosing by themselves."""
        return self.moe_load_balancing in ("sinkhorn", "balanced")


def load(config: MoEConfig | dict | None) -> MoEConfig:
    """The `MoEConfig` from itself, plain data, or None. Raises ConfigError."""
    if config is None or isinstance(config, MoEConfig):
        return config or MoEConfig()
    if not isinstance(config, dict):
        raise ConfigError(
            f"the config of nl.transform is a {type(config).__name__}: expected nl.MoEConfig or a "
            "dict of its keys"
        )
    return schema.build(MoEConfig, config)
