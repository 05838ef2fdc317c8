"""Gradient reduction beside the backward pass: the first hop, and behind it the second.

Source of the two hops: MiCS (Zhang et al., VLDB 2023), section 3.4. Every unit's gradients are
reduce-scattered in the shard group while the backward pass goes on to the next unit. What the
micro-batches of a step have summed up waits here, out of sight of the optimizer, until the last of
them all-reduces it across replicas; then the gradients appear. FSDP2 itself shards over the shard
axis only and hands every unit's gradients to a `UnitReduction`.
"""

import math
from collections import deque
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from .. import _torch
from .lane import Item, Lane
from .scatter import Scatter

_, _ReduceScatter = _torch.communication_classes()


@dataclass
class Reduction:
    """What the units of one sharded model have in common: where they reduce, and when."""

    lane: Lane
    replicas: dist.ProcessGroup | None  # None: there is one replica
    most: int  # elements whose reductions may be under way at once; one unit's always may
    two_hop: bool = True  # replicas meet once per step, not after every micro-batch
    last: bool = True  # the micro-batch at hand ends the step, or in slices
    units: list["UnitReduction"] = field(default_factory=list)
    under_way: deque[tuple[Item, int]] = field(default_factory=deque)  # elements each, in order

    def make_room(self, elements: int) -> None:
        """Wait for as many reductions, the oldest first, as ``elements`` more ask for."""
        while self.under_way:
            oldest, _ = self.under_way[0]
            fits = elements + sum(each for _, each in self.under_way) <= self.most
            if fits and not oldest.is_completed():
                break
            oldest.wait()
            self.under_way.popleft()

    def appear(self, before: "UnitReduction") -> None:
        """Have what has arrived for units ``before`` this one take the place of what it is of."""
        for unit in self.units:
            done = unit.item is not None and unit.item.is_completed()
            if done and unit.slices is not None and unit is not before:
                unit.finish()

    def end_backward(self) -> None:
        """At the end of every backward pass; may come more than once."""
        for unit in self.units:
            unit.finish() if self.last else unit.hide()

    def abandon(self) -> None:
        """Drop what the micro-batches of an unfinished step have summed up."""
        self.under_way.clear()
        for unit in self.units:
            unit.hidden = unit.item = unit.output = unit.views = unit.aside = None
            unit.arrived.clear()


class UnitReduction(_ReduceScatter):
    """Reduces the gradients of one FSDP2 unit: for its ``set_custom_reduce_scatter``.

    ``scatter`` is over the ranks that share its states; ``memory`` allocates what is reduced.
    """

    def __init__(self, common: Reduction, unit: FSDPModule, scatter: Scatter, memory):
        self.common, self.unit = common, unit
        self.scatter, self.memory = scatter, memory
        common.units.append(self)
        self.item: Item | None = None  # the reduction on its way
        self.output: torch.Tensor | None = None  # and where it goes: a shard, flat
        self.hidden: torch.Tensor | None = None  # sum of the step's earlier micro-batches
        self.views: list[torch.Tensor | None] = []  # of that sum, as the parameters' gradients
        self.aside: list[torch.Tensor | None] | None = None  # gradients from before the step
        self.across = dist.ReduceOp.AVG  # how replicas join theirs
        self.slices = None  # `optimizer_shards.UnitSlices`, where replicas share out the sums
        self.arrived: list[torch.Tensor] = []  # the slices' gradients, flat, as they come

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return _torch.sharded_parameters(self.unit)

    def allocate(self, size, *, dtype, device) -> torch.Tensor:
        """What is reduced, and then what becomes of it."""
        self.common.make_room(math.prod(size))
        return self.memory.allocate(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        """Start reducing ``input_tensor`` (ranks x shard, flat) to ``output_tensor`` (shard).

        FSDP2 then takes views of the output for the parameters' gradients, without reading them,
        unless they have gradients already, to which it adds: then the sum must be there.
        """
        common, before = self.common, self.hidden
        last, two_hop = common.last, common.two_hop
        if before is None and not last:
            before = self.output  # the unit ran twice in this micro-batch
        self.across = dist.ReduceOp.AVG if op == dist.ReduceOp.AVG else dist.ReduceOp.SUM

        def first_hop():
            self.scatter(output_tensor, input_tensor, op)
            if before is not None and two_hop:
                output_tensor.add_(before)

        def second_hop():
            if last or not two_hop:
                self.join_replicas(output_tensor)
            if before is not None and not two_hop:
                output_tensor.add_(before)

        self.item = common.lane.give(reduce=first_hop, second_hop=second_hop)
        common.under_way.append((self.item, input_tensor.numel()))
        self.output = output_tensor
        self.hidden = None
        _torch.after_backward(common.end_backward)
        parameters = self.parameters
        if last:
            common.appear(before=self)
        if not last:
            self.aside = self.aside or [p.grad for p in parameters]
            self.clear()
        elif self.aside is not None:
            for parameter, gradient in zip(parameters, self.aside, strict=True):
                parameter.grad = gradient
            self.aside = None
        if any(p.grad is not None or p._post_accumulate_grad_hooks for p in parameters):
            self.item.wait()

    def clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def join_replicas(self, total: torch.Tensor) -> None:
        """Replicas add up their ``total``, each all of it or, with slices, its slice."""
        if self.slices is not None:
            self.arrived.append(self.slices.scatter(self.slices.shards_in(total), self.across))
        elif self.common.replicas is not None:
            dist.all_reduce(total, op=self.across, group=self.common.replicas)

    def hide(self) -> None:
        """Take the gradients away: they are partial sums, and still on their way."""
        if self.item is not None:
            self.hidden, self.item, self.output = self.output, None, None
            self.views = [p.grad for p in self.parameters]
            self.clear()

    def finish(self) -> None:
        """Wait until the gradients are what they shall be."""
        if self.hidden is not None:
            self.catch_up()
            self.views = []
        elif self.item is not None:
            item, self.item, self.output, self.views = self.item, None, None, []
            item.wait()
            self.share_out()

    def share_out(self) -> None:
        """Put the slices' gradients in the place of the whole ones."""
        if self.slices is not None:
            self.clear()
            for flat in self.arrived:
                self.slices.appear(flat)
            self.arrived.clear()

    def catch_up(self) -> None:
        """Finish the sum of a unit that the last micro-batch has passed by."""
        total, self.hidden, common = self.hidden, None, self.common

        def second_hop():
            if common.two_hop:
                self.join_replicas(total)

        common.lane.give(second_hop=second_hop).wait()
        before, self.aside = self.aside or [None] * len(self.views), None
        for parameter, view, gradient in zip(self.parameters, self.views, before, strict=True):
            parameter.grad = view if gradient is None else gradient.add_(view)
        self.share_out()
