"""Activation checkpointing of functions, in place of ``torch.utils.checkpoint``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils import checkpoint as torch_checkpoint


def checkpoint(function: Callable, *args: Any, preserve_rng_state: bool = True) -> Any:
    """Return ``function(*args)``, which is computed again in the backward pass."""
    return torch_checkpoint.checkpoint(
        function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
    )


def checkpoint_sequential(
    sequential_module: nn.Sequential,
    input: Any,
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
    strategy: str = "each",
) -> Any:
    """Return ``sequential_module(input)``, computed again in the backward pass.

    Args:
        sequential_module: The module.
        input: Its argument.
        preserve_rng_state: Repeat the random numbers of dropout.
        pack_args_as_tuple: Has no effect.
        strategy: ``each``, ``contiguous`` or ``group_N``: layers computed again together.
    """
    from ....config.activation_strategy import parse_strategy

    size = parse_strategy(strategy).group_size or len(sequential_module)
    layers = list(sequential_module)
    for begin in range(0, len(layers), size):
        part = nn.Sequential(*layers[begin : begin + size])
        input = checkpoint(part, input, preserve_rng_state=preserve_rng_state)
    return input
