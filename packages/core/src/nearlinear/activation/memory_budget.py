"""Recompute the fewest blocks that fit a memory budget, measured in the first forward pass.

The first forward pass recomputes all blocks, so it fits if any choice does. Saved-tensor hooks
measure the bytes that each block would save without recomputation. Ranks that compute a block
together must recompute the same blocks, since blocks contain collectives; they agree on the largest
sizes among them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from .. import _torch
from ..distributed.runtime import Runtime
from ..errors import ConfigError
from .saved_tensors import is_activation, parameter_storages

log = logging.getLogger(__name__)

SHARED_BLOCK_AXES = ("replicate", "shard", "context", "tensor")
"""Axes of ranks that compute the same blocks at the same time."""


@dataclass(eq=False)
class Budget:
    """Choice of the recomputed blocks of a rank; all of them until `decide`."""

    limit: int
    """Bytes that the saved activations of one micro-batch may take."""
    now: Runtime
    blocks: int
    recomputed: frozenset[int] | None = None
    """Indices of the recomputed blocks; None until they are chosen."""
    _saved_bytes: dict[int, int] = field(default_factory=dict)
    """Bytes that a block saves without recomputation."""
    _input_bytes: dict[int, int] = field(default_factory=dict)
    """Bytes of the input of a block."""
    _counted: dict[int, object] = field(default_factory=dict)
    """Weak references to the counted storages."""

    def recomputes(self, block: int) -> bool:
        """Return whether block number ``block`` is recomputed."""
        return self.recomputed is None or block in self.recomputed

    def measured(self, number: int, block: nn.Module, run: Callable) -> Callable:
        """Wrap ``run(call)`` to count the bytes it saves in its first forward pass.

        Storage that several blocks save, such as masks, counts once.
        """
        if self.recomputed is not None or number in self._saved_bytes:
            return run

        def count(tensor: torch.Tensor) -> None:
            if is_activation(tensor, storages) and _torch.storage_of(tensor) not in self._counted:
                storage = tensor.untyped_storage()
                self._counted[_torch.storage_of(tensor)] = _torch.WeakStorage(storage)
                self._saved_bytes[number] += storage.nbytes()

        def counted(call):
            if _torch.in_backward():
                return run(call)
            args, _ = call
            self._input_bytes[number], self._saved_bytes[number] = (
                args[0].untyped_storage().nbytes(),
                0,
            )
            with _torch.seeing_saved_tensors(count):
                return run(call)

        storages = parameter_storages([block])
        return counted

    def decide(self) -> None:
        """Choose the blocks after the first forward pass. A collective call. ConfigError."""
        if self.recomputed is not None or len(self._saved_bytes) < self.blocks:
            return
        numbers = range(self.blocks)
        sizes = [[self._saved_bytes[i], self._input_bytes[i]] for i in numbers]
        table = torch.tensor(sizes, dtype=torch.int64, device=self.now.device)
        for axis in SHARED_BLOCK_AXES:
            if getattr(self.now.mesh, axis) > 1:
                dist.all_reduce(table, dist.ReduceOp.MAX, group=self.now.group(axis))
        self.recomputed = choose_blocks(table.tolist(), self.limit)
        self._counted.clear()
        if self.now.rank == 0:
            whole = sum(size for size, _ in table.tolist())
            log.info(
                "activations of a micro-batch: %.1f MiB saved, %.1f MiB allowed; %d of %d blocks "
                "are recomputed",
                *(whole / 2**20, self.limit / 2**20, len(self.recomputed), self.blocks),
            )


def choose_blocks(sizes: list[list[int]], limit: int) -> frozenset[int]:
    """Choose the fewest blocks to recompute so that the saved tensors fit in ``limit`` bytes.

    Args:
        sizes: Bytes that each block saves without and with recomputation.
        limit: Bytes.

    Raises:
        ConfigError: Recomputing all blocks does not suffice.
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
            f"activation checkpointing: with every block recomputed a micro-batch saves "
            f"{total:,} bytes, more than the budget of {limit:,}: raise it, or use "
            "strategy='group_N', nl.offload_activations or smaller micro-batches"
        )
    return frozenset(result)
