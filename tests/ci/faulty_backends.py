"""Backends with known faults that the collectives benchmark must report."""

import os
import signal

import torch.distributed as dist


class Faulty(dist.ProcessGroup):
    """gloo with a fault injected into each result."""

    def __init__(self, options):
        super().__init__(options.group_rank, options.group_size)
        self.inner = dist.ProcessGroupGloo(
            options.store, options.group_rank, options.group_size, options.timeout
        )

    def getBackendName(self):
        return type(self).__name__

    def all_gather_single(self, output, input, *rest):
        work = self.inner._allgather_base(output, input)
        work.wait()
        self.damage(output)
        return work

    _allgather_base = all_gather_single  # name before torch 2.13

    def allreduce(self, tensors, options):
        work = self.inner.allreduce(tensors, options)
        work.wait()
        self.damage(tensors[0])
        return work


class OffByOne(Faulty):
    """Return a wrong last element."""

    def damage(self, output):
        output[-1] += 1


class Stale(Faulty):
    """Return the result of the previous call."""

    previous = None

    def damage(self, output):
        result = output.clone()
        if self.previous is not None and self.previous.numel() == result.numel():
            output.copy_(self.previous)
        self.previous = result


class Dying(Faulty):
    """Kill rank 1 in the first call."""

    def damage(self, output):
        if self.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


for name, kind in {"off_by_one": OffByOne, "stale": Stale, "dying": Dying}.items():
    dist.Backend.register_backend(
        name, lambda options, _, kind=kind: kind(options), extended_api=True, devices=["cpu"]
    )
