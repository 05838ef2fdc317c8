"""Collectives beyond torch's: hierarchical, lean and differentiable ones; a count of collectives.

Tensors hold the parts of the ranks along their first dim, in rank order.

``with count_collectives() as counts: ...`` works on real process groups, whose ``c10d`` operators
pass torch's dispatcher, and on ranks that are threads, which call `report_collective`. Bytes are
those of the larger side of the call: the output of an all-gather, the input of a reduce-scatter.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from .._torch import TorchDispatchMode, all_gather, reduce_scatter
from .mesh import Mesh

_KINDS = {
    "reduce_scatter": "reduce_scatter",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "scatter": "scatter",
    "gather": "gather",
    "reduce": "reduce",
    "send": "send",
    "recv": "recv",
}
_active = threading.local()


class count_collectives:  # noqa: N801 (a context manager, named as the verb it is)
    """Count collectives while the context is open.

    Example::

        with nl.count_collectives() as counts:
            model(**batch).loss.backward()
        print(counts.calls["all_gather"], counts.bytes["all_gather"])
    """

    def __init__(self):
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._pending = []
        self._mode = _Operators(self)

    def __enter__(self) -> count_collectives:
        _open_counters().append(self)
        self._mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)
        _open_counters().remove(self)
        for done in self._pending:
            done.wait()
        self._pending.clear()

    def expect(self, done: threading.Event) -> None:
        """Wait for ``done`` before closing, since another thread counts here until then."""
        self._pending.append(done)

    def add(self, kind: str, size: int) -> None:
        self.calls[kind] += 1
        self.bytes[kind] += size

    def __repr__(self) -> str:
        return ", ".join(f"{self.calls[k]} {k} ({self.bytes[k]} B)" for k in sorted(self.calls))


def open_counters() -> list[count_collectives]:
    """Return the counters open on this thread, to count on another thread with `count_here_too`."""
    return list(_open_counters())


@contextlib.contextmanager
def count_here_too(counters: list[count_collectives]):
    """Count on this thread with counters that were opened on another one."""
    with contextlib.ExitStack() as modes:
        for counter in counters:
            modes.enter_context(_Operators(counter))
        yield


def report_collective(operator: str, *tensors) -> None:
    """Report one collective that bypasses the dispatcher to the open counters of this thread."""
    for counter in _open_counters():
        counter.add(_kind_of(operator), _largest(tensors))


def _open_counters() -> list:
    if not hasattr(_active, "counters"):
        _active.counters = []
    return _active.counters


def _kind_of(operator: str) -> str:
    return next((kind for part, kind in _KINDS.items() if part in operator), operator)


def _largest(tree) -> int:
    """Return the bytes of the largest argument; a list of tensors counts as one argument."""

    def size(item) -> int:
        if isinstance(item, torch.Tensor):
            return item.numel() * item.element_size()
        return sum(map(size, item)) if isinstance(item, list | tuple) else 0

    return max(map(size, tree), default=0)


class _Operators(TorchDispatchMode):
    """Dispatch mode that reports ``c10d`` operators to ``counter``."""

    def __init__(self, counter: count_collectives):
        super().__init__()
        self.counter = counter

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counter.add(_kind_of(func.overloadpacket.__name__), _largest(args))
        return func(*args, **(kwargs or {}))


log = logging.getLogger(__name__)


class Allocator(Protocol):
    """Source of the buffers of a collective."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class Hierarchy:
    """A process group divided by nodes, for collectives in two stages.

    A rank's shard crosses the network to another node once either way. In two stages it is sent by
    the rank with the same index on that node, and the rest is exchanged inside the node. The ranks
    of the whole group are ordered node by node.
    """

    inter_node: dist.ProcessGroup
    """Ranks with this rank's index on every node."""
    intra_node: dist.ProcessGroup
    """Ranks of this node."""
    ranks_per_node: int

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """All-gather ``input`` (E,) of every rank into ``output`` (ranks * E,).

        The input may be a view of the output. Both stages write to the final positions, so that
        nothing is shuffled afterwards. Source: MiCS (Zhang et al. 2022, arXiv:2205.00119).
        """
        parts = output.view(-1, self.ranks_per_node, input.numel())  # (nodes, ranks of one, E)
        index = self.intra_node.rank()
        dist.all_gather(list(parts[:, index]), input, group=self.inter_node)
        for node in parts:
            all_gather(node.view(-1), node[index], group=self.intra_node)


def split_by_node(
    mesh: Mesh, rank: int, axis: str = "sharing"
) -> tuple[list[int], list[int]] | None:
    """Return the inter-node and the intra-node ranks of ``rank``'s group on ``axis``.

    None if two stages make no sense: one node, one rank per node, or nodes with different numbers
    of the group's ranks.
    """
    nodes: dict[int, list[int]] = {}
    for member in mesh.group(axis, rank):
        nodes.setdefault(mesh.node(member), []).append(member)
    counts = {len(members) for members in nodes.values()}
    if len(nodes) < 2 or len(counts) > 1 or counts == {1}:
        return None
    intra_node = nodes[mesh.node(rank)]
    index = intra_node.index(rank)
    return [members[index] for members in nodes.values()], intra_node


_TIMED_ROUNDS = 3


BACKEND_ALIASES: dict[str, str] = {}
"""Names of c10d backends that were registered for another one, such as "smddp"."""


def backend_of(group: dist.ProcessGroup | None = None) -> str:
    """Return the name of the backend of ``group``, resolved by `BACKEND_ALIASES`."""
    name = dist.get_backend(group)
    return BACKEND_ALIASES.get(name, name)


def is_hierarchy_faster(
    hierarchy: Hierarchy,
    group: dist.ProcessGroup,
    memory: Allocator,
    sizes: list[tuple[int, torch.dtype]],
    device: torch.device,
) -> list[bool]:
    """Measure, for each (elements, dtype) a rank sends, whether two stages beat one.

    A collective call. The slowest rank decides, so that all ranks return the same.
    """
    times: dict[tuple[int, torch.dtype], list[float]] = {}
    for elements, dtype in dict.fromkeys(size for size in sizes if size[0]):
        output = memory.allocate((elements * group.size(),), dtype=dtype, device=device)
        mine = output.view(-1, elements)[group.rank()].zero_()
        gathers = (
            lambda output=output, mine=mine: all_gather(output, mine, group=group),
            lambda output=output, mine=mine: hierarchy.all_gather(output, mine),
        )
        seconds = torch.tensor(
            _time_alternately(gathers, device), dtype=torch.float64, device=device
        )
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        times[elements, dtype] = seconds.tolist()
    for (elements, dtype), (flat, staged) in times.items():
        log.info(
            "all-gather of %.1f MiB: %.1f ms in one stage, %.1f ms in two (across nodes first)",
            elements * group.size() * dtype.itemsize / 2**20,
            flat * 1e3,
            staged * 1e3,
        )
    return [size in times and times[size][1] < times[size][0] for size in sizes]


def _time_alternately(
    functions: Sequence[Callable[[], object]], device: torch.device
) -> list[float]:
    """Return the median seconds of each function, after one warm-up round."""
    seconds: list[list[float]] = [[] for _ in functions]
    for _ in range(1 + _TIMED_ROUNDS):
        for function, taken in zip(functions, seconds, strict=True):
            dist.barrier()
            begin = time.perf_counter()
            function()
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            taken.append(time.perf_counter() - begin)
    return [statistics.median(taken[1:]) for taken in seconds]


class ReduceScatter:
    """Reduce-scatter over ``group`` that sends no more bytes than necessary.

    gloo's own is an all-reduce and sends every rank's part to all ranks: 24.1 MiB per NIC for a
    buffer of 16 MiB on 4 nodes, where 12.0 suffice. On gloo the ranks therefore exchange the parts,
    and each sums its own; with a ``hierarchy`` inside the nodes first. Other backends keep theirs.
    """

    def __init__(self, group: dist.ProcessGroup, hierarchy: Hierarchy | None = None):
        self.group, self.hierarchy = group, hierarchy
        self.by_exchange = backend_of(group) == "gloo"

    def __call__(
        self, output: torch.Tensor, input: torch.Tensor, op: dist.ReduceOp.RedOpType
    ) -> None:
        """Reduce ``input`` (ranks * E,) by SUM or AVG into this rank's ``output`` (E,)."""
        if not self.by_exchange:
            reduce_scatter(output, input, op=op, group=self.group)
            return
        if self.hierarchy is None:
            _exchange(output, input, self.group)
        else:
            self._reduce_nodes_first(self.hierarchy, output, input)
        if op == dist.ReduceOp.AVG:
            output.div_(self.group.size())

    def _reduce_nodes_first(
        self, hierarchy: Hierarchy, output: torch.Tensor, input: torch.Tensor
    ) -> None:
        """Send the sum of a node across its NIC, not the parts of each of its ranks."""
        nodes, width = hierarchy.inter_node.size(), hierarchy.ranks_per_node
        by_index = input.view(nodes, width, -1).transpose(0, 1).contiguous().view(-1)
        node_sum = by_index.new_empty(nodes * output.numel())
        _exchange(node_sum, by_index, hierarchy.intra_node)
        _exchange(output, node_sum, hierarchy.inter_node)


def _exchange(output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum the parts of all ranks' ``input`` (ranks * E,) for this rank into ``output`` (E,)."""
    parts = torch.empty_like(input)
    dist.all_to_all_single(parts, input, group=group)
    torch.sum(parts.view(group.size(), -1), dim=0, out=output)


GradTransform = Callable[[torch.Tensor], torch.Tensor]


def transform_grad(tensor: torch.Tensor, transform: GradTransform) -> torch.Tensor:
    """Return ``tensor`` as a new tensor whose gradient flows back as ``transform(gradient)``.

    Not a hook on ``tensor``: its other users get their gradient unchanged.
    """
    return _TransformGrad.apply(tensor, transform)


class _TransformGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, transform):
        ctx.transform = transform
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.transform(gradient), None


def all_gather_rows(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All-gather ``rows`` (R, ...), equally many per rank; gradients are reduce-scattered."""
    return _AllGatherRows.apply(rows, group)


def reduce_scatter_rows(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's rows (R / ranks, ...) of the sum; gradients are all-gathered."""
    return _ReduceScatterRows.apply(rows, group)


def all_reduce_grad(tensor: torch.Tensor, group: dist.ProcessGroup, times: int = 1) -> torch.Tensor:
    """Return ``tensor`` with its gradient all-reduced over ``group`` and divided by ``times``."""

    def reduce(gradient: torch.Tensor) -> torch.Tensor:
        total = (gradient / times).contiguous()
        dist.all_reduce(total, group=group)
        return total

    return transform_grad(tensor, reduce) if tensor.requires_grad else tensor


def sum_over_ranks(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All-reduce ``tensor``, and its gradient, since every rank uses the sum."""
    return _SumOverRanks.apply(tensor, group)


def all_gather_detached(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All-gather ``rows`` (R, ...) without a graph."""
    output = rows.new_empty(group.size() * len(rows), *rows.shape[1:])
    all_gather(output, rows.contiguous(), group=group)
    return output


def _reduce_scatter_detached(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    output = rows.new_empty(len(rows) // group.size(), *rows.shape[1:])
    ReduceScatter(group)(output.view(-1), rows.contiguous().view(-1), dist.ReduceOp.SUM)
    return output


class _AllGatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, group):
        ctx.group = group
        return all_gather_detached(rows, group)

    @staticmethod
    def backward(ctx, gradient):
        return _reduce_scatter_detached(gradient, ctx.group), None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _ReduceScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, group):
        ctx.group = group
        return _reduce_scatter_detached(rows, group)

    @staticmethod
    def backward(ctx, gradient):
        return all_gather_detached(gradient, ctx.group), None
