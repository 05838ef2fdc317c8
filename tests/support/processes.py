"""Several runs in the same processes, which take long to start."""

from collections.abc import Callable

import nearlinear as nl


def in_turn(function: Callable, ranks: int, runs: list[tuple], **options) -> list[tuple]:
    """What ``function(rank, *run)`` returned on all ``ranks``, for each of ``runs``.

    ``options`` are `nl.spmd.run`'s.
    """
    of_ranks = nl.spmd.run(_in_turn, ranks, args=(function, runs), processes=True, **options)
    return list(zip(*of_ranks, strict=True))


def _in_turn(rank: int, function: Callable, runs: list[tuple]) -> list:
    return [function(rank, *run) for run in runs]
