"""Cutting shard groups by nodes, and gathering across nodes before inside them."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import nearlinear as nl
from nearlinear.distributed.collectives import Hierarchy, ReduceScatter, split_by_node
from nearlinear.distributed.mesh import Mesh


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 6), st.integers(1, 3))
def test_split_by_node_contains_each_rank_once(replicas, nodes, width, tensor):
    mesh = Mesh(replicate=replicas, shard=nodes * width, tensor=tensor)
    mesh = Mesh(**{**mesh.__dict__, "ranks_per_node": width * tensor})
    for rank in range(mesh.world):
        ranks = split_by_node(mesh, rank)
        if nodes == 1 or width == 1:
            assert ranks is None
            continue
        across, inside = ranks
        assert len(across) == nodes and len(inside) == width
        assert set(across) & set(inside) == {rank}
        assert {mesh.node(r) for r in inside} == {mesh.node(rank)}
        assert len({mesh.node(r) for r in across}) == nodes
        for other in across:
            assert split_by_node(mesh, other)[0] == across
        for other in inside:
            assert split_by_node(mesh, other)[1] == inside


def test_split_by_node_refuses_uneven_nodes():
    assert split_by_node(Mesh(shard=6, ranks_per_node=4), 0) is None


def two_stages(rank, nodes, width):
    """Compare collectives in two stages with those in one, by size and dtype."""
    mesh = Mesh(shard=nodes * width, ranks_per_node=width)
    across, inside = (
        dist.new_group(r, use_local_synchronization=True) for r in split_by_node(mesh, rank)
    )
    hierarchy = Hierarchy(across, inside, width)
    return {
        (elements, dtype): (
            gathers_alike(hierarchy, rank, mesh.shard, elements, dtype),
            reduces_alike(hierarchy, rank, mesh.shard, elements, dtype),
        )
        for elements in (1, 7, 1000)
        for dtype in (torch.float32, torch.bfloat16, torch.uint8)
    }


def whole_numbers(rank, elements, dtype):
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 8, (elements,), generator=generator).to(dtype)


def gathers_alike(hierarchy, rank, ranks, elements, dtype):
    mine = whole_numbers(rank, elements, dtype)
    output = torch.full((ranks, elements), 99).to(dtype)
    output[rank] = mine
    hierarchy.all_gather(output.view(-1), output[rank])
    return torch.equal(
        output, torch.stack([whole_numbers(r, elements, dtype) for r in range(ranks)])
    )


def reduces_alike(hierarchy, rank, ranks, elements, dtype):
    inputs = [whole_numbers(r, ranks * elements, dtype) for r in range(ranks)]
    expected = sum(inputs).view(ranks, elements)[rank]
    found = torch.empty_like(expected)
    ways = [ReduceScatter(dist.group.WORLD), ReduceScatter(dist.group.WORLD, hierarchy)]
    for way in ways:
        way(found.zero_(), inputs[rank], dist.ReduceOp.SUM)
        if not torch.equal(found, expected):
            return False
        if dtype.is_floating_point:
            way(found.zero_(), inputs[rank], dist.ReduceOp.AVG)
            if not torch.equal(found, expected / ranks):
                return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "width"), [(2, 2), (3, 2), (2, 3)])
def test_hierarchical_collectives_equal_flat_ones(nodes, width):
    for found in nl.spmd.run(two_stages, nodes * width, args=(nodes, width), processes=True):
        assert set(found.values()) == {(True, True)}, found
