"""How a collective is called: with buffers that are there, in place, or as FSDP2 does per layer.

Sizes are nccl-tests': an all-gather's whole output, a reduce-scatter's whole input, an
all-reduce's buffer. `all_reduce` of torch.distributed works in place in every pattern.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..c10d_names import all_gather_single, reduce_scatter_single
from .backends import Contender
from .data import Data, poison

OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class Job:
    """One operation of one size; ``count`` elements on each rank, all_reduce: in all."""

    operation: str
    count: int
    dtype: torch.dtype
    reduce: str
    rank: int
    ranks: int

    @classmethod
    def of_size(cls, operation: str, size: int, dtype, reduce: str, rank: int, ranks: int):
        """The job of at most ``size`` bytes that gives each rank whole elements, at least one."""
        per_rank = 1 if operation == "all_reduce" else ranks
        count = max(1, size // dtype.itemsize // per_rank)
        return cls(operation, count, dtype, reduce, rank, ranks)

    @property
    def total(self) -> int:
        return self.count * (1 if self.operation == "all_reduce" else self.ranks)

    @property
    def bytes(self) -> int:
        return self.total * self.dtype.itemsize

    @property
    def bus_factor(self) -> float:
        """nccl-tests' bus bandwidth over algorithm bandwidth: what ideal links must carry."""
        return (2 if self.operation == "all_reduce" else 1) * (self.ranks - 1) / self.ranks

    @property
    def data(self) -> Data:
        return Data(self.dtype, self.ranks, self.reduce)

    def empty(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=self.dtype)

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor of all ranks."""
        return whole[self.rank * self.count : (self.rank + 1) * self.count]

    def run(self, output: torch.Tensor, input: torch.Tensor, group) -> None:
        reduce = getattr(dist.ReduceOp, self.reduce.upper())
        if self.operation == "all_gather":
            all_gather_single(output, input, group=group)
        elif self.operation == "reduce_scatter":
            reduce_scatter_single(output, input, op=reduce, group=group)
        else:
            dist.all_reduce(output, op=reduce, group=group)

    def wrong(self, output: torch.Tensor, salt: int) -> int:
        if self.operation == "all_gather":
            return self.data.wrong_gather(output, salt)
        start = self.rank * self.count if self.operation == "reduce_scatter" else 0
        return self.data.wrong_reduce(output, salt, start)


class Plain:
    """Out of place, with the same buffers in every call."""

    operations = OPERATIONS

    def __init__(self, job: Job):
        self.job = job
        self.input = job.empty(
            {"all_gather": job.count, "reduce_scatter": job.total, "all_reduce": 0}[job.operation]
        )
        self.output = job.empty(job.count if job.operation == "reduce_scatter" else job.total)
        if job.operation == "all_reduce":
            self.input = self.output

    def fill(self, salt: int) -> None:
        """Fresh data, before a call that is checked."""
        poison(self.output)
        self.job.data.fill(self.input, self.job.rank, salt, self.job.operation != "all_gather")

    def rest(self) -> None:
        """Data for timed calls: zeros where results are inputs again and would grow."""
        if self.input.data_ptr() == self.output.data_ptr():
            self.output.zero_()

    def call(self, contender: Contender) -> torch.Tensor:
        """One call, as it is timed; its output."""
        self.job.run(self.output, self.input, contender.group)
        return self.output

    @staticmethod
    def memory(job: Job) -> int:
        """Bytes a rank needs, without what backends need inside."""
        return job.bytes + (0 if job.operation == "all_reduce" else job.bytes // job.ranks)


class InPlace(Plain):
    """The input is the rank's own part of the output, or the other way round."""

    def __init__(self, job: Job):
        self.job = job
        whole = job.empty(job.total)
        self.output = job.own(whole) if job.operation == "reduce_scatter" else whole
        self.input = job.own(whole) if job.operation == "all_gather" else whole
        self.whole = whole

    def rest(self) -> None:
        self.whole.zero_()

    @staticmethod
    def memory(job: Job) -> int:
        return job.bytes


class Fsdp:
    """FSDP2's calls for one layer, with the best memory that the backend has for each.

    all_gather: allocate the output, copy the own shard into its place, gather in place, free.
    reduce_scatter: allocate the input, copy the gradients in, allocate the output, reduce, free.
    """

    operations = ("all_gather", "reduce_scatter")

    def __init__(self, job: Job):
        self.job = job
        gathers = job.operation == "all_gather"
        self.source = job.empty(job.count if gathers else job.total)  # shard, or gradients

    def fill(self, salt: int) -> None:
        self.job.data.fill(self.source, self.job.rank, salt, self.job.operation == "reduce_scatter")

    def rest(self) -> None:
        pass

    def allocate(self, contender: Contender, count: int) -> torch.Tensor:
        return contender.allocate(count, self.job.dtype)

    def allocate_gathered(self, contender: Contender, count: int) -> torch.Tensor:
        return contender.allocate_gathered(count, self.job.dtype)

    def call(self, contender: Contender) -> torch.Tensor:
        job = self.job
        if job.operation == "all_gather":
            whole = self.allocate_gathered(contender, job.total)
            own = job.own(whole)
            own.copy_(self.source)
            job.run(whole, own, contender.group)
            return whole
        whole = self.allocate(contender, job.total)
        whole.copy_(self.source)
        output = self.allocate(contender, job.count)
        job.run(output, whole, contender.group)
        return output

    @staticmethod
    def memory(job: Job) -> int:
        return 2 * job.bytes + job.bytes // job.ranks


class FsdpPool(Fsdp):
    """The same with the pool alone, which is what FSDP2 itself can be told to use."""

    def allocate_gathered(self, contender: Contender, count: int) -> torch.Tensor:
        return self.allocate(contender, count)


class FsdpEmpty(FsdpPool):
    """The same with torch.empty for every backend: FSDP2 as long as nobody tells it otherwise."""

    def allocate(self, contender: Contender, count: int) -> torch.Tensor:
        return self.job.empty(count)


class FsdpRead(Fsdp):
    """``fsdp`` and then every rank reads the whole output once, as FSDP2's copy-out does.

    It shows what a backend only put off that hands out memory instead of moving bytes.
    """

    operations = ("all_gather",)

    def __init__(self, job: Job):
        super().__init__(job)
        self.copied_out = job.empty(job.total)

    def call(self, contender: Contender) -> torch.Tensor:
        whole = super().call(contender)
        self.copied_out.copy_(whole)
        return self.copied_out

    @staticmethod
    def memory(job: Job) -> int:
        return 2 * job.bytes + job.bytes // job.ranks


PATTERNS = {
    "plain": Plain,
    "in_place": InPlace,
    "fsdp": Fsdp,
    "fsdp_pool": FsdpPool,
    "fsdp_empty": FsdpEmpty,
    "fsdp_read": FsdpRead,
}
