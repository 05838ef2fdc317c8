"""Run several functions in the same processes, which are slow to start."""

from collections.abc import Callable

import nearlinear as nl


def in_turn(function: Callable, ranks: int, runs: list[tuple], **options) -> list[tuple]:
    """Return the results of ``function(rank, *run)`` on all ``ranks``, for each of ``runs``.

    ``options`` are passed to `nl.spmd.run`.
    """
    of_ranks = nl.spmd.run(_in_turn, ranks, args=(function, runs), processes=True, **options)
    return list(zip(*of_ranks, strict=True))


def _in_turn(rank: int, function: Callable, runs: list[tuple]) -> list:
    return [function(rank, *run) for run in runs]
