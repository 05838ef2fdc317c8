"""A unit's all-gather beside computation, in one stage or, across nodes, in two.

The second is MiCS, part two (Zhang et al., VLDB 2023, section 3.3): see `hierarchy`.
"""

import torch
import torch.distributed as dist

from .. import _torch
from ..c10d_names import all_gather
from .hierarchy import Hierarchy
from .lane import Lane
from .wire import codes

_AllGather, _ = _torch.communication_classes()


class UnitGather(_AllGather):
    """Gathers the parameters of an FSDP2 unit over ``shards``: for its ``set_custom_all_gather``.

    ``memory`` allocates the result; ``hierarchy`` None: one stage; ``codec``: see `wire`.
    """

    def __init__(
        self,
        lane: Lane,
        shards: dist.ProcessGroup,
        memory,
        hierarchy: Hierarchy | None = None,
        codec=None,
    ):
        self.lane, self.shards, self.memory = lane, shards, memory
        self.hierarchy, self.codec = hierarchy, codec

    def allocate(self, size, *, dtype, device):
        """For the result; what a codec writes itself lies in private memory."""
        if codes(self.codec, dtype):
            return torch.empty(*size, dtype=dtype, device=device)
        return self.memory.allocate(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        """Gather ``input_tensor`` (E,) of every rank into ``output_tensor`` (ranks * E,)."""
        run = self._gather_coded if codes(self.codec, input_tensor.dtype) else self._gather
        item = self.lane.give(gather=lambda: run(output_tensor, input_tensor))
        if async_op:
            return item
        item.wait()
        return None

    def _gather(self, output, input) -> None:
        if self.hierarchy is not None:
            self.hierarchy.gather(output, input)
        else:
            all_gather(output, input, group=self.shards)

    def _gather_coded(self, output, input) -> None:
        ranks, codec = self.shards.size(), self.codec
        packed = codec.pack(input)
        size = (ranks * packed.numel(),)
        room = self.memory.allocate(size, dtype=packed.dtype, device=packed.device)
        self._gather(room, packed)
        codec.unpack(output.view(ranks, -1), room.view(ranks, -1))
