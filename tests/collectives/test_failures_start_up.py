"""Ranks that die or never join while the others create the group."""

import random
import re
import time

import pytest
import torch
import torch.distributed as dist

from tests.collectives import worker
from tests.collectives.ranks import BACKEND
from tests.collectives.test_failures import LATE, SOAK

pytestmark = pytest.mark.skipif(BACKEND == "gloo", reason="gloo names no rank")


def start_up(rank, absent, timeout):
    worker.announce("here")
    if rank == absent:
        time.sleep(60)
    begun = time.monotonic()
    try:
        worker.join(BACKEND, timeout=timeout)
        for _ in range(1000):
            dist.all_reduce(torch.ones(10))
            time.sleep(0.001)
    except RuntimeError as error:
        return {"when": time.monotonic(), "took": time.monotonic() - begun, "error": str(error)}


def test_rank_that_never_joins_is_named(pool):
    case = pool.start(start_up, 2, 2.0, ranks=4, backend=None)
    try:
        assert case.collect(20, ranks=(0, 1, 3)), case.stacks()
        for rank in (0, 1, 3):
            report = case.outcomes[rank].value
            assert "rank(s) 2 did not join" in report["error"], report
            assert report["took"] < 2 + LATE
    finally:
        case.close(replace=True)


@pytest.mark.parametrize("seed", range(6 * SOAK))
def test_death_during_start_up_is_reported(pool, seed):
    """A death is detected once the peer info is in the store; before, the rank never joined."""
    draw = random.Random(seed)
    victim, ranks, timeout = draw.randrange(3), 3, 2.0
    case = pool.start(start_up, None, timeout, ranks=ranks, backend=None)
    try:
        case.heard("here")
        time.sleep(draw.random() * 0.05)
        moment = case.kill(victim, reap=draw.random() < 0.5)
        survivors = [rank for rank in range(ranks) if rank != victim]
        assert case.collect(20, ranks=survivors), case.stacks()
        for rank in survivors:
            assert not case.outcomes[rank].failed, case.stacks()
            report = case.outcomes[rank].value
            assert re.search(rf"\b(rank|rank\(s\)) {victim}\b", report["error"]), report
            assert report["when"] - moment < timeout + LATE
    finally:
        case.close(replace=True)
