"""A process group of any size with one rank in it, whose others all have what this one has.

So a sum is as many times this rank's tensor as there are ranks, and what is gathered are copies of
it. Collectives of tensors without memory change nothing. torch's own "fake" backend leaves garbage
where it should have answered, which stops a step that looks at what ranks tell one another.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from ... import _torch

BACKEND = "nearlinear_alike"

ADDS_UP = dist.ReduceOp.SUM


class Done(dist.Work):
    """What has ended before it began."""

    def wait(self, timeout=None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class AlikeGroup(dist.ProcessGroup):
    """This rank's group, of ``world`` ranks."""

    seen: Callable[[AlikeGroup, torch.Tensor], None] | None = None
    """called with every group and tensor that travels"""

    def __init__(self, rank: int, world: int):
        super().__init__(rank, world)
        self._rank, self._world = rank, world

    def size(self) -> int:
        return self._world

    @property
    def group_name(self) -> str:
        return _torch.name_of_group(self)

    pg_name = group_name

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return BACKEND

    def __repr__(self) -> str:
        return f"AlikeGroup(rank {self._rank} of {self._world})"

    def _travel(self, *tensors: torch.Tensor) -> bool:
        """Show what travels; whether there is anything in it."""
        if AlikeGroup.seen is not None:
            for tensor in tensors:
                AlikeGroup.seen(self, tensor)
        return not any(map(_torch.is_fake, tensors))

    def _summed(self, tensor: torch.Tensor, options) -> None:
        if options.reduceOp == ADDS_UP:
            tensor.mul_(self._world)

    def allreduce(self, tensors, opts=None) -> Done:
        opts = opts or dist.AllreduceOptions()
        for tensor in tensors:
            if self._travel(tensor):
                self._summed(tensor, opts)
        return Done()

    def broadcast(self, tensors, opts=None) -> Done:
        self._travel(*tensors)
        return Done()

    def barrier(self, opts=None) -> Done:
        return Done()

    def allgather(self, outputs, inputs, opts=None) -> Done:
        for parts, mine in zip(outputs, inputs, strict=True):
            if self._travel(mine, *parts):
                for part in parts:
                    part.copy_(mine)
        return Done()

    def all_gather_single(self, output, mine, opts=None) -> Done:
        if self._travel(output, mine):
            output.view(self._world, -1).copy_(mine.reshape(1, -1))
        return Done()

    def reduce_scatter_single(self, output, mine, opts=None) -> Done:
        if self._travel(output, mine):
            output.view(-1).copy_(mine.view(self._world, -1)[self._rank])
            self._summed(output, opts or dist.ReduceScatterOptions())
        return Done()

    def send(self, tensors, to, tag=0) -> Done:
        self._travel(*tensors)
        return Done()

    def recv(self, tensors, of, tag=0) -> Done:
        """Whole numbers that come are votes, which all agree (torch's pipelines ask for them)."""
        if self._travel(*tensors):
            for tensor in tensors:
                tensor.fill_(1)
        return Done()

    def all_to_all_single(self, output, mine, to=None, of=None, opts=None) -> Done:
        if self._travel(output, mine):
            parts = list(mine.split(of)) if of else list(mine.chunk(self._world))
            output.copy_(torch.cat([parts[self._rank]] * self._world))
        return Done()

    _allgather_base = all_gather_single  # what torch called them before 2.13
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


def _create(store, rank: int, world: int, timeout) -> AlikeGroup:
    return AlikeGroup(rank, world)


dist.Backend.register_backend(BACKEND, _create, devices=["cpu"])
