"""Blocks in a row that are recomputed as one: of all of them only the first one's input is saved.

A model calls its blocks one after the other. The first ones of a region, when they are called, only
remember what with, and hand the hidden states on as they came; the last runs them all, each with
its own arguments and its own hooks. In the backward pass all of them are computed again at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ... import _torch
from ...errors import NearlinearError


@dataclass(eq=False)
class Region:
    """Some blocks in a row, and the calls of theirs that wait for the last."""

    blocks: list[nn.Module]
    gives_tuple: list[bool]
    """of each, whether it returns hidden states in a tuple"""
    live: int
    """parameters that may stay gathered from where blocks are recomputed to their backward pass"""
    running: bool = False
    _waiting: list[tuple[tuple, dict]] = field(default_factory=list)
    _handed_on: torch.Tensor | None = None

    def take(self, position: int, args: tuple, kwargs: dict) -> list | None:
        """Remember a call of block ``position``; all calls, if it is the last one's.

        Raises NearlinearError where the model does more than call one block after the other.
        """
        if position == 0:
            self.clear()  # of a forward pass that failed
        if position != len(self._waiting):
            raise NearlinearError(
                f"activation checkpointing: block {position + 1} of {len(self.blocks)} that are "
                f"recomputed together was called after {len(self._waiting)} of them: use "
                'strategy="each"'
            )
        if position and args[0] is not self._handed_on:
            raise NearlinearError(
                "activation checkpointing: the model does something to hidden states between "
                f"block {position} and {position + 1} of those recomputed together: use "
                'strategy="each"'
            )
        self._waiting.append((args if position == 0 else (None, *args[1:]), kwargs))
        if position < len(self.blocks) - 1:
            self._handed_on = args[0]
            return None
        calls = self._waiting
        self.clear()
        return calls

    def hand_on(self, position: int):
        """What block ``position`` returns for now."""
        hidden = self._handed_on
        return (hidden,) if self.gives_tuple[position] else hidden

    def clear(self) -> None:
        self._waiting, self._handed_on = [], None

    def check_finished(self) -> None:
        """At the end of a forward pass: raises NearlinearError if blocks were left out."""
        if self._waiting:
            called, self._waiting = len(self._waiting), []
            raise NearlinearError(
                f"activation checkpointing: the model called {called} of {len(self.blocks)} blocks "
                'that are recomputed together: use strategy="each"'
            )

    def run(self, calls: list[tuple[tuple, dict]]):
        """All blocks with ``calls``; what the last one returns."""
        frees = _torch.in_backward() and self._size() > self.live
        self.running, output = True, None
        try:
            for block, (args, kwargs) in zip(self.blocks, calls, strict=True):
                if args[0] is None:
                    args = (output[0] if isinstance(output, tuple) else output, *args[1:])
                output = block(*args, **kwargs)
                if frees and block is not self.blocks[-1] and isinstance(block, FSDPModule):
                    block.reshard()  # gathered once more for its backward pass
        finally:
            self.running = False
        return output

    def _size(self) -> int:
        return sum(p.numel() for block in self.blocks for p in block.parameters())


def cut(
    stacks: list[list[nn.Module]],
    together: int,
    gives_tuple: Callable[[nn.Module], bool],
    live: int,
) -> list[Region]:
    """Regions of ``together`` blocks (0: as many as there are) of each of ``stacks``."""
    regions = []
    for blocks in stacks:
        size = together or len(blocks)
        for begin in range(0, len(blocks), max(1, size)):
            part = blocks[begin : begin + size]
            regions.append(Region(part, [gives_tuple(block) for block in part], live))
    return regions
