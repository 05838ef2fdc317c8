"""Placement of rank groups and time of collectives, compared with sums by hand."""

import dataclasses

import pytest

from nearlinear.distributed.mesh import Mesh
from nearlinear.planner.cluster import find_node
from nearlinear.planner.fitted_constants import load_constants
from nearlinear.planner.network_time import DataSheetNetwork, RankGroup, rank_group

FITTED = load_constants()


def test_rank_group_placement():
    mesh = Mesh(pipeline=2, replicate=2, shard=8, tensor=4, ranks_per_node=8)
    assert rank_group(mesh, "tensor") == RankGroup(ranks=4, nodes=1, sharing=2)
    assert rank_group(mesh, "shard", "context") == RankGroup(ranks=8, nodes=4, sharing=4)
    assert rank_group(mesh, "replicate") == RankGroup(ranks=2, nodes=2, sharing=8)
    assert rank_group(mesh, "pipeline") == RankGroup(ranks=2, nodes=2, sharing=8)
    assert rank_group(Mesh(shard=4), "shard") == RankGroup(ranks=4, nodes=1, sharing=1)
    experts = Mesh(shard=16, context=2, tensor=2, expert=4, ranks_per_node=8)
    assert rank_group(experts, "expert") == RankGroup(ranks=4, nodes=1, sharing=2)
    assert rank_group(experts, "expert_sharing") == RankGroup(ranks=8, nodes=8, sharing=8)


@pytest.fixture(scope="module")
def links() -> DataSheetNetwork:
    """Nodes of 8 A100s with 300 GB/s inside, 50 GB/s to other nodes, and no latency."""
    free = dataclasses.replace(
        FITTED, hop_inside=0.0, hop_between=0.0, link_share=1.0, network_share=1.0
    )
    return DataSheetNetwork(find_node("p4d.24xlarge"), free)


INSIDE = RankGroup(ranks=8, nodes=1, sharing=1)
ACROSS = RankGroup(ranks=32, nodes=4, sharing=1)
RAIL = RankGroup(ranks=4, nodes=4, sharing=8)
SIZE = 8e9


@pytest.mark.parametrize(
    ("where", "how", "seconds"),
    [
        (INSIDE, {}, 7e9 / 300e9),
        (ACROSS, {}, 8e9 * 31 / 32 / 50e9),  # a ring forwards all parts but one
        (
            ACROSS,
            {"hierarchical": True},
            6e9 / 50e9 + 7e9 / 300e9,
        ),  # 3/4 received
        (ACROSS, {"direct": True}, 6e9 / (50e9 * 9 / 8)),
        (RAIL, {}, 8 * 6e9 / 50e9),  # eight groups share the adapters
        (RankGroup(1, 1, 8), {}, 0.0),
    ],
)
def test_all_gather_time_follows_from_bytes(links, where, how, seconds):
    assert links.all_gather(SIZE, where, **how) == pytest.approx(seconds)


def test_all_reduce_takes_twice_an_all_gather(links):
    for where in (INSIDE, ACROSS, RAIL):
        assert links.all_reduce(SIZE, where) == pytest.approx(2 * links.all_gather(SIZE, where))
    assert links.all_reduce(SIZE, RankGroup(1, 1, 8)) == 0.0


@pytest.mark.parametrize(
    ("where", "seconds"),
    [
        (INSIDE, 7 / 8 * 8e9 / 300e9),
        (ACROSS, 24 / 32 * 8e9 / (50e9 / 8)),  # 24 of 32 parts over an eighth of the adapters
        (RankGroup(1, 1, 8), 0.0),
    ],
)
def test_all_to_all_time_follows_from_inter_node_bytes(links, where, seconds):
    assert links.all_to_all(SIZE, where) == pytest.approx(seconds)


def test_small_messages_are_latency_bound():
    links = DataSheetNetwork(find_node("p4d.24xlarge"), FITTED)
    group_of_all = RankGroup(ranks=256, nodes=32, sharing=1)
    rates = [size / links.all_gather(size, group_of_all) for size in (1e5, 1e7, 1e9, 1e11)]
    assert rates == sorted(rates)
    assert rates[0] < rates[-1] / 100
