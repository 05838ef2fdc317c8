"""All-gather and reduce-scatter of FSDP2 units on threads that overlap with computation.

FSDP2 shards over the shard axis only and hands the communication of every unit to a `UnitAllGather`
and a `UnitReduceScatter`. The latter implements two-hop gradient synchronization (MiCS, Zhang et
al. 2022, arXiv:2205.00119). First hop: each unit's gradients are reduce-scattered in the shard
group while the backward pass continues. Second hop: the last micro-batch of a step all-reduces the
accumulated sums across replicas. In between `UnitReduceScatter` stashes the sums, so that no
optimizer sees them; after the second hop it exposes them as gradients. Units that `prefetch` keeps
unreduced run both hops in the last micro-batch, one right behind the other.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from .. import _torch
from .._torch import all_gather
from ..distributed.collectives import Allocator, Hierarchy, ReduceScatter
from ..distributed.comm_thread import CommThread, CommWork
from .all_gather_codec import AllGatherCodec, is_compressed

if TYPE_CHECKING:
    from .optimizer_state import UnitSlices

_AllGather, _ReduceScatter = _torch.communication_classes()


class TorchAllocator:
    """Allocates buffers as torch does."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class ReusedMemory:
    """Allocates as torch does, and hands memory out again that no other tensor uses.

    Writing to new memory takes twice as long on the CPU: the system zeroes it page by page.
    """

    def __init__(self):
        self._held: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        held = self._held.setdefault((math.prod(size), dtype), [])
        free = next(filter(_torch.is_only_user, held), None)
        if free is None:
            free = torch.empty(math.prod(size), dtype=dtype, device=device)
            held.append(free)
        return free.view(*size)


class UnitAllGather(_AllGather):
    """All-gather of one FSDP2 unit over ``group``, for its ``set_custom_all_gather``.

    Args:
        memory: Allocates the gathered parameters.
        hierarchy: Gather in two stages, across nodes first; None: in one.
        codec: Compress the parameters for transport.
    """

    def __init__(
        self,
        thread: CommThread,
        group: dist.ProcessGroup,
        memory: Allocator,
        hierarchy: Hierarchy | None = None,
        codec: AllGatherCodec | None = None,
    ):
        self.thread, self.group, self.memory = thread, group, memory
        self.hierarchy, self.codec = hierarchy, codec

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Allocate the output; private memory suffices where a codec writes it."""
        if self._compresses(dtype):
            return torch.empty(*size, dtype=dtype, device=device)
        return self.memory.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """All-gather ``input_tensor`` (E,) of every rank into ``output_tensor`` (ranks * E,)."""
        compresses = self._compresses(input_tensor.dtype)
        run = self._all_gather_compressed if compresses else self._all_gather
        work = self.thread.submit(gather=lambda: run(output_tensor, input_tensor))
        if async_op:
            return work
        work.wait()
        return None

    def _compresses(self, dtype: torch.dtype) -> bool:
        return self.codec is not None and is_compressed(self.codec, dtype)

    def _all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        if self.hierarchy is not None:
            self.hierarchy.all_gather(output, input)
        else:
            all_gather(output, input, group=self.group)

    def _all_gather_compressed(self, output: torch.Tensor, input: torch.Tensor) -> None:
        ranks, codec = self.group.size(), self.codec
        assert codec is not None
        packed = codec.pack(input)
        size = (ranks * packed.numel(),)
        received = self.memory.allocate(size, dtype=packed.dtype, device=packed.device)
        self._all_gather(received, packed)
        codec.unpack(output.view(ranks, -1), received.view(ranks, -1))


@dataclass
class GradientReduction:
    """Gradient reduction shared by the units of one sharded model."""

    thread: CommThread
    replicas: dist.ProcessGroup | None
    """Replicas of this rank's shards; None if there is one replica."""
    max_inflight: int
    """Elements whose reductions may be in flight at once. A single unit always may."""
    two_hop: bool = True
    """Synchronize replicas once per step instead of after every micro-batch."""
    last: bool = True
    """True if the current micro-batch synchronizes replicas; with slices each one may."""
    units: list[UnitReduceScatter] = field(default_factory=list)
    replica_sum: Callable[[int, torch.Tensor], None] | None = None
    """Adds the gradients of the unit with this number to those of replicas that are jobs of their
    own, in place."""
    inflight: deque[tuple[CommWork, int]] = field(default_factory=deque)
    """Submitted reductions in order, with their elements."""

    def make_room(self, elements: int) -> None:
        """Wait for the oldest reductions until ``elements`` more fit into the limit."""
        while self.inflight:
            oldest, _ = self.inflight[0]
            fits = elements + sum(each for _, each in self.inflight) <= self.max_inflight
            if fits and not oldest.is_completed():
                break
            oldest.wait()
            self.inflight.popleft()

    def expose_grads(self, before: UnitReduceScatter) -> None:
        """Replace the gradients of units that are reduced already by their slices.

        ``before`` is the unit whose reduction was submitted last.
        """
        for unit in self.units:
            done = unit.work is not None and unit.work.is_completed()
            if done and unit.slices is not None and unit is not before:
                unit.finish()

    def end_backward(self) -> None:
        """Finish the units, or stash their sums, at the end of a backward pass; idempotent."""
        for unit in self.units:
            if self.last:
                unit.finish()
            else:
                unit.stash_grads()

    def abandon(self) -> None:
        """Drop the sums of an unfinished step."""
        self.inflight.clear()
        for unit in self.units:
            unit.abandon()


class UnitReduceScatter(_ReduceScatter):
    """Reduction of one FSDP2 unit's gradients, for its ``set_custom_reduce_scatter``.

    Args:
        common: Settings and state shared by the units of the model.
        reduce_scatter: First hop, over the ranks that share the unit's parameters; None if each
            rank holds them all.
        memory: Allocates the gradients to reduce and their sums.
    """

    def __init__(
        self,
        common: GradientReduction,
        unit: FSDPModule,
        reduce_scatter: ReduceScatter | None,
        memory: Allocator,
    ):
        self.common, self.unit = common, unit
        self.reduce_scatter, self.memory = reduce_scatter, memory
        self.number: int = len(common.units)
        common.units.append(self)
        self.whole: torch.Tensor | None = None  # gradients without a first hop
        self.work: CommWork | None = None  # the reduction in flight
        self.output: torch.Tensor | None = None  # result of the reduction: a flat shard
        self.stashed: torch.Tensor | None = None  # sum of the step's earlier micro-batches
        self.views: list[torch.Tensor | None] = []  # views of that sum, one per parameter
        self.saved_grads: list[torch.Tensor | None] | None = None  # gradients before the step
        self.replica_op = dist.ReduceOp.AVG
        self.slices: UnitSlices | None = None  # set if replicas shard the optimizer state
        self.slice_grads: list[torch.Tensor] = []  # reduced slices, flat, per micro-batch

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return _torch.sharded_parameters(self.unit)

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Allocate the input or the output of a reduction, within the limit in flight.

        Without a first hop the input is the output, which saves FSDP2's copy.
        """
        if self.whole is not None:
            whole, self.whole = self.whole, None
            return whole
        self.common.make_room(math.prod(size))
        memory = self.memory.allocate(size, dtype=dtype, device=device)
        if self.reduce_scatter is None:
            self.whole = memory
        return memory

    def reduce_whole(self, gradients: torch.Tensor) -> None:
        """Start reducing ``gradients`` (E,) of a unit that is not sharded; FSDP2's hook."""
        self(gradients, gradients, None, dist.ReduceOp.AVG)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup | None,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Start reducing ``input_tensor`` (ranks * E,) into ``output_tensor`` (E,).

        FSDP2 then makes views of the output the parameters' gradients without reading them. If the
        parameters have gradients already it adds to them, so that the sum must be complete.
        """
        common, earlier = self.common, self.stashed
        last, two_hop = common.last, common.two_hop
        if earlier is None and not last:
            earlier = self.output  # the unit ran twice in this micro-batch
        self.replica_op = dist.ReduceOp.AVG if op == dist.ReduceOp.AVG else dist.ReduceOp.SUM

        def first_hop() -> None:
            if self.reduce_scatter is not None:
                self.reduce_scatter(output_tensor, input_tensor, op)
            if earlier is not None and two_hop:
                output_tensor.add_(earlier)

        def second_hop() -> None:
            if last or not two_hop:
                self.reduce_replicas(output_tensor)
            if earlier is not None and not two_hop:
                output_tensor.add_(earlier)

        self.work = common.thread.submit(reduce=first_hop, second_hop=second_hop)
        common.inflight.append((self.work, input_tensor.numel()))
        self.output = output_tensor
        self.stashed = None
        _torch.after_backward(common.end_backward)
        parameters = self.parameters
        if last:
            common.expose_grads(before=self)
        if not last:
            self.saved_grads = self.saved_grads or [p.grad for p in parameters]
            self.clear_grads()
        elif self.saved_grads is not None:
            for parameter, gradient in zip(parameters, self.saved_grads, strict=True):
                parameter.grad = gradient
            self.saved_grads = None
        if any(p.grad is not None or p._post_accumulate_grad_hooks for p in parameters):
            self.work.wait()

    def clear_grads(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def reduce_replicas(self, total: torch.Tensor) -> None:
        """Run the second hop on ``total``: all-reduce it, or reduce-scatter it into slices."""
        if self.slices is not None:
            shards = self.slices.shards_in(total)
            self.slice_grads.append(self.slices.reduce_scatter(shards, self.replica_op))
        elif self.common.replicas is not None:
            dist.all_reduce(total, op=self.replica_op, group=self.common.replicas)
        if self.common.replica_sum is not None:
            self.common.replica_sum(self.number, total)

    def stash_grads(self) -> None:
        """Take the gradients away: they are partial sums, whose reduction may be in flight."""
        if self.work is not None:
            self.stashed, self.work, self.output = self.output, None, None
            self.views = [p.grad for p in self.parameters]
            self.clear_grads()

    def finish(self) -> None:
        """Wait until the gradients are complete."""
        if self.stashed is not None:
            self.flush()
            self.views = []
        elif self.work is not None:
            work, self.work, self.output, self.views = self.work, None, None, []
            work.wait()
            self.apply_slices()

    def apply_slices(self) -> None:
        """Replace the full gradients by those of the slices."""
        if self.slices is not None:
            self.clear_grads()
            for flat in self.slice_grads:
                self.slices.expose_grads(flat)
            self.slice_grads.clear()

    def flush(self) -> None:
        """Synchronize the stashed sum of a unit that the last micro-batch did not use."""
        total, self.stashed, common = self.stashed, None, self.common
        assert total is not None

        def second_hop() -> None:
            if common.two_hop:
                self.reduce_replicas(total)

        common.thread.submit(second_hop=second_hop).wait()
        saved, self.saved_grads = self.saved_grads or [None] * len(self.views), None
        for parameter, view, gradient in zip(self.parameters, self.views, saved, strict=True):
            if gradient is None:
                parameter.grad = view
            else:
                assert view is not None
                parameter.grad = gradient.add_(view)
        self.apply_slices()

    def abandon(self) -> None:
        """Drop the sums of an unfinished step."""
        self.stashed = self.work = self.output = self.saved_grads = None
        self.whole = None
        self.views = []
        self.slice_grads.clear()
