"""Where the ranks of a collective stand, and what it moves over links: sums done by hand."""

import dataclasses

import pytest

from nearlinear.mesh import Mesh
from nearlinear.plan import parameters
from nearlinear.plan.groups import Group, group
from nearlinear.plan.hardware import node
from nearlinear.plan.links import Links

FITTED = parameters.load()


def test_where_a_group_of_ranks_stands():
    mesh = Mesh(pipeline=2, replicate=2, shard=8, tensor=4, ranks_per_node=8)
    assert group(mesh, "tensor") == Group(ranks=4, nodes=1, sharing=2)
    assert group(mesh, "shard", "context") == Group(ranks=8, nodes=4, sharing=4)
    assert group(mesh, "replicate") == Group(ranks=2, nodes=2, sharing=8)
    assert group(mesh, "pipeline") == Group(ranks=2, nodes=2, sharing=8)
    assert group(Mesh(shard=4), "shard") == Group(ranks=4, nodes=1, sharing=1)
    experts = Mesh(shard=16, context=2, tensor=2, expert=4, ranks_per_node=8)
    assert group(experts, "expert") == Group(ranks=4, nodes=1, sharing=2)
    assert group(experts, "expert_sharing") == Group(ranks=8, nodes=8, sharing=8)


@pytest.fixture(scope="module")
def links() -> Links:
    """Of nodes of 8 A100s, 300 GB/s between them and 50 GB/s to other nodes, without latency."""
    free = dataclasses.replace(
        FITTED, hop_inside=0.0, hop_between=0.0, link_share=1.0, network_share=1.0
    )
    return Links(node("p4d.24xlarge"), free)


INSIDE = Group(ranks=8, nodes=1, sharing=1)
ACROSS = Group(ranks=32, nodes=4, sharing=1)
RAIL = Group(ranks=4, nodes=4, sharing=8)
SIZE = 8e9


@pytest.mark.parametrize(
    ("where", "how", "seconds"),
    [
        (INSIDE, {}, 7e9 / 300e9),
        (ACROSS, {}, 8e9 * 31 / 32 / 50e9),  # a ring over nodes passes on all but one part
        (ACROSS, {"hierarchical": True}, 6e9 / 50e9 + 7e9 / 300e9),  # a node lacks three quarters
        (ACROSS, {"direct": True}, 6e9 / (50e9 * 9 / 8)),
        (RAIL, {}, 8 * 6e9 / 50e9),  # eight groups share the adapters
        (Group(1, 1, 8), {}, 0.0),
    ],
)
def test_a_gather_moves_what_it_must(links, where, how, seconds):
    assert links.gather(SIZE, where, **how) == pytest.approx(seconds)


def test_an_all_reduce_moves_it_there_and_back(links):
    for where in (INSIDE, ACROSS, RAIL):
        assert links.reduce(SIZE, where) == pytest.approx(2 * links.gather(SIZE, where))
    assert links.reduce(SIZE, Group(1, 1, 8)) == 0.0


@pytest.mark.parametrize(
    ("where", "seconds"),
    [
        (INSIDE, 7 / 8 * 8e9 / 300e9),
        (ACROSS, 24 / 32 * 8e9 / (50e9 / 8)),  # 24 of 32 parts, over an eighth of the adapters
        (Group(1, 1, 8), 0.0),
    ],
)
def test_an_exchange_leaves_the_node_for_other_nodes_only(links, where, seconds):
    assert links.exchange(SIZE, where) == pytest.approx(seconds)


def test_small_messages_are_slow():
    links = Links(node("p4d.24xlarge"), FITTED)
    group_of_all = Group(ranks=256, nodes=32, sharing=1)
    rates = [size / links.gather(size, group_of_all) for size in (1e5, 1e7, 1e9, 1e11)]
    assert rates == sorted(rates)
    assert rates[0] < rates[-1] / 100
