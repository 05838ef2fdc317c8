"""``MoEConfig`` with the defaults of SMP v2, which route by Sinkhorn's algorithm."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import cast

from ....config.moe import LoadBalancing
from ....config.moe import MoEConfig as RouterConfig

log = logging.getLogger(__name__)


@dataclass
class MoEConfig:
    """Settings of mixtures of experts for ``tsm.transform(config=...)``."""

    smp_moe: bool = True
    random_seed: int = 12345
    moe_load_balancing: str = "sinkhorn"
    """aux_loss, sinkhorn, balanced or none"""
    global_token_shuffle: bool = False
    moe_all_to_all_dispatcher: bool = True
    moe_aux_loss_coeff: float = 0.001
    """factor of aux_loss"""
    moe_z_loss_coeff: float = 0.001
    use_cpu_initialization: bool = False
    """accepted; values are initialized on the CPU in any case"""

    def router(self) -> RouterConfig:
        """Return nearlinear's settings. Raises ConfigError."""
        if self.use_cpu_initialization:
            log.info("use_cpu_initialization has no effect: values are initialized on the CPU")
        adds_loss = self.moe_load_balancing == "aux_loss"
        return RouterConfig(
            smp_moe=self.smp_moe,
            random_seed=self.random_seed,
            moe_load_balancing=cast(LoadBalancing, self.moe_load_balancing),
            global_token_shuffle=self.global_token_shuffle,
            moe_all_to_all_dispatcher=self.moe_all_to_all_dispatcher,
            moe_aux_loss_coeff=self.moe_aux_loss_coeff if adds_loss else None,
            moe_z_loss_coeff=self.moe_z_loss_coeff,
        )
