"""As few recomputed blocks as a budget of memory asks for, found in the first forward pass.

In that all blocks are recomputed, so that it fits if anything does, and what each would save
otherwise is counted by hooks on saved tensors. Ranks that compute a block together must recompute
the same ones, since collectives run in it: they agree on the largest sizes among them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from ... import _torch
from ...errors import ConfigError
from ...runtime import Runtime
from .saved import held_by, is_activation

log = logging.getLogger(__name__)

TOGETHER = ("replicate", "shard", "context", "tensor")
"""Axes of ranks that compute the same blocks at the same time."""


@dataclass(eq=False)
class Budget:
    """Which of a rank's blocks are recomputed; all, until `decide`."""

    limit: int
    """bytes that the saved activations of one micro-batch may take"""
    now: Runtime
    blocks: int
    recomputed: frozenset[int] | None = None
    """numbers of blocks, once that is decided"""
    _whole: dict[int, int] = field(default_factory=dict)  # bytes that a block saves
    _input: dict[int, int] = field(default_factory=dict)  # and those of what it is called with
    _seen: dict[int, object] = field(default_factory=dict)  # storages, weakly: none comes twice

    def recomputes(self, block: int) -> bool:
        return self.recomputed is None or block in self.recomputed

    def watched(self, number: int, block: nn.Module, run: Callable) -> Callable:
        """``run(call)``, which counts what it saves when it runs for the first time.

        Memory that several blocks save (masks) counts once.
        """
        if self.recomputed is not None or number in self._whole:
            return run

        def count(tensor: torch.Tensor) -> None:
            if is_activation(tensor, held) and _torch.storage_of(tensor) not in self._seen:
                storage = tensor.untyped_storage()
                self._seen[_torch.storage_of(tensor)] = _torch.WeakStorage(storage)
                self._whole[number] += storage.nbytes()

        def counted(call):
            if _torch.in_backward():
                return run(call)
            args, _ = call
            self._input[number], self._whole[number] = args[0].untyped_storage().nbytes(), 0
            with _torch.seeing_saved_tensors(count):
                return run(call)

        held = held_by([block])
        return counted

    def decide(self) -> None:
        """At the end of a forward pass, once: which blocks. A collective call. ConfigError."""
        if self.recomputed is not None or len(self._whole) < self.blocks:
            return
        numbers = range(self.blocks)
        sizes = [[self._whole[i], self._input[i]] for i in numbers]
        table = torch.tensor(sizes, dtype=torch.int64, device=self.now.device)
        for axis in TOGETHER:
            if getattr(self.now.mesh, axis) > 1:
                dist.all_reduce(table, dist.ReduceOp.MAX, group=self.now.group(axis))
        self.recomputed = chosen(table.tolist(), self.limit)
        self._seen.clear()
        if self.now.rank == 0:
            whole = sum(size for size, _ in table.tolist())
            log.info(
                "activations of a micro-batch: %.1f MiB saved, %.1f MiB allowed: %d of %d blocks "
                "are recomputed",
                *(whole / 2**20, self.limit / 2**20, len(self.recomputed), self.blocks),
            )


def chosen(sizes: list[list[int]], limit: int) -> frozenset[int]:
    """The fewest blocks to recompute so that what is saved fits in ``limit`` bytes.

    ``sizes``: of each block the bytes it saves, and those it saves if it is recomputed. ConfigError
    where all of them are not enough.
    """
    total, result = sum(whole for whole, _ in sizes), set()
    gains = sorted(range(len(sizes)), key=lambda i: sizes[i][1] - sizes[i][0])
    for i in gains:
        if total <= limit:
            break
        total -= sizes[i][0] - sizes[i][1]
        result.add(i)
    if total > limit:
        raise ConfigError(
            f"activation checkpointing: with every block recomputed a micro-batch still saves "
            f"{total:,} bytes, and the budget is {limit:,}: raise it, or use strategy='group_N', "
            "nl.offload_activations or smaller micro-batches"
        )
    return frozenset(result)
