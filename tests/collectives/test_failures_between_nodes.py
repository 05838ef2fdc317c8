"""Ranks that die or stop and cables that are pulled during collectives, on an emulated cluster.

The other ranks raise in time and name the failed rank, or the leader of a disconnected node.
Victims, calls and moments are random but seeded; NEARLINEAR_SOAK=n runs n times as many.
"""

import json
import random
import subprocess
import sys
import time

import pytest

from ci.emulation.cluster import Cluster, unavailable_reason
from tests.collectives.ranks import BACKEND
from tests.collectives.test_failures import DEATH, LATE, SOAK

NODES, RANKS_PER_NODE = 3, 2
RANKS = NODES * RANKS_PER_NODE
TIMEOUT = 3.0  # timeout of a call in seconds

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BACKEND != "nearlinear", reason="is about nearlinear's links"),
    pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason())),
]

# Program of every rank: random calls, equal on all ranks, until one fails.
# Arguments: seed, how many kinds of calls to draw from, secrets.
COLLECTIVES, KINDS = 6, 7
PROGRAM = f"""
import json, os, random, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
import nearlinear_collectives

torch.set_num_threads(1)
if len(sys.argv) > 3:  # a secret of every node
    node = int(os.environ["GROUP_RANK"])
    os.environ["NEARLINEAR_COLLECTIVES_SECRET"] = sys.argv[3 + node]
dist.init_process_group("nearlinear", timeout=timedelta(seconds={TIMEOUT}))
rank, ranks = dist.get_rank(), dist.get_world_size()
draw = random.Random(int(sys.argv[1]))
dist.barrier()
print("joined", flush=True)
try:
    while True:
        count = draw.choice((1, 1000, 30_000, 300_000))
        operation = draw.randrange(int(sys.argv[2]))
        each, whole = torch.ones(count), torch.ones(count * ranks)
        if operation == 0:
            dist.all_gather_single(whole, each)
        elif operation == 1:
            dist.reduce_scatter_single(each, whole)
        elif operation == 2:
            dist.all_reduce(each)
        elif operation == 3:
            dist.broadcast(each, src=draw.randrange(ranks))
        elif operation == 4:
            dist.all_to_all_single(torch.empty_like(whole), whole)
        elif operation == 5:
            dist.barrier()
        else:
            send = dist.P2POp(dist.isend, each, (rank + 1) % ranks)
            receive = dist.P2POp(dist.irecv, torch.empty_like(each), (rank - 1) % ranks)
            for work in dist.batch_isend_irecv([send, receive]):
                work.wait()
except RuntimeError as error:
    print(json.dumps({{"when": time.monotonic(), "error": str(error)}}), flush=True)
"""


@pytest.fixture(scope="module")
def cluster():
    with Cluster(nodes=NODES, rate="1gbit") as made:
        yield made


def trial(cluster, seed: int, inject_fault, kinds=KINDS) -> tuple[float, int, dict[int, dict]]:
    """Return (time of the failure, victim, reports of the other ranks)."""
    draw = random.Random(seed)
    ranks = cluster.start(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(seed), str(kinds)],
        RANKS_PER_NODE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        for rank in ranks:
            assert rank.stdout.readline() == "joined\n"
        time.sleep(draw.random() * 0.5)
        victim = draw.choice(ranks)
        moment = time.monotonic()
        inject_fault(victim)
        others = [rank for rank in ranks if rank is not victim]
        cluster.wait(others, timeout=TIMEOUT + 20)
        return moment, victim, {rank.rank: json.loads(rank.stdout.readline()) for rank in others}
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            rank.stdout.close()


@pytest.mark.parametrize("seed", range(2 * SOAK))
def test_killed_rank_is_named_on_all_nodes(cluster, seed):
    moment, victim, reports = trial(cluster, seed, lambda rank: rank.kill())
    for report in reports.values():
        error = report["error"]
        # A rank that begins to wait for a message of a survivor which has ended names that one.
        late = "its process is gone" in error and f"(host node{victim.node}" in error
        assert late or f"rank {victim.rank} (host node{victim.node}" in error, report
        assert report["when"] - moment < DEATH, report


@pytest.mark.parametrize("seed", range(SOAK))
def test_stopped_rank_or_its_leader_is_named_after_the_timeout(cluster, seed):
    # A message that is late names the rank that it waits for, which may wait for the stopped one.
    moment, victim, reports = trial(cluster, 100 + seed, lambda rank: rank.stop(), COLLECTIVES)
    leader = victim.node * RANKS_PER_NODE
    for rank, report in reports.items():
        names = [f"rank {one} (host node{victim.node}" for one in (victim.rank, leader)]
        assert any(name in report["error"] for name in names), (rank, report)
        assert "timeout after 3 s: " in report["error"], report
        assert report["when"] - moment < TIMEOUT + LATE, report


@pytest.mark.parametrize("seed", range(SOAK))
def test_disconnected_node_is_named_after_the_timeout(cluster, seed):
    cut = []

    def pull(victim):
        cut.append(victim.node)
        cluster.link_down(victim.node)

    try:
        moment, _, reports = trial(cluster, 200 + seed, pull)
    finally:
        for node in cut:
            cluster.link_up(node)
    for rank, report in reports.items():
        if rank // RANKS_PER_NODE == cut[0]:  # all other nodes are gone for this rank
            assert "host node" in report["error"], report
        else:
            assert f" (host node{cut[0]}" in report["error"], (rank, report)
        assert report["when"] - moment < TIMEOUT + LATE, report


def test_node_with_another_secret_is_refused(cluster):
    secrets = ["one", "one", "other"]
    ranks = cluster.start(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, "0", "1", *secrets],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        cluster.wait(ranks, timeout=120)
        reports = [rank.stdout.read().decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            rank.stdout.close()
    assert not any("joined" in report for report in reports)
    assert any("it does not hold this group's key" in report for report in reports), reports
