"""Workloads and buffer patterns: sizes, checked data, and the calls that are timed.

Sizes are those of nccl-tests: the output of an all-gather, the input of a reduce-scatter, the
buffer of an all-reduce. `all_reduce` of torch.distributed works in place in every pattern.

Every measured size is checked. Element i of a rank's tensor is entry ``i + 101 * rank + 37 * salt``
of a table of 1009 small integers, repeated. 1009 is prime, so a misplaced block shows up. The salt
changes with every check, so a stale result shows up. Sums are exact while the data type can hold
them; averages may differ by its rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ci.benchmarks.collectives import options
from ci.benchmarks.collectives.backends import Contender
from nearlinear_collectives.c10d_compat import all_gather_single, reduce_scatter_single

PERIOD = 1009
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in options.DTYPES}
_LARGEST_EXACT = {torch.bfloat16: 256, torch.float16: 2048, torch.int8: 127, torch.uint8: 255}
_IN_PLACE = ("all_reduce", "reduce")  # of one buffer
_REDUCE = ("reduce_scatter", *_IN_PLACE)
_MESSAGES = ("send", "ring")
_ROWS = 4096  # compared at a time, with 4 MiB of flags


@dataclass(frozen=True)
class CheckedData:
    """Inputs and expected results of one data type and reduction over ``ranks`` ranks."""

    dtype: torch.dtype
    ranks: int
    reduce: str = "sum"

    def fill(self, tensor: torch.Tensor, rank: int, salt: int, reduced: bool) -> None:
        """Write the input of ``rank``.

        Args:
            tensor: Contiguous tensor to fill.
            rank: Rank the input belongs to.
            salt: Number of the check.
            reduced: Whether the input is summed over ranks, which needs smaller numbers.
        """
        self._write(tensor, self._row(rank, salt, reduced).to(self.dtype))

    def wrong_parts(
        self, output: torch.Tensor, salt: int, senders: Sequence[int], start: int = 0
    ) -> int:
        """Count the wrong elements of parts that ranks sent.

        Args:
            output: The parts, one after the other.
            salt: Number of the check.
            senders: Their ranks.
            start: Index of a part's first element in the sender's input.
        """
        rows = [torch.roll(self._row(rank, salt, False), -start) for rank in senders]
        parts = output.view(len(senders), -1)
        return sum(
            self._count_different(part, row.to(self.dtype), 0.0)
            for part, row in zip(parts, rows, strict=True)
        )

    def wrong_reduce(self, output: torch.Tensor, salt: int, start: int = 0) -> int:
        """Count the wrong elements of a reduction's output.

        Args:
            output: Result, or a rank's shard of it.
            salt: Number of the check.
            start: Index of the output's first element in the inputs.
        """
        inputs = torch.stack([self._row(rank, salt, True) for rank in range(self.ranks)])
        exact = {
            "sum": inputs.sum(0),
            "avg": inputs.sum(0).double() / self.ranks,
            "min": inputs.amin(0),
            "max": inputs.amax(0),
        }[self.reduce]
        tolerance = 0.0  # integers wrap around identically everywhere
        if self.dtype.is_floating_point and self.reduce in ("sum", "avg"):
            exceeds = inputs.sum(0).max() > _LARGEST_EXACT.get(self.dtype, 2**24)
            roundings = self.ranks if exceeds else 2 if self.reduce == "avg" else 0
            tolerance = roundings * torch.finfo(self.dtype).eps
        return self._count_different(output, torch.roll(exact, -start).to(self.dtype), tolerance)

    def _row(self, rank: int, salt: int, reduced: bool) -> torch.Tensor:
        limit = _LARGEST_EXACT.get(self.dtype, 256)
        if reduced and self.reduce in ("sum", "avg"):
            limit = max(1, limit // self.ranks)
        generator = torch.Generator().manual_seed(PERIOD)
        table = torch.randint(1, limit + 1, (PERIOD,), generator=generator)
        return torch.roll(table, -(101 * rank + 37 * salt))

    def _write(self, tensor: torch.Tensor, row: torch.Tensor) -> None:
        whole = tensor.numel() // PERIOD * PERIOD
        tensor[:whole].view(-1, PERIOD).copy_(row)
        tensor[whole:].copy_(row[: tensor.numel() - whole])

    def _count_different(self, tensor: torch.Tensor, row: torch.Tensor, tolerance: float) -> int:
        whole = tensor.numel() // PERIOD * PERIOD
        parts = [*tensor[:whole].view(-1, PERIOD).split(_ROWS), tensor[whole:]]
        wrong = 0
        for part in parts:
            wanted = row[: part.shape[-1]]
            if tolerance:  # in a form that counts NaN as wrong
                wrong += int((~((part - wanted).abs() <= tolerance * wanted.abs())).sum())
            else:
                wrong += int((part != wanted).sum())
        return wrong


def poison(tensor: torch.Tensor) -> None:
    """Fill an output with a value that no collective of `CheckedData` produces."""
    tensor.fill_(float("nan") if tensor.is_floating_point() else 0)


@dataclass(frozen=True)
class Workload:
    """A single operation of one size, as seen by one rank."""

    operation: str
    count: int
    """Elements per rank, or of the buffer of an all_reduce, a reduce or a message."""
    dtype: torch.dtype
    reduce: str
    rank: int
    ranks: int

    @classmethod
    def from_size(
        cls, operation: str, size: int, dtype: torch.dtype, reduce: str, rank: int, ranks: int
    ) -> Workload:
        """Return the largest workload of at most ``size`` bytes, with at least one element."""
        parts = 1 if operation in (*_IN_PLACE, *_MESSAGES) else ranks
        count = max(1, size // dtype.itemsize // parts)
        return cls(operation, count, dtype, reduce, rank, ranks)

    @property
    def total(self) -> int:
        return self.count * (1 if self.operation in (*_IN_PLACE, *_MESSAGES) else self.ranks)

    @property
    def bytes(self) -> int:
        return self.total * self.dtype.itemsize

    @property
    def bus_factor(self) -> float:
        """Bus bandwidth over algorithm bandwidth, as defined by nccl-tests."""
        if self.operation in ("reduce", *_MESSAGES):
            return 1.0
        return (2 if self.operation == "all_reduce" else 1) * (self.ranks - 1) / self.ranks

    @property
    def reduces(self) -> bool:
        return self.operation in _REDUCE

    @property
    def input_count(self) -> int:
        """Elements of this rank's separate input, 0 for an operation in place."""
        whole = self.operation in ("reduce_scatter", "all_to_all", "scatter")
        return 0 if self.operation in _IN_PLACE else self.total if whole else self.count

    @property
    def output_count(self) -> int:
        return self.count if self.operation in ("reduce_scatter", "scatter") else self.total

    @property
    def data(self) -> CheckedData:
        return CheckedData(self.dtype, self.ranks, self.reduce)

    def empty(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=self.dtype)

    def shard(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor of all ranks."""
        return full[self.rank * self.count : (self.rank + 1) * self.count]

    def run(self, output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Call the operation; those that work in place ignore ``input``."""
        reduce = getattr(dist.ReduceOp, self.reduce.upper())
        is_root = self.rank == 0
        if self.operation == "all_gather":
            all_gather_single(output, input, group=group)
        elif self.operation == "reduce_scatter":
            reduce_scatter_single(output, input, op=reduce, group=group)
        elif self.operation == "all_reduce":
            dist.all_reduce(output, op=reduce, group=group)
        elif self.operation == "all_to_all":
            dist.all_to_all_single(output, input, group=group)
        elif self.operation == "gather":
            parts = list(output.view(self.ranks, -1)) if is_root else None
            dist.gather(input, parts, dst=0, group=group)
        elif self.operation == "scatter":
            parts = list(input.view(self.ranks, -1)) if is_root else None
            dist.scatter(output, parts, src=0, group=group)
        elif self.operation == "reduce":
            dist.reduce(output, dst=0, op=reduce, group=group)
        elif self.operation == "send":
            if not is_root:
                dist.recv(output, group=group, group_src=self.rank - 1)
            if self.rank < self.ranks - 1:
                sent = input if is_root else output
                dist.send(sent, group=group, group_dst=self.rank + 1)
        else:
            after, before = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
            send = dist.P2POp(dist.isend, input, group=group, group_peer=after)
            receive = dist.P2POp(dist.irecv, output, group=group, group_peer=before)
            for work in dist.batch_isend_irecv([send, receive]):
                work.wait()

    def wrong(self, output: torch.Tensor, salt: int) -> int:
        """Count the wrong elements of this rank's output."""
        if self.operation in ("gather", "reduce") and self.rank != 0:
            return 0  # only the root has a result
        if self.operation == "send" and self.rank == 0:
            return 0
        if self.operation in _MESSAGES:
            sender = 0 if self.operation == "send" else (self.rank - 1) % self.ranks
            return self.data.wrong_parts(output, salt, [sender])
        if self.operation in ("all_gather", "gather"):
            return self.data.wrong_parts(output, salt, range(self.ranks))
        if self.operation in ("all_to_all", "scatter"):
            senders = range(self.ranks) if self.operation == "all_to_all" else [0]
            return self.data.wrong_parts(output, salt, senders, self.rank * self.count)
        start = self.rank * self.count if self.operation == "reduce_scatter" else 0
        return self.data.wrong_reduce(output, salt, start)


class OutOfPlace:
    """Separate input and output, with the same buffers in every call."""

    operations: tuple[str, ...] = options.OPERATIONS

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.output = workload.empty(workload.output_count)
        self.input = self.output
        if workload.input_count:
            self.input = workload.empty(workload.input_count)

    def fill(self, salt: int) -> None:
        """Write new data before a call that is checked."""
        poison(self.output)
        workload = self.workload
        workload.data.fill(self.input, workload.rank, salt, workload.reduces)

    def prepare_timing(self) -> None:
        """Zero buffers in which repeated in-place reductions would overflow."""
        if self.input.data_ptr() == self.output.data_ptr():
            self.output.zero_()

    def call(self, contender: Contender) -> torch.Tensor:
        """Make the timed call and return its output."""
        self.workload.run(self.output, self.input, contender.group)
        return self.output

    @staticmethod
    def memory(workload: Workload) -> int:
        """Return the bytes a rank needs, excluding the backend's internal buffers."""
        return (workload.input_count + workload.output_count) * workload.dtype.itemsize


class InPlace(OutOfPlace):
    """The input is this rank's part of the output; for reduce_scatter the reverse."""

    operations = options.SHARDING

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        full = workload.empty(workload.total)
        self.output = workload.shard(full) if workload.operation == "reduce_scatter" else full
        self.input = workload.shard(full) if workload.operation == "all_gather" else full
        self.full = full

    def prepare_timing(self) -> None:
        self.full.zero_()

    @staticmethod
    def memory(workload: Workload) -> int:
        return workload.bytes


class Fsdp:
    """FSDP2's calls for one layer, in the best memory that the backend offers.

    all_gather: allocate the output, copy the shard into its place, gather in place, free.
    reduce_scatter: allocate the input, copy the gradients in, allocate the output, reduce, free.
    """

    operations: tuple[str, ...] = ("all_gather", "reduce_scatter")

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        gathers = workload.operation == "all_gather"
        # the shard, or the gradients
        self.source = workload.empty(workload.count if gathers else workload.total)

    def fill(self, salt: int) -> None:
        workload = self.workload
        reduced = workload.operation == "reduce_scatter"
        workload.data.fill(self.source, workload.rank, salt, reduced)

    def prepare_timing(self) -> None:
        """Do nothing: every call copies its input from `source`."""

    def allocate(self, contender: Contender, count: int) -> torch.Tensor:
        return contender.allocate(count, self.workload.dtype)

    def allocate_gathered(self, contender: Contender, count: int) -> torch.Tensor:
        return contender.allocate_gathered(count, self.workload.dtype)

    def call(self, contender: Contender) -> torch.Tensor:
        workload = self.workload
        if workload.operation == "all_gather":
            full = self.allocate_gathered(contender, workload.total)
            shard = workload.shard(full)
            shard.copy_(self.source)
            workload.run(full, shard, contender.group)
            return full
        full = self.allocate(contender, workload.total)
        full.copy_(self.source)
        output = self.allocate(contender, workload.count)
        workload.run(output, full, contender.group)
        return output

    @staticmethod
    def memory(workload: Workload) -> int:
        return 2 * workload.bytes + workload.bytes // workload.ranks


class FsdpPool(Fsdp):
    """`Fsdp` with the pool alone, which FSDP2 uses after one setter call."""

    def allocate_gathered(self, contender: Contender, count: int) -> torch.Tensor:
        return self.allocate(contender, count)


class FsdpEmpty(FsdpPool):
    """`Fsdp` with torch.empty for every backend, FSDP2's default."""

    def allocate(self, contender: Contender, count: int) -> torch.Tensor:
        return self.workload.empty(count)


class FsdpRead(Fsdp):
    """`Fsdp`, after which every rank reads the output once, as FSDP2's copy-out does.

    Exposes the cost that a backend only defers when it hands out memory instead of moving bytes.
    """

    operations = ("all_gather",)

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self.copied_out = workload.empty(workload.total)

    def call(self, contender: Contender) -> torch.Tensor:
        full = super().call(contender)
        self.copied_out.copy_(full)
        return self.copied_out


Pattern = OutOfPlace | Fsdp
PATTERNS: dict[str, type[Pattern]] = {
    "plain": OutOfPlace,
    "in_place": InPlace,
    "fsdp": Fsdp,
    "fsdp_pool": FsdpPool,
    "fsdp_empty": FsdpEmpty,
    "fsdp_read": FsdpRead,
}
