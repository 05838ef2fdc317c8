"""Settings of mixtures of experts, in the names of SMP v2's ``MoEConfig``.

SMP's defaults change the model: Sinkhorn routing, both router losses on. The defaults here keep the
model as its Hugging Face config describes it, so that a transformed model trains like the original.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import ConfigError
from . import schema

log = logging.getLogger(__name__)

LoadBalancing = Literal["sinkhorn", "balanced", "aux_loss", "none"]


@dataclass(frozen=True)
class MoEConfig:
    """Routing of tokens to experts; differing defaults of SMP v2 stand in brackets.

    Example::

        nl.transform(model, MoEConfig(moe_load_balancing="aux_loss", moe_z_loss_coeff=0.001))
    """

    smp_moe: bool = True
    """replace the model's mixtures; false = keep them, with expert_parallel_degree = 1 only"""
    random_seed: int = 12345
    """seed of global_token_shuffle; the rank in the expert group is added"""
    moe_load_balancing: LoadBalancing | None = None
    """sinkhorn and balanced assign tokens evenly in training, aux_loss adds the Switch loss;
    unset = aux_loss if the model's config has output_router_logits, else none ["sinkhorn"]"""
    global_token_shuffle: bool = False
    """assign a random part of the expert group's tokens instead of the rank's own tokens, with
    sinkhorn and balanced"""
    moe_all_to_all_dispatcher: bool = True
    """send tokens to the ranks of their experts; false = all-gather tokens and sum the results"""
    moe_aux_loss_coeff: float | None = None
    """factor of aux_loss; unset = the model's router_aux_loss_coef [0.001]"""
    moe_z_loss_coeff: float = 0.0
    """factor of the router z-loss, added with any load balancing [0.001]"""

    def __post_init__(self) -> None:
        coefficients = ("moe_aux_loss_coeff", "moe_z_loss_coeff")
        schema.check_ranges(self, dict.fromkeys(coefficients, (0.0, 1e6)))
        allowed = get_args(LoadBalancing)
        if self.moe_load_balancing not in (None, *allowed):
            raise ConfigError(
                f"moe_load_balancing = {self.moe_load_balancing!r}: allowed are "
                f"{', '.join(map(repr, allowed))}"
            )
        if self.global_token_shuffle and not self.assigns:
            log.warning(
                "global_token_shuffle has no effect: only moe_load_balancing = sinkhorn and "
                "balanced assign tokens jointly"
            )
        added = self.moe_load_balancing in (None, "aux_loss")
        if self.moe_aux_loss_coeff is not None and not added:
            log.warning(
                "moe_aux_loss_coeff = %s has no effect with moe_load_balancing = %r; only aux_loss "
                "uses it",
                self.moe_aux_loss_coeff,
                self.moe_load_balancing,
            )

    def check_degrees(self, expert: int, pipeline: int, context: int, own_loss: bool) -> None:
        """Raise ConfigError if the degrees do not fit a model with mixtures of experts.

        ``own_loss``: whether the model's config enables its router loss.
        """
        if not self.smp_moe:
            if expert > 1:
                raise ConfigError(
                    "smp_moe = false keeps the model's mixtures whole on every rank. Set "
                    "expert_parallel_degree = 1, or smp_moe = true."
                )
            return
        if not (own_loss or self.assigns or self.moe_z_loss_coeff or self._adds_loss):
            return
        for key, degree, needed in (
            ("pipeline_parallel_degree", pipeline, "all layers, which are on several ranks"),
            (
                "context_parallel_degree",
                context,
                "all tokens of a batch, which are on several ranks",
            ),
        ):
            if degree > 1:
                raise ConfigError(
                    f"router losses and assignments need {needed} with {key} > 1. Set it to "
                    "1, or moe_load_balancing = 'none' and moe_z_loss_coeff = 0."
                )

    @property
    def _adds_loss(self) -> bool:
        return self.moe_load_balancing == "aux_loss" and self.moe_aux_loss_coeff != 0

    @property
    def assigns(self) -> bool:
        """True if tokens are assigned to experts jointly in training, not one by one."""
        return self.moe_load_balancing in ("sinkhorn", "balanced")


def load(config: MoEConfig | dict | None) -> MoEConfig:
    """Load a `MoEConfig` from itself, plain data, or None. Raises ConfigError."""
    if config is None or isinstance(config, MoEConfig):
        return config or MoEConfig()
    if not isinstance(config, dict):
        raise ConfigError(
            f"the config of nl.transform is a {type(config).__name__}: expected a MoEConfig or a "
            "dict of its keys"
        )
    return schema.build(MoEConfig, config)
