"""Time collectives of several sizes, and the slowdown of compute by them.

A group is described by its placement (`network_time.RankGroup`): ranks, nodes, and groups that
share a node's adapters. All groups of a kind run at once, as in training.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..._torch import all_gather, reduce_scatter
from ...distributed.collectives import ReduceScatter
from ...distributed.comm_thread import CommThread
from ...distributed.mesh import Mesh
from ...distributed.runtime import Runtime
from ..cluster import (
    ALL_GATHER,
    ALL_REDUCE,
    EXCHANGE,
    REDUCE_SCATTER,
    MeasuredCollective,
    MeasuredContention,
)
from ..network_time import RankGroup, rank_group
from .rates import allocate_buffer, open_groups, repeat, seconds_per_call, slowest_medians

log = logging.getLogger(__name__)

SIZES = {"cpu": (2**16, 2**20, 2**23), "cuda": (2**16, 2**20, 2**24, 2**28)}
"""Bytes of the whole tensor."""
CONCURRENT_EDGE = 512  # edge of the matrix products that run concurrently with collectives
SMALL_REPEATS = 8  # small collectives per large one, each with as much less compute
EXTRA_ROUNDS = 2  # factor on rounds: differences of large times need more of them


class MeasuredGroup(NamedTuple):
    """A placement on one backend, and this rank's process group of that kind."""

    backend: str
    placement: RankGroup
    process_group: dist.ProcessGroup


def divisors(world: int) -> list[int]:
    return [degree for degree in range(1, world + 1) if world % degree == 0]


def find_groups(runtime: Runtime, names: list[str]) -> list[MeasuredGroup]:
    """Return every kind of group of sharded training, on each backend. A collective call."""
    opened: dict[tuple, dist.ProcessGroup] = {}
    found: dict[tuple[str, RankGroup], dist.ProcessGroup] = {}
    for degree in divisors(runtime.mesh.world):
        config = dataclasses.replace(runtime.config, hybrid_shard_degree=degree)
        mesh = Mesh.from_config(config, runtime.mesh.world, runtime.mesh.ranks_per_node)
        placements = rank_group(mesh, "shard", "context"), rank_group(mesh, "replicate")
        for name in names:
            groups = open_groups(mesh, runtime, name, opened)
            for placement, group in zip(placements, (groups.shards, groups.replicas), strict=True):
                if group is not None:
                    found.setdefault((name, placement), group)
    return [MeasuredGroup(*key, group) for key, group in found.items()]


def measure_collectives(
    runtime: Runtime, groups: list[MeasuredGroup], rounds: int
) -> list[MeasuredCollective]:
    """Time every kind of collective in each of ``groups``. A collective call."""
    rows = []
    for group in groups:
        placement = group.placement
        log.info(
            "timing %s between %d ranks on %d nodes",
            group.backend, placement.ranks, placement.nodes,
        )  # fmt: skip
        rows += _measure_group(group, runtime, rounds)
    return rows


def _measure_group(group: MeasuredGroup, runtime: Runtime, rounds: int) -> list[MeasuredCollective]:
    sizes = SIZES[runtime.device.type]
    operations = [
        (kind, size, operation)
        for size in sizes
        for kind, operation in collective_calls(group.process_group, size, runtime)
    ]
    seconds = slowest_medians([each for *_, each in operations], runtime.device, rounds)
    points: dict[str, list[list[float]]] = {}
    for (kind, size, _), taken in zip(operations, seconds, strict=True):
        points.setdefault(kind, []).append([size, taken])
    place = group.placement
    return [
        MeasuredCollective(kind, group.backend, place.ranks, place.nodes, place.sharing, each)  # pyright: ignore[reportArgumentType] - kind is one of the literals
        for kind, each in points.items()
    ]


def collective_calls(
    group: dist.ProcessGroup, size: int, runtime: Runtime
) -> Iterator[tuple[str, Callable]]:
    """Yield each kind of collective of ``size`` bytes in total, with a function that runs it."""
    whole = size // 4 // group.size() * group.size()
    output = allocate_buffer(group, "AllGather", (whole,), runtime)
    # other ranks write their own parts
    mine = output.view(group.size(), -1)[group.rank()].zero_()
    yield ALL_GATHER, functools.partial(all_gather, output, mine, group=group)
    gradients = allocate_buffer(group, "ReduceScatter", (whole,), runtime).zero_()
    part = allocate_buffer(group, "ReduceScatter", (whole // group.size(),), runtime)
    yield REDUCE_SCATTER, functools.partial(reduce_scatter, part, gradients, group=group)
    scatter = ReduceScatter(group)
    if scatter.by_exchange:
        yield EXCHANGE, functools.partial(scatter, part, gradients, dist.ReduceOp.SUM)  # pyright: ignore[reportArgumentType] - torch types ReduceOp.SUM as RedOpType
    yield ALL_REDUCE, functools.partial(dist.all_reduce, gradients, group=group)


def measure_contention(
    runtime: Runtime, groups: list[MeasuredGroup], rounds: int
) -> list[MeasuredContention]:
    """Measure the slowdown of compute by collectives in each of ``groups``. A collective call."""
    rows = []
    for name, place, group in groups:
        log.info(
            "timing %s concurrently with compute, %d ranks on %d nodes",
            name, place.ranks, place.nodes,
        )  # fmt: skip
        costs = _contention_costs(group, runtime, rounds)
        rows.append(MeasuredContention(name, place.ranks, place.nodes, place.sharing, *costs))
    return rows


def _contention_costs(group: dist.ProcessGroup, runtime: Runtime, rounds: int) -> tuple[float, ...]:
    """Return the values of `cluster.CONTENTION_COSTS`, with all groups of the kind at once.

    First, matrix products and collectives take turns; the time in excess of both alone counts as
    lost by compute. Then they run concurrently, with twice as much compute as communication; the
    time in excess of the products alone is lost to the collectives. Both are measured for one pair
    of large collectives and for many small ones, to separate costs per byte from costs per call.
    """
    device = runtime.device
    sizes = SIZES[device.type]
    large, small = (_gather_and_reduce(group, size, runtime) for size in (sizes[-1], sizes[0]))
    small *= SMALL_REPEATS
    matrix = torch.full((CONCURRENT_EDGE, CONCURRENT_EDGE), 0.5, device=device)
    product = functools.partial(torch.matmul, matrix, matrix)
    lane = CommThread("concurrent") if device.type == "cpu" else None
    (one,) = seconds_per_call([product], device, 1)
    (about,) = slowest_medians([functools.partial(_run_interleaved, large, product, 0)], device, 1)
    products = max(SMALL_REPEATS, round(about / len(large) / one))  # as long as a large collective
    operations = []
    for calls, count in ((large, products), (small, max(1, products // SMALL_REPEATS))):
        operations += [
            functools.partial(_run_interleaved, calls, product, 0),
            functools.partial(repeat, product, count * len(calls)),
            functools.partial(_run_interleaved, calls, product, count),
            functools.partial(_run_concurrently, calls, product, 2 * count, lane),
        ]
    seconds = slowest_medians(operations, device, EXTRA_ROUNDS * rounds)
    counts = len(large), len(small)
    moving, computing, both, together = zip(seconds[:4], seconds[4:], strict=True)
    interleaved = [b - m - c for b, m, c in zip(both, moving, computing, strict=True)]
    concurrent = [t - 2 * c for t, c in zip(together, computing, strict=True)]
    return (
        *split_cost(_pair(interleaved), computing, counts),
        *split_cost(_pair(concurrent), moving, counts),
    )


def _pair(values: list[float]) -> tuple[float, float]:
    first, second = values
    return first, second


def _gather_and_reduce(group: dist.ProcessGroup, size: int, runtime: Runtime) -> list[Callable]:
    """Return an all-gather and a reduce-scatter of ``size`` bytes."""
    calls = dict(collective_calls(group, size, runtime))
    return [calls[ALL_GATHER], calls.get(EXCHANGE, calls[REDUCE_SCATTER])]


def _run_interleaved(calls: list[Callable], product: Callable, products: int) -> None:
    for call in calls:
        call()
        repeat(product, products)


def _run_concurrently(
    calls: list[Callable], product: Callable, products: int, lane: CommThread | None
) -> None:
    for call in calls:
        item = lane.submit(gather=call) if lane else call(async_op=True)
        repeat(product, products)
        item.wait()


def split_cost(
    lost: tuple[float, float], total: tuple[float, float], counts: tuple[int, int]
) -> tuple[float, float]:
    """Split two losses into a share of ``total`` and seconds per call, neither below 0.

    Solves ``lost = share * total + seconds * counts``. If one of the two would be negative, it is 0
    and the other is the least-squares solution.
    """
    (first, second), (a, b), (m, n) = lost, total, counts
    whole = a * n - b * m
    share, seconds = (first * n - second * m) / whole, (a * second - b * first) / whole
    if share < 0:
        return 0.0, max(0.0, (m * first + n * second) / (m * m + n * n))
    if seconds < 0:
        return max(0.0, (a * first + b * second) / (a * a + b * b)), 0.0
    return share, seconds
