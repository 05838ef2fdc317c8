"""Time collectives of several sizes over the groups that training may have: rate and latency.

A group is told by where its ranks stand (`plan.groups.Group`): how many, on how many nodes, and
how many such groups share a node's adapters. All groups of a kind run at once, as in training.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from ..c10d_names import all_gather, reduce_scatter
from ..mesh import Mesh
from ..parallel.scatter import Scatter
from ..plan.groups import Group, group
from ..plan.machine import ALL_GATHER, ALL_REDUCE, EXCHANGE, REDUCE_SCATTER, Collective
from ..runtime import Runtime
from .choose import divisors
from .measure import groups_over, memory_of, slowest_medians

log = logging.getLogger(__name__)

SIZES = {"cpu": (2**16, 2**20, 2**23), "cuda": (2**16, 2**20, 2**24, 2**28)}
"""Bytes of the whole tensor."""


Place = tuple[str, Group, dist.ProcessGroup]
"""A backend, how ranks stand, and this rank's group of such."""


def places(now: Runtime, names: list[str]) -> list[Place]:
    """Every kind of group that training may have, on each of the backends ``names``.

    A collective call.
    """
    opened: dict[tuple, dist.ProcessGroup] = {}
    found: dict[tuple, dist.ProcessGroup] = {}
    for degree in divisors(now.mesh.world):
        config = dataclasses.replace(now.config, hybrid_shard_degree=degree)
        mesh = Mesh.from_config(config, now.mesh.world, now.mesh.ranks_per_node)
        stand = group(mesh, "shard", "context"), group(mesh, "replicate")
        for name in names:
            between = groups_over(mesh, now, name, opened)
            for place, ranks in zip(stand, (between.shards, between.replicas), strict=True):
                if ranks is not None:
                    found.setdefault((name, place), ranks)
    return [(*key, ranks) for key, ranks in found.items()]


def sweep(now: Runtime, found: list[Place], rounds: int) -> list[Collective]:
    """Every kind of collective at each of the `places`. A collective call."""
    rows = []
    for name, place, ranks in found:
        log.info("measuring %s between %d ranks on %d nodes", name, place.ranks, place.nodes)
        rows += _timed(ranks, place, name, now, rounds)
    return rows


def _timed(ranks, place: Group, name: str, now: Runtime, rounds: int) -> list[Collective]:
    sizes = SIZES[now.device.type]
    ways = [(kind, size, way) for size in sizes for kind, way in ways_to_move(ranks, size, now)]
    seconds = slowest_medians([way for *_, way in ways], now.device, rounds)
    points: dict[str, list[list[float]]] = {}
    for (kind, size, _), taken in zip(ways, seconds, strict=True):
        points.setdefault(kind, []).append([size, taken])
    return [
        Collective(kind, name, place.ranks, place.nodes, place.sharing, each)
        for kind, each in points.items()
    ]


def ways_to_move(
    ranks: dist.ProcessGroup, size: int, now: Runtime
) -> Iterator[tuple[str, Callable]]:
    """Each kind of collective of ``size`` bytes in all, with what runs it."""
    whole = size // 4 // ranks.size() * ranks.size()
    output = memory_of(ranks, "AllGather", (whole,), torch.float32, now)
    mine = output.view(ranks.size(), -1)[ranks.rank()].zero_()  # others' parts are theirs to write
    yield ALL_GATHER, functools.partial(all_gather, output, mine, group=ranks)
    gradients = memory_of(ranks, "ReduceScatter", (whole,), torch.float32, now).zero_()
    part = memory_of(ranks, "ReduceScatter", (whole // ranks.size(),), torch.float32, now)
    yield REDUCE_SCATTER, functools.partial(reduce_scatter, part, gradients, group=ranks)
    scatter = Scatter(ranks)
    if scatter.by_exchange:
        yield EXCHANGE, functools.partial(scatter, part, gradients, dist.ReduceOp.SUM)
    yield ALL_REDUCE, functools.partial(dist.all_reduce, gradients, group=ranks)
