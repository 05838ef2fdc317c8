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

from ..backends import known_to_torch
from ..c10d_names import all_gather, reduce_scatter
from ..mesh import Mesh
from ..parallel.lane import Lane
from ..parallel.scatter import Scatter
from ..plan.groups import Group, group
from ..plan.machine import ALL_GATHER, ALL_REDUCE, EXCHANGE, REDUCE_SCATTER, Collective
from ..runtime import Runtime
from .choose import divisors
from .measure import groups_over, memory_of, slowest_medians
from .rates import per_call, repeat

log = logging.getLogger(__name__)

SIZES = {"cpu": (2**16, 2**20, 2**23), "cuda": (2**16, 2**20, 2**24, 2**28)}
"""Bytes of the whole tensor."""
BESIDE = 512  # edge of the products that collectives run beside
STRETCHES = 6  # of computation, each with a collective
DIFFERENCES = 2  # as many rounds as for others: what is looked for is small beside what is timed


def sweep(now: Runtime, names: list[str], rounds: int) -> list[Collective]:
    """Every kind of collective over every kind of group, on the backends ``names``.

    A collective call.
    """
    opened: dict[tuple, dist.ProcessGroup] = {}
    found: dict[tuple, Collective] = {}
    for degree in divisors(now.mesh.world):
        config = dataclasses.replace(now.config, hybrid_shard_degree=degree)
        mesh = Mesh.from_config(config, now.mesh.world, now.mesh.ranks_per_node)
        places = group(mesh, "shard", "context"), group(mesh, "replicate")
        for name in names:
            between = groups_over(mesh, now, name, opened)
            for place, ranks in zip(places, (between.shards, between.replicas), strict=True):
                key = (name, place)
                if ranks is None or key in found:
                    continue
                log.info(
                    "measuring %s between %d ranks on %d nodes", name, place.ranks, place.nodes
                )
                found[key] = _timed(ranks, place, name, now, rounds)
    return [each for rows in found.values() for each in rows]


def _timed(ranks, place: Group, name: str, now: Runtime, rounds: int) -> list[Collective]:
    sizes = SIZES[now.device.type]
    ways = [(kind, size, way) for size in sizes for kind, way in _ways(ranks, size, now)]
    seconds = slowest_medians([way for *_, way in ways], now.device, rounds)
    points: dict[str, list[list[float]]] = {}
    for (kind, size, _), taken in zip(ways, seconds, strict=True):
        points.setdefault(kind, []).append([size, taken])
    return [
        Collective(kind, name, place.ranks, place.nodes, place.sharing, each)
        for kind, each in points.items()
    ]


def _ways(ranks: dist.ProcessGroup, size: int, now: Runtime) -> Iterator[tuple[str, Callable]]:
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


def contention(now: Runtime, backend: str, rounds: int) -> dict[str, float]:
    """What collectives of ``backend`` cost computation beyond their own time, as parameters.

    Stretches of products and collectives take turns, and what that takes longer than both alone is
    counted as computation's. Then they run beside each other, with twice as much to compute as to
    move: what that takes longer than the products alone is what the collectives borrow. 0 for one
    rank. A collective call.
    """
    if now.mesh.world == 1:
        return {"turn_share": 0.0, "borrowed_share": 0.0}
    device = now.device
    ranks = dist.new_group(backend=known_to_torch(backend))  # barriers keep the job's own
    kinds = dict(_ways(ranks, SIZES[device.type][-1], now))
    ways = [kinds[ALL_GATHER], kinds.get(EXCHANGE, kinds[REDUCE_SCATTER])] * (STRETCHES // 2)
    matrix = torch.full((BESIDE, BESIDE), 0.5, device=device)
    product = functools.partial(torch.matmul, matrix, matrix)
    lane = Lane("beside") if device.type == "cpu" else None
    (one,) = per_call([product], device, rounds)

    def move():
        for way in ways:
            way()

    (about,) = slowest_medians([move], device, 1)
    products = max(1, round(about / STRETCHES / one))  # of a stretch as long as a collective

    def in_turn():
        for way in ways:
            way()
            repeat(product, products)

    def beside():
        for way in ways:
            item = lane.give(gather=way) if lane else way(async_op=True)
            repeat(product, 2 * products)
            item.wait()

    alone = functools.partial(repeat, product, products * STRETCHES)
    each = [move, alone, in_turn, beside]
    moving, computing, both, together = slowest_medians(each, device, DIFFERENCES * rounds)
    return {
        "turn_share": max(0.0, (both - moving - computing) / computing),
        "borrowed_share": max(0.0, (together - 2 * computing) / moving),
    }
