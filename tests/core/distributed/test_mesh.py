"""`Mesh`: documented SMP layouts, partition properties of groups, and the printed grid."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nearlinear as nl
from nearlinear.config.parallel import ParallelConfig
from nearlinear.distributed.mesh import AXES, Mesh, dim_to_slice

sizes = st.integers(1, 4)
meshes = st.builds(Mesh, sizes, sizes, sizes, sizes, sizes)


def test_groups_match_smp_v1_example():
    """Check "Example 2" of the SMP v1 guide: 32 ranks, tensor 4, sharded data parallel 4."""
    mesh = Mesh.from_config(ParallelConfig(tensor_parallel_degree=4, hybrid_shard_degree=4), 32)
    assert mesh.group("tensor", 5) == [4, 5, 6, 7]
    assert mesh.group("shard", 0) == [0, 4, 8, 12]
    assert mesh.group("shard", 16) == [16, 20, 24, 28]
    assert mesh.group("replicate", 0) == [0, 16]


def test_shard_groups_of_benchmark_layout_span_consecutive_nodes():
    """Expect 2 replicas of 16 consecutive nodes for 256 ranks, 8 per node, shard degree 128."""
    mesh = Mesh.from_config(ParallelConfig(hybrid_shard_degree=128), 256, ranks_per_node=8)
    assert (mesh.replicate, mesh.shard, mesh.nodes) == (2, 128, 32)
    assert mesh.group("shard", 0) == list(range(128))
    assert mesh.group("replicate", 3) == [3, 131]
    assert mesh.nodes_spanned("shard") == 16
    assert mesh.nodes_spanned("replicate") == 2


@pytest.mark.parametrize(("degree", "nodes"), [(2, 1), (4, 1), (8, 2), (16, 4)])
def test_nodes_spanned_by_shard_groups(degree, nodes):
    mesh = Mesh.from_config(ParallelConfig(hybrid_shard_degree=degree), 16, ranks_per_node=4)
    assert mesh.nodes_spanned("shard") == nodes


@given(meshes, st.data())
def test_groups_of_each_axis_partition_the_ranks(mesh, data):
    rank = data.draw(st.integers(0, mesh.world - 1))
    for axis in AXES:
        groups = mesh.groups(axis)
        assert sorted(sum(groups, [])) == list(range(mesh.world))
        assert mesh.group(axis, rank) in groups and rank in mesh.group(axis, rank)
        assert {len(group) for group in groups} == {getattr(mesh, axis)}


@given(meshes)
def test_model_parallel_ranks_share_a_data_rank(mesh):
    data_ranks = [mesh.data_rank(rank) for rank in range(mesh.world)]
    share = mesh.world // mesh.data_ranks
    assert sorted(data_ranks) == sorted(list(range(mesh.data_ranks)) * share)
    for rank in range(mesh.world):
        for axis in ("pipeline", "context", "tensor"):
            assert {data_ranks[other] for other in mesh.group(axis, rank)} == {data_ranks[rank]}


def test_str_prints_the_rank_grid():
    mesh = Mesh(replicate=2, shard=4, ranks_per_node=4)
    assert str(mesh).splitlines() == [
        "8 ranks on 2 nodes = 2 replicate x 4 shard",
        "  replica 0: [0] [1] [2] [3]   node 0",
        "  replica 1: [4] [5] [6] [7]   node 1",
    ]
    assert str(Mesh()) == "1 rank\n  replica 0: [0]"
    assert "stage 1 replica 0: [2 3]" in str(Mesh(pipeline=2, tensor=2))
    long = str(Mesh(replicate=32, shard=128, ranks_per_node=8))
    assert ".. 16 more rows" in long and "node 0-15" in long
    assert max(map(len, long.splitlines())) < 120


def test_device_mesh_coordinates_match_mesh():
    def check(rank):
        mesh = nl.init({"hybrid_shard_degree": 2, "tensor_parallel_degree": 2}, ranks_per_node=4)
        device_mesh = mesh.device_mesh("cpu")
        assert device_mesh.mesh_dim_names == ("replicate", "shard", "tensor")
        assert device_mesh.mesh.tolist() == mesh.grid.reshape(2, 2, 2).tolist()
        at = mesh.coordinates(rank)
        assert list(device_mesh.get_coordinate()) == [at["replicate"], at["shard"], at["tensor"]]

    nl.spmd.run(check, 8)


@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((8, 3), 0),  # divisible
        ((33, 4), 0),  # not divisible, but long
        ((31, 4), 1),
        ((9, 10), 1),  # 12 / 10 of the memory instead of 12 / 9
        ((2, 5, 9), 2),
    ],
)
def test_optimizer_state_of_four_replicas_is_cut_where_it_is_most_even(shape, dim):
    assert dim_to_slice(shape, 4) == dim
