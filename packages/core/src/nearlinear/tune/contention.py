"""What collectives cost computation beyond their own time: cores, and ranks that must be woken."""

import functools
import logging
from collections.abc import Callable

import torch
import torch.distributed as dist

from ..parallel.lane import Lane
from ..plan.contention import Contention
from ..plan.machine import ALL_GATHER, EXCHANGE, REDUCE_SCATTER
from ..runtime import Runtime
from .measure import slowest_medians
from .rates import per_call, repeat
from .sweep import SIZES, Place, ways_to_move

log = logging.getLogger(__name__)

BESIDE = 512  # edge of the products that collectives run beside
MORE = 8  # times as many small collectives as large ones, with as much less computation each
DIFFERENCES = 2  # as many rounds as for others: what is looked for is small beside what is timed


def contention(now: Runtime, found: list[Place], rounds: int) -> list[Contention]:
    """What collectives at each of the places cost computation. A collective call."""
    rows = []
    for name, place, ranks in found:
        log.info(
            "measuring %s beside products, %d ranks on %d nodes", name, place.ranks, place.nodes
        )
        costs = _costs(ranks, now, rounds)
        rows.append(Contention(name, place.ranks, place.nodes, place.sharing, *costs))
    return rows


def _costs(ranks: dist.ProcessGroup, now: Runtime, rounds: int) -> tuple[float, ...]:
    """The values of `plan.contention.MEASURED` for all groups like ``ranks``, at once.

    Stretches of products and collectives take turns, and what that takes longer than both alone is
    counted as computation's. Then they run beside each other, with twice as much to compute as to
    move: what that takes longer than the products alone is what the collectives borrow. So for a
    large pair of them and for many small ones, which tell what goes with their number from what
    goes with their size.
    """
    device = now.device
    sizes = SIZES[device.type]
    large, small = (_pair(ranks, size, now) for size in (sizes[-1], sizes[0]))
    small *= MORE
    matrix = torch.full((BESIDE, BESIDE), 0.5, device=device)
    product = functools.partial(torch.matmul, matrix, matrix)
    lane = Lane("beside") if device.type == "cpu" else None
    (one,) = per_call([product], device, 1)
    (about,) = slowest_medians([functools.partial(_in_turn, large, product, 0)], device, 1)
    products = max(MORE, round(about / len(large) / one))  # as long as a large collective
    each = []
    for ways, some in ((large, products), (small, max(1, products // MORE))):
        each += [
            functools.partial(_in_turn, ways, product, 0),
            functools.partial(repeat, product, some * len(ways)),
            functools.partial(_in_turn, ways, product, some),
            functools.partial(_beside, ways, product, 2 * some, lane),
        ]
    seconds = slowest_medians(each, device, DIFFERENCES * rounds)
    counts = len(large), len(small)
    moving, computing, both, together = zip(seconds[:4], seconds[4:], strict=True)
    turns = [b - m - c for b, m, c in zip(both, moving, computing, strict=True)]
    beside = [t - 2 * c for t, c in zip(together, computing, strict=True)]
    return *shares(turns, computing, counts), *shares(beside, moving, counts)


def _pair(ranks: dist.ProcessGroup, size: int, now: Runtime) -> list[Callable]:
    """A gather and a reduction of ``size`` bytes."""
    kinds = dict(ways_to_move(ranks, size, now))
    return [kinds[ALL_GATHER], kinds.get(EXCHANGE, kinds[REDUCE_SCATTER])]


def _in_turn(ways: list[Callable], product: Callable, products: int) -> None:
    for way in ways:
        way()
        repeat(product, products)


def _beside(ways: list[Callable], product: Callable, products: int, lane: Lane | None) -> None:
    for way in ways:
        item = lane.give(gather=way) if lane else way(async_op=True)
        repeat(product, products)
        item.wait()


def shares(
    lost: tuple[float, float], of: tuple[float, float], counts: tuple[int, int]
) -> tuple[float, float]:
    """The share of ``of``, and the seconds for each of ``counts``, that make up two losses.

    None is below 0: where one would be, it is 0, and the other what comes closest to both losses.
    """
    (first, second), (a, b), (m, n) = lost, of, counts
    whole = a * n - b * m
    share, seconds = (first * n - second * m) / whole, (a * second - b * first) / whole
    if share < 0:
        return 0.0, max(0.0, (m * first + n * second) / (m * m + n * n))
    if seconds < 0:
        return max(0.0, (a * first + b * second) / (a * a + b * b)), 0.0
    return share, seconds
