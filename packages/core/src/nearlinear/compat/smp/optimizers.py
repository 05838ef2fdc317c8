"""Optimizers that SMP v1 ships as fused kernels."""

from __future__ import annotations

from typing import Any

from ...errors import ConfigError


def _refused(name: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ConfigError(
            f"smp.optimizers.{name} scales updates by norms of whole parameters, of which every "
            "rank has a part. Use torch.optim.AdamW(fused=True)."
        )

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Refuse {name}, which needs whole parameters."
    return refuse


FusedLAMB = FusedLamb = _refused("FusedLAMB")
FusedNovoGrad = _refused("FusedNovoGrad")
