"""Order and placement of the mesh axes, checked against literal ranks."""

import pytest

from nearlinear.config.parallel import ParallelConfig
from nearlinear.distributed.mesh import Mesh
from nearlinear.errors import ConfigError

ALL_TWO = Mesh(pipeline=2, replicate=2, shard=2, context=2, tensor=2, ranks_per_node=8)


@pytest.mark.parametrize(
    ("axis", "rank_0_group", "rank_21_group"),
    [
        ("pipeline", [0, 16], [5, 21]),
        ("replicate", [0, 8], [21, 29]),
        ("shard", [0, 4], [17, 21]),
        ("context", [0, 2], [21, 23]),
        ("tensor", [0, 1], [20, 21]),
    ],
)
def test_group_lists_ranks_of_each_axis(axis, rank_0_group, rank_21_group):
    assert ALL_TWO.world == 32
    assert ALL_TWO.group(axis, 0) == rank_0_group
    assert ALL_TWO.group(axis, 21) == rank_21_group
    stride = rank_0_group[1]
    expected = [[r, r + stride] for r in range(32) if r // stride % 2 == 0]
    assert ALL_TWO.groups(axis) == expected


def test_coordinates_index_the_grid():
    assert ALL_TWO.coordinates(21) == {
        "pipeline": 1,
        "replicate": 0,
        "shard": 1,
        "context": 0,
        "tensor": 1,
    }
    assert ALL_TWO.shape == (2, 2, 2, 2, 2)
    assert ALL_TWO.grid[1, 0, 1, 0, 1] == 21


def test_group_with_unequal_axis_sizes():
    mesh = Mesh(pipeline=2, replicate=3, shard=1, context=5, tensor=7)
    assert mesh.world == 210
    assert mesh.group("pipeline", 0) == [0, 105]
    assert mesh.group("replicate", 0) == [0, 35, 70]
    assert mesh.group("shard", 0) == [0]
    assert mesh.group("context", 0) == [0, 7, 14, 21, 28]
    assert mesh.group("tensor", 0) == [0, 1, 2, 3, 4, 5, 6]


def test_data_ranks_are_consecutive_within_a_replica():
    stage_data_ranks = [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    assert [ALL_TWO.data_rank(rank) for rank in range(32)] == stage_data_ranks + stage_data_ranks
    mesh = Mesh(replicate=2, shard=3)
    assert [mesh.data_rank(rank) for rank in range(6)] == [0, 1, 2, 3, 4, 5]
    mesh = Mesh(replicate=2, shard=3, tensor=2)
    assert [mesh.data_rank(rank) for rank in range(12)] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


@pytest.mark.parametrize(
    ("world", "ranks_per_node", "nodes"),
    [(6, 4, 2), (9, 4, 3), (8, 4, 2), (3, 8, 1), (1, 8, 1), (12, 0, 1)],
)
def test_partially_filled_node_counts_as_a_node(world, ranks_per_node, nodes):
    mesh = Mesh.from_config(ParallelConfig(hybrid_shard_degree=world), world, ranks_per_node)
    assert mesh.nodes == nodes
    assert mesh.nodes == len({mesh.node(rank) for rank in range(world)})


def test_from_config_assigns_degrees_to_axes():
    config = ParallelConfig(
        pipeline_parallel_degree=2,
        hybrid_shard_degree=15,  # shard x context
        context_parallel_degree=5,
        tensor_parallel_degree=7,
    )
    assert Mesh.from_config(config, 840).shape == (2, 4, 3, 5, 7)


def test_sharing_group_spans_shard_and_context_axes():
    assert ALL_TWO.sharing == 4
    assert ALL_TWO.group("sharing", 0) == [0, 2, 4, 6]
    assert ALL_TWO.group("sharing", 21) == [17, 19, 21, 23]
    assert [ALL_TWO.state_rank(rank) for rank in (0, 2, 4, 6, 21)] == [0, 1, 2, 3, 2]


def test_groups_of_data_model_and_stage_span_several_axes():
    mesh = ALL_TWO
    assert (mesh.data, mesh.model, mesh.stage) == (4, 8, 16)
    for rank in range(mesh.world):
        at = mesh.coordinates(rank)
        for name, axes in (
            ("data", ("replicate", "shard")),
            ("model", ("pipeline", "context", "tensor")),
            ("stage", ("replicate", "shard", "context", "tensor")),
        ):
            others = [mesh.coordinates(other) for other in range(mesh.world)]
            alike = [all(at[a] == o[a] for a in at if a not in axes) for o in others]
            expected = [other for other in range(mesh.world) if alike[other]]
            assert mesh.group(name, rank) == expected


def test_expert_groups_contain_neighboring_ranks():
    mesh = Mesh(replicate=2, shard=4, tensor=2, expert=2)
    assert mesh.group("sharing", 0) == [0, 2, 4, 6]
    assert mesh.group("expert", 0) == [0, 2]
    assert mesh.group("expert", 7) == [5, 7]
    assert mesh.group("expert_sharing", 0) == [0, 4]
    assert mesh.group("expert_sharing", 15) == [11, 15]
    assert (mesh.sharing, mesh.expert_sharing) == (4, 2)
    assert Mesh(shard=2, context=2, expert=4).group("expert", 1) == [0, 1, 2, 3]


def test_placement_strategies_match_smp_v1_table():
    """Check the table of the SMP v1 guide: 8 ranks, tensor 2, pipeline 2, data 2."""

    def rank_of(placement, **at):
        config = ParallelConfig(
            tensor_parallel_degree=2,
            pipeline_parallel_degree=2,
            hybrid_shard_degree=1,
            placement_strategy=placement,
        )
        mesh = Mesh.from_config(config, 8)
        return [r for r in range(8) if at.items() <= mesh.coordinates(r).items()]

    for pipeline in range(2):
        for data in range(2):
            for tensor in range(2):
                at = {"pipeline": pipeline, "replicate": data, "tensor": tensor}
                assert rank_of("cluster", **at) == [(data * 2 + pipeline) * 2 + tensor]
                assert rank_of("DPT", **at) == [(data * 2 + pipeline) * 2 + tensor]
                assert rank_of("PTD", **at) == [(pipeline * 2 + tensor) * 2 + data]
                assert rank_of("spread", **at) == [(tensor * 2 + pipeline) * 2 + data]


@pytest.mark.parametrize("placement", ["DPT", "TPD", "PTD", "DTP", "TDP", "PDT"])
def test_group_members_differ_only_on_their_axis(placement):
    mesh = Mesh(2, 3, 2, 2, 2, expert=2, placement=placement)
    for axis in ("pipeline", "replicate", "shard", "context", "tensor"):
        for group in mesh.groups(axis):
            coordinates = [mesh.coordinates(rank) for rank in group]
            assert [each[axis] for each in coordinates] == list(range(getattr(mesh, axis)))
            assert len({tuple(p[a] for a in p if a != axis) for p in coordinates}) == 1


@pytest.mark.parametrize("placement", ["DP", "PPT", "pdt", "near", ""])
def test_unknown_placement_strategy_raises(placement):
    with pytest.raises(ConfigError, match="placement_strategy = .*'cluster', 'spread'"):
        ParallelConfig(placement_strategy=placement)
