"""Process group of any size in a single process; all other ranks mirror this one.

A sum is this rank's tensor times the number of ranks, and an all-gather returns copies of it.
Collectives of fake tensors change nothing. torch's own "fake" backend leaves outputs undefined,
which breaks steps that read values exchanged between ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from ... import _torch

BACKEND = "nearlinear_alike"


class CompletedWork(dist.Work):
    """A `Work` that is already complete."""

    def wait(self, timeout=None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class MirrorGroup(dist.ProcessGroup):
    """This rank's group, of ``world`` mirrored ranks."""

    observer: Callable[[MirrorGroup, torch.Tensor], None] | None = None
    """Called with the group and every tensor of a collective."""

    def __init__(self, rank: int, world: int):
        super().__init__(rank, world)  # pyright: ignore[reportCallIssue] - torch's stub lacks this overload
        self._rank, self._world = rank, world

    def size(self) -> int:
        return self._world

    @property
    def group_name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] - torch reads it
        return _torch.name_of_group(self)

    pg_name = group_name

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return BACKEND

    def __repr__(self) -> str:
        return f"MirrorGroup(rank {self._rank} of {self._world})"

    def _observe(self, *tensors: torch.Tensor) -> bool:
        """Report ``tensors`` to the observer; return whether they have values."""
        if MirrorGroup.observer is not None:
            for tensor in tensors:
                MirrorGroup.observer(self, tensor)
        return not any(map(_torch.is_fake, tensors))

    def _reduce(self, tensor: torch.Tensor, options) -> None:
        if options.reduceOp == dist.ReduceOp.SUM:
            tensor.mul_(self._world)

    def allreduce(self, tensors, opts=None) -> CompletedWork:
        opts = opts or dist.AllreduceOptions()
        for tensor in tensors:
            if self._observe(tensor):
                self._reduce(tensor, opts)
        return CompletedWork()

    def broadcast(self, tensors, opts=None) -> CompletedWork:
        self._observe(*tensors)
        return CompletedWork()

    def barrier(self, opts=None) -> CompletedWork:
        return CompletedWork()

    def allgather(self, outputs, inputs, opts=None) -> CompletedWork:
        for parts, mine in zip(outputs, inputs, strict=True):
            if self._observe(mine, *parts):
                for part in parts:
                    part.copy_(mine)
        return CompletedWork()

    def all_gather_single(self, output, mine, opts=None) -> CompletedWork:
        if self._observe(output, mine):
            output.view(self._world, -1).copy_(mine.reshape(1, -1))
        return CompletedWork()

    def reduce_scatter_single(self, output, mine, opts=None) -> CompletedWork:
        if self._observe(output, mine):
            output.view(-1).copy_(mine.view(self._world, -1)[self._rank])
            self._reduce(output, opts or dist.ReduceScatterOptions())
        return CompletedWork()

    def send(self, tensors, to, tag=0) -> CompletedWork:
        self._observe(*tensors)
        return CompletedWork()

    def recv(self, tensors, of, tag=0) -> CompletedWork:
        """Receive ones: torch's pipelines exchange integers as votes, which must all agree."""
        if self._observe(*tensors):
            for tensor in tensors:
                tensor.fill_(1)
        return CompletedWork()

    def all_to_all_single(self, output, mine, to=None, of=None, opts=None) -> CompletedWork:
        if self._observe(output, mine):
            parts = list(mine.split(of)) if of else list(mine.chunk(self._world))
            output.copy_(torch.cat([parts[self._rank]] * self._world))
        return CompletedWork()

    # names before torch 2.13; torch's stubs declare other parameter names
    _allgather_base = all_gather_single  # pyright: ignore[reportAssignmentType] - see above
    _reduce_scatter_base = reduce_scatter_single  # pyright: ignore[reportAssignmentType] - see above
    alltoall_base = all_to_all_single  # pyright: ignore[reportAssignmentType] - see above


def _create(store, rank: int, world: int, timeout) -> MirrorGroup:
    return MirrorGroup(rank, world)


dist.Backend.register_backend(BACKEND, _create, devices=["cpu"])
