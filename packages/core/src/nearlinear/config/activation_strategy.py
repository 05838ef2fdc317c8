"""Parse the strategies of activation checkpointing. Imports no torch.

The names are those of SMP (``set_activation_checkpointing(strategy=...)``), plus selective
recomputation and a memory budget.
"""

import re
from dataclasses import dataclass

from ..errors import ConfigError
from .schema import parse_bytes

ALLOWED = "'each', 'contiguous', 'group_N', 'selective', or a budget such as '12GiB' or '500MiB'"


@dataclass(frozen=True)
class ActivationStrategy:
    """Blocks to recompute, and the way to recompute them."""

    group_size: int = 1
    """Consecutive blocks that are recomputed as one; 0 = all consecutive blocks."""
    selective: bool = False
    """True to keep the outputs of matrix products and of attention."""
    budget: int | None = None
    """Bytes that the saved activations of one micro-batch may take on a rank."""


def parse_strategy(strategy: str | int) -> ActivationStrategy:
    """Parse the name of a strategy, or a memory budget as text or in bytes.

    Raises ConfigError for any other value.
    """
    if isinstance(strategy, int) and not isinstance(strategy, bool):
        return ActivationStrategy(budget=_check_positive(strategy, strategy))
    text = strategy.strip() if isinstance(strategy, str) else ""
    if text in ("each", "contiguous", "selective"):
        size = 0 if text == "contiguous" else 1
        return ActivationStrategy(group_size=size, selective=text == "selective")
    if found := re.fullmatch(r"group_(\d+)", text):
        return ActivationStrategy(group_size=_check_positive(int(found[1]), strategy))
    if (size := parse_bytes(text)) is not None:
        return ActivationStrategy(budget=_check_positive(size, strategy))
    raise ConfigError(f"activation checkpointing: strategy = {strategy!r}: allowed are {ALLOWED}")


def _check_positive(number: int, strategy: str | int) -> int:
    if number < 1:
        raise ConfigError(f"activation checkpointing: strategy = {strategy!r}: must be at least 1")
    return number
