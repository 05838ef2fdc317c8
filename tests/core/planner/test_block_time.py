"""Block times on a network of simple prices, compared with sums by hand."""

import dataclasses
import math

import pytest

from nearlinear.distributed.mesh import Mesh
from nearlinear.planner.api import parse_cluster
from nearlinear.planner.block_time import BlockTimes, ComputeSegment
from nearlinear.planner.fitted_constants import load_constants
from nearlinear.planner.model_shape import ModelShape
from nearlinear.planner.network_time import rank_group
from nearlinear.planner.workload import Workload

WIDTH, INNER, LAYERS = 1024, 4096, 8
SHAPE = ModelShape(layers=LAYERS, width=WIDTH, heads=16, inner=INNER, vocabulary=5000)
DENSE = 4 * WIDTH * WIDTH
EXPERT = 2 * WIDTH * INNER
TOKENS = 4 * 512


class Prices:
    """Network whose collectives cost a price per byte and one second per message."""

    host = 7.0
    all_reduce_slows_compute = True

    def all_gather(self, size, group, direct=False, hierarchical=False):
        return 3 * size + 1 + 100 * direct + 1000 * hierarchical if group.ranks > 1 else 0.0

    def reduce_scatter(self, size, group):
        return 5 * size + 1 if group.ranks > 1 else 0.0

    def all_reduce(self, size, group):
        return 11 * size + 10 * group.ranks + group.nodes if group.ranks > 1 else 0.0

    def all_to_all(self, size, group):
        return 13 * size + 1 if group.ranks > 1 else 0.0

    def send(self, size, across):
        return 17 * size + across

    def interleaved_cost(self, group, computing, count):
        return group.ranks + computing / 8 + 19 * count

    def concurrent_cost(self, group, seconds, count, direct=False):
        return group.ranks * seconds / 64 + 23 * count + 500 * direct


def blocks(cluster: str = "p4d.24xlarge:4", **changes) -> BlockTimes:
    asked = {
        "shape": SHAPE, "sequence": 512, "micro_batch": 4, "micro_batches": 2,
        "mesh": Mesh(shard=8, replicate=4, ranks_per_node=8),
    }  # fmt: skip
    found = BlockTimes(Workload(**(asked | changes)), parse_cluster(cluster), load_constants())
    found.network = Prices()
    return found


def equal(value: float) -> object:
    return pytest.approx(value, rel=1e-12)


def test_segment_hides_the_ring_behind_compute_only():
    assert ComputeSegment(5.0, 1.0, 2.0, 4.0, 8.0).seconds == 5 + 8 + 1 + 2
    assert ComputeSegment(3.0, 1.0, 2.0, 4.0, 8.0).seconds == 4 + 8 + 1 + 2


def test_collectives_of_a_block_move_its_parameters():
    found, block = blocks(), DENSE + EXPERT
    assert found.sharded and found.block_parameters == block and found.layers == LAYERS
    assert found.block_all_gather == equal(3 * 2 * block + 1)
    assert found.block_reduce_scatter == equal(5 * 4 * block + 1)
    assert found.block_all_reduce == equal(11 * 4 * block / 8 + 10 * 4 + 4)
    assert found.root_parameters == SHAPE.root_parameters
    assert found.rank_parameters == equal(LAYERS * block + SHAPE.root_parameters)
    away = blocks(offload_optimizer=True)
    assert away.block_all_gather == equal(3 * 2 * block + 1 + block / 8 * 4 / 7.0)
    assert away.block_reduce_scatter == equal(5 * 4 * block + 1 + block / 8 * 4 / 7.0)
    assert not blocks(mesh=Mesh(replicate=32, ranks_per_node=8)).sharded


def test_long_messages_are_split_and_flags_reach_the_network():
    block = DENSE + EXPERT
    parts = math.ceil(block / 5e6)
    assert parts == 3
    assert blocks(max_message=5e6).block_all_gather == equal(3 * 2 * block + parts)
    assert blocks(direct_all_gather=True).block_all_gather == equal(3 * 2 * block + 101)
    assert blocks(hierarchical=True).block_all_gather == equal(3 * 2 * block + 1001)


def test_group_recomputation_gathers_all_blocks_but_the_last_again():
    gather = blocks().block_all_gather
    assert blocks().block_backward_all_gather == equal(gather)
    asked = {"regathers_group": True, "recompute_group": 4, "recompute": "block"}
    assert blocks(**asked).block_backward_all_gather == equal(1.75 * gather)


def test_experts_are_reduced_in_their_own_groups():
    shape = dataclasses.replace(SHAPE, experts=8, experts_per_token=2)
    mesh = Mesh(shard=8, replicate=4, expert=4, ranks_per_node=8)
    found = blocks(shape=shape, mesh=mesh)
    dense, experts = DENSE + shape.router, 8 * EXPERT / 4
    assert found.expert_parameters == equal(experts)
    assert found.block_parameters == equal(dense + experts)
    assert found.block_all_gather == equal(3 * 2 * (dense + experts) + 2)
    assert found.expert_all_to_all == equal(13 * TOKENS * WIDTH * 2 * 2 + 1)
    hop = 10 * 4 + 4  # four replicas on four nodes, twice
    assert found.block_all_reduce == equal(11 * 4 * (dense / 8 + experts / 2) + 2 * hop)
    first, second = found.forward
    assert first.expert == 0 and second.expert == equal(2 * found.expert_all_to_all)
    backward = found.backward[0]
    assert backward.expert == equal(2 * found.expert_all_to_all)
    assert found.backward[1].expert == 0


def test_tensor_parallelism_divides_matrices_and_adds_reductions():
    mesh = Mesh(shard=4, replicate=4, tensor=2, ranks_per_node=8)
    found = blocks(mesh=mesh)
    assert found.block_parameters == (DENSE + EXPERT) / 2
    assert found.root_parameters == SHAPE.root_parameters / 2
    hidden = TOKENS * WIDTH * 2
    assert found.hidden_bytes == hidden
    assert found.tensor_all_reduce == equal(11 * hidden + 10 * 2 + 1)
    assert [each.tensor for each in found.forward] == [found.tensor_all_reduce] * 2
    assert [each.tensor for each in found.backward] == [found.tensor_all_reduce] * 2
    halved = blocks(mesh=mesh, async_tensor_parallel=True)
    assert halved.tensor_all_reduce == equal((11 * hidden + 21) / 2)
    hidden_by = blocks(mesh=mesh, async_tensor_all_reduce=True)
    second, first = hidden_by.compute.input_weight_gradients
    assert [each.tensor for each in hidden_by.backward] == [
        equal(hidden_by.tensor_all_reduce - first),
        equal(hidden_by.tensor_all_reduce - second),
    ]


def test_recomputation_repeats_the_reductions_that_it_needs():
    mesh = Mesh(shard=4, replicate=4, tensor=2, ranks_per_node=8)
    whole = blocks(mesh=mesh, recompute="block", early_stop=False)
    tensor = whole.tensor_all_reduce
    assert [each.tensor for each in whole.recompute] == [tensor, tensor]
    stops = blocks(mesh=mesh, recompute="block")
    assert [each.tensor for each in stops.recompute] == [tensor, 0.0]
    grouped = blocks(mesh=mesh, recompute="block", recompute_group=4)
    assert [each.tensor for each in grouped.recompute] == [tensor, equal(tensor * 0.75)]
    sequence = blocks(mesh=mesh, recompute="block", sequence_parallel=True)
    assert [each.tensor for each in sequence.recompute] == [tensor, equal(tensor / 2)]
    share = blocks(mesh=mesh, recompute="block", recomputed_share=0.25, early_stop=False)
    assert [each.tensor for each in share.recompute] == [equal(tensor / 4)] * 2
    attention = blocks(mesh=mesh, recompute="attention")
    assert [each.tensor for each in attention.recompute] == [0.0, 0.0]
    assert blocks(mesh=mesh).recompute == []


def test_context_ranks_move_keys_and_values():
    mesh = Mesh(shard=4, context=2, replicate=4, ranks_per_node=8)
    size = 2 * TOKENS * WIDTH * 2  # keys and values of both context ranks, per byte of an element
    assert blocks()._context_seconds(2) == 0.0
    ring, at_once = (blocks(mesh=mesh, context_all_gather=each) for each in (False, True))
    half, full = 3 * size * 2 + 1, 3 * size * 4 + 1
    if ring.work.tokens != TOKENS:
        half, full = (3 * size * each * ring.work.tokens / TOKENS + 1 for each in (2, 4))
    assert ring.forward[0].overlapped_context == equal(half)
    assert at_once.forward[0].exposed_context == equal(half)
    assert ring.forward[0].exposed_context == at_once.forward[0].overlapped_context == 0.0
    assert ring.backward[1].overlapped_context == equal(half + full)
    assert at_once.backward[1].exposed_context == equal(full)


def test_pipeline_sends_hidden_states_and_reduces_tied_tables():
    mesh = Mesh(pipeline=2, shard=4, tensor=2, replicate=2, ranks_per_node=8)
    found, hidden = blocks(mesh=mesh), TOKENS * WIDTH * 2
    assert blocks().stage_send == 0.0 and blocks().tied_all_reduce == 0.0
    assert found.stage_send == equal(17 * hidden + 1)
    near = Mesh(pipeline=2, shard=4, ranks_per_node=8)
    assert blocks("p4d.24xlarge:1", mesh=near).stage_send == equal(17 * hidden)
    split = blocks(mesh=mesh, split_sends=True)
    assert split.stage_send == equal(17 * hidden / 2 + 1 + 3 * hidden + 1)
    sequence = blocks(mesh=mesh, split_sends=True, sequence_parallel=True)
    assert sequence.stage_send == equal(17 * hidden / 2 + 1)
    table = found.end_parameters[1] / 4 * 4
    assert found.tied_all_reduce == equal(11 * table + 10 * 2 + 2)
    untied = dataclasses.replace(SHAPE, tied=False)
    assert blocks(mesh=mesh, shape=untied).tied_all_reduce == 0.0


def test_whole_states_are_reduced_over_all_data_and_context_ranks():
    shape = dataclasses.replace(SHAPE, experts=8, experts_per_token=2)
    mesh = Mesh(replicate=2, shard=4, context=2, expert=8, ranks_per_node=8)
    shared, whole = (blocks(shape=shape, mesh=mesh, shares_states=each) for each in (True, False))
    assert (shared.shard_group.ranks, shared.replica_group.ranks) == (8, 2)
    assert (whole.shard_group.ranks, whole.replica_group.ranks) == (1, 16)
    assert not whole.sharded and whole.expert_shard_group.ranks == 1
    dense = whole.block_parameters - whole.expert_parameters
    reduce = whole.network.all_reduce
    assert whole.block_all_reduce == equal(
        reduce(4 * dense, whole.replica_group)
        + reduce(4 * whole.expert_parameters, whole.expert_replica_group)
    )
    assert whole.expert_replica_group == shared.replica_group


def test_a_token_travels_once_to_each_place_with_experts_of_it():
    shape = dataclasses.replace(SHAPE, experts=16, experts_per_token=4)
    for mesh, places in ((Mesh(shard=16, expert=16, ranks_per_node=8), 2),
                         (Mesh(shard=8, expert=8, ranks_per_node=8), 8)):  # fmt: skip
        adjacent = 1 if places == 2 else 2  # 4 experts on a node with 8, or on ranks with 2 each
        random = places * (1 - (1 - 1 / places) ** 4)  # expected places of 4 experts
        for dispatch, copies in (("each", 4), ("random", random), ("adjacent", adjacent)):
            found = blocks(shape=shape, mesh=mesh, dispatch=dispatch)
            sent = found.network.all_to_all(copies * found.hidden_bytes, rank_group(mesh, "expert"))
            assert found.expert_all_to_all == equal(sent)


def test_optimizer_updates_a_shard():
    found = blocks()
    shard = (LAYERS * (DENSE + EXPERT) + SHAPE.root_parameters) / 8
    assert found.optimizer_update == equal(found.compute.optimizer_update(shard))
    away = blocks(offload_optimizer=True)
    assert away.optimizer_update == equal(shard * away.work.optimizer_bytes / 7.0)
    shape = dataclasses.replace(SHAPE, experts=8, experts_per_token=2)
    mesh = Mesh(shard=8, replicate=4, expert=4, ranks_per_node=8)
    mixed = blocks(shape=shape, mesh=mesh, offload_optimizer=True)
    experts = LAYERS * 8 * EXPERT / 4
    dense = LAYERS * (DENSE + shape.router) + shape.root_parameters
    parameters = dense / 8 + experts / 2
    assert mixed.optimizer_update == equal(parameters * mixed.work.optimizer_bytes / 7.0)


def test_slowdown_consists_of_stragglers_and_contention():
    single = blocks("p4d.24xlarge:1", mesh=Mesh())
    assert single.slowdown == 1.0
    found = blocks()
    waiting = 1 + found.constants.straggler * math.sqrt(2 * math.log(32))
    compute = found.compute
    computing = compute.forward.total + compute.recompute.total + compute.backward.total
    gather, scatter, reduce = 2 * found.block_all_gather, found.block_reduce_scatter, 0.5
    moving = gather + scatter + reduce * found.block_all_reduce
    lost = 8 * gather / 64 + 23 * 2 + 8 * scatter / 64 + 23
    lost += 4 * reduce * found.block_all_reduce / 64 + 23 * reduce
    assert found.slowdown == equal(waiting * (1 + lost / max(moving, computing)))
    in_line = blocks(prefetch=0, two_hop=False)
    lost = 8 + computing / 8 + 19 * 3 + 4 + 19
    assert in_line.slowdown == equal(waiting * (1 + lost / computing))
    kept = blocks(prefetch=0, reshard_after_forward=False, gathered_across_micro_batches=True)
    lost = 8 + computing / 8 + 19 * (0.5 + 1) + 4 + 19 * 0.5
    assert kept.slowdown == equal(waiting * (1 + lost / computing))
    resident = blocks(prefetch=0, resident_blocks=2)
    lost = 8 + computing / 8 + 19 * (1.5 + 1) + 4 + 19 * 0.5
    expected = 1.5 if not resident.work.gathered_across_micro_batches else 1.625
    lost += 19 * (expected - 1.5)
    assert resident.slowdown == equal(waiting * (1 + lost / computing))
    direct = blocks(direct_all_gather=True)
    assert direct._contention > found._contention


def test_head_and_weight_gradients_slow_down_alike():
    found = blocks()
    forward, backward = found.compute.head
    assert found.head == (equal(forward * found.slowdown), equal(backward * found.slowdown))
    assert found.weight_gradients == equal(found.compute.weight_gradients * found.slowdown)
    assert found.head_weight_gradients == equal(
        found.compute.head_weight_gradients * found.slowdown
    )
    assert blocks(offloaded_bytes=21.0).offload_copy == equal(3.0)
    segments = [*found.forward, *found.backward]
    compute = found.compute
    assert sum(each.compute for each in segments) == equal(
        (compute.forward.total + compute.backward.total) * found.slowdown
    )
