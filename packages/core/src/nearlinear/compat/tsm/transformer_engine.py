"""Names of Transformer Engine that scripts of SMP v2 use around their forward pass.

The runner gives them as ``transformer_engine.pytorch`` and ``transformer_engine.common.recipe`` to
scripts on machines without Transformer Engine. Models compute in float8 by `nl.convert_to_fp8`.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...distributed import runtime as runtimes
from ...errors import ConfigError


class Format(enum.Enum):
    """Formats of a recipe."""

    E4M3 = "e4m3"
    E5M2 = "e5m2"
    HYBRID = "hybrid"


@dataclass
class DelayedScaling:
    """Recipe for scales; accepted, since `nl.convert_to_fp8` computes scales of every tensor."""

    margin: int = 0
    interval: int = 1
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False


@contextlib.contextmanager
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Any = None,
    fp8_group: Any = None,
) -> Iterator[None]:
    """Mark a forward pass in float8, which the model of a job with ``fp8`` computes anyway.

    Raises ConfigError if ``enabled`` in a job without ``fp8``: the model would silently compute in
    another precision.
    """
    now = runtimes.current_or_none()
    if enabled and (now is None or not now.config.fp8):
        raise ConfigError(
            "fp8_autocast(enabled=True) in a job without float8: give tsm.init the keys fp8 = true "
            "and bf16 = true, call nl.convert_to_fp8(model) before FullyShardedDataParallel, and "
            "use a GPU of compute capability 8.9; or pass enabled=False"
        )
    yield
