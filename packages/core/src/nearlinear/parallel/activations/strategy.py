"""What `nearlinear.checkpoint_activations` can be asked for, from text. No torch here.

The names are SMP's (``set_activation_checkpointing(strategy=...)``), and two that it did not have:
selective recomputation, and a budget of memory.
"""

import re
from dataclasses import dataclass

from ...errors import ConfigError

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
ALLOWED = "'each', 'contiguous', 'group_N', 'selective', or a budget such as '12GiB' or '500MiB'"


@dataclass(frozen=True)
class Strategy:
    """Which blocks are recomputed, and how."""

    together: int = 1
    """blocks in a row that are recomputed as one; 0 = all in a row"""
    selective: bool = False
    """outputs of matrix products and of attention are kept"""
    budget: int | None = None
    """bytes that the saved activations of one micro-batch may take on a rank"""


def parse(asked: str | int) -> Strategy:
    """The strategy that ``asked`` names; a number is a budget in bytes. Raises ConfigError."""
    if isinstance(asked, int) and not isinstance(asked, bool):
        return Strategy(budget=_positive(asked, asked))
    text = asked.strip() if isinstance(asked, str) else ""
    if text in ("each", "contiguous", "selective"):
        return Strategy(together=0 if text == "contiguous" else 1, selective=text == "selective")
    if found := re.fullmatch(r"group_(\d+)", text):
        return Strategy(together=_positive(int(found[1]), asked))
    if found := re.fullmatch(rf"(\d+(?:\.\d+)?)\s*({'|'.join(UNITS)})", text):
        return Strategy(budget=_positive(int(float(found[1]) * UNITS[found[2]]), asked))
    raise ConfigError(f"activation checkpointing: strategy = {asked!r}: allowed are {ALLOWED}")


def _positive(number: int, asked) -> int:
    if number < 1:
        raise ConfigError(f"activation checkpointing: strategy = {asked!r}: must be at least 1")
    return number
