"""Cutting shard groups by nodes, and gathering across nodes before inside them."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import nearlinear as nl
from nearlinear.mesh import Mesh
from nearlinear.parallel.hierarchy import Hierarchy, cut


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 6), st.integers(1, 3))
def test_a_cut_holds_each_rank_once_per_way(replicas, nodes, width, tensor):
    mesh = Mesh(replicate=replicas, shard=nodes * width, tensor=tensor)
    mesh = Mesh(**{**mesh.__dict__, "ranks_per_node": width * tensor})
    for rank in range(mesh.world):
        ranks = cut(mesh, rank)
        if nodes == 1 or width == 1:
            assert ranks is None
            continue
        across, inside = ranks
        assert len(across) == nodes and len(inside) == width
        assert set(across) & set(inside) == {rank}
        assert {mesh.node(r) for r in inside} == {mesh.node(rank)}
        assert len({mesh.node(r) for r in across}) == nodes
        for other in across:
            assert cut(mesh, other)[0] == across
        for other in inside:
            assert cut(mesh, other)[1] == inside


def test_uneven_nodes_are_not_cut():
    assert cut(Mesh(shard=6, ranks_per_node=4), 0) is None


def gathered(rank, nodes, width, elements, dtype):
    mesh = Mesh(shard=nodes * width, ranks_per_node=width)
    across, inside = (dist.new_group(r, use_local_synchronization=True) for r in cut(mesh, rank))
    hierarchy = Hierarchy(across, inside, width)
    generator = torch.Generator().manual_seed(rank)
    mine = torch.randint(0, 100, (elements,), generator=generator).to(dtype)
    output = torch.full((nodes * width, elements), -1).to(dtype)
    output[rank] = mine
    hierarchy.gather(output.view(-1), output[rank])
    shards = torch.empty_like(output)
    dist.all_gather(list(shards), mine)
    return torch.equal(output, shards)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize(("nodes", "width"), [(2, 2), (3, 2), (2, 3)])
def test_two_stages_give_what_one_does(nodes, width, dtype):
    for elements in (1, 7, 1000):
        args = (nodes, width, elements, dtype)
        assert all(nl.spmd.run(gathered, nodes * width, args=args, processes=True))
