"""A unit's all-gather beside computation, in one stage or, across nodes, in two.

The second is MiCS, part two (Zhang et al., VLDB 2023, section 3.3): see `hierarchy`.
"""

import torch.distributed as dist

from .. import _torch
from ..c10d_names import all_gather
from .hierarchy import Hierarchy
from .lane import Lane

_AllGather, _ = _torch.communication_classes()


class UnitGather(_AllGather):
    """Gathers the parameters of an FSDP2 unit over ``shards``: for its ``set_custom_all_gather``.

    ``memory`` allocates the result; ``hierarchy`` None: one stage.
    """

    def __init__(
        self, lane: Lane, shards: dist.ProcessGroup, memory, hierarchy: Hierarchy | None = None
    ):
        self.lane, self.shards, self.memory, self.hierarchy = lane, shards, memory, hierarchy

    def allocate(self, size, *, dtype, device):
        return self.memory.allocate(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        """Gather ``input_tensor`` (E,) of every rank into ``output_tensor`` (ranks * E,)."""

        def stages():
            if self.hierarchy is not None:
                self.hierarchy.gather(output_tensor, input_tensor)
            else:
                all_gather(output_tensor, input_tensor, group=self.shards)

        item = self.lane.give(gather=stages)
        if async_op:
            return item
        item.wait()
        return None
