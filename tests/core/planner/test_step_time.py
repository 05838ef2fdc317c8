"""Step times without a pipeline, compared with sums by hand."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearlinear.config import train as train_config
from nearlinear.distributed.mesh import Mesh
from nearlinear.planner import step_time as step_time_module
from nearlinear.planner.api import parse_cluster
from nearlinear.planner.block_time import BlockTimes
from nearlinear.planner.cluster import Cluster, find_accelerator, find_node
from nearlinear.planner.compute_time import ComputeTimes
from nearlinear.planner.fitted_constants import FittedConstants, load_constants
from nearlinear.planner.memory import block_ops
from nearlinear.planner.memory.op_trace import OpTrace, TracedTensor
from nearlinear.planner.model_shape import ACTIVATIONS, ModelShape
from nearlinear.planner.network_time import RankGroup
from nearlinear.planner.step_time import step_time
from nearlinear.planner.timeline import StepTime, Timeline
from nearlinear.planner.workload import Workload, workload_from_config

FITTED = load_constants()
SHAPE = ModelShape(layers=8, width=4096, heads=32, inner=16384, vocabulary=50000)


def work(**changes) -> Workload:
    asked = {
        "shape": SHAPE,
        "sequence": 2048,
        "micro_batch": 4,
        "micro_batches": 1,
        "mesh": Mesh(shard=32, ranks_per_node=8),
    }
    return Workload(**(asked | changes))


def run(cluster="p4d.24xlarge:4", fitted: FittedConstants = FITTED, **changes) -> StepTime:
    return step_time(work(**changes), parse_cluster(cluster), fitted)


def test_single_rank_only_computes():
    alone = Cluster(find_node("p4d.24xlarge"), 1, gpus=1)
    found = step_time(work(mesh=Mesh(), micro_batches=3), alone, FITTED)
    parts = found.blocks
    blocks = SHAPE.layers * (parts.compute.forward.total + parts.compute.backward.total)
    expected = 3 * (blocks + sum(parts.compute.head)) + parts.optimizer_update
    assert found.seconds == pytest.approx(expected, rel=1e-12)
    assert set(found.busy) == {"compute", "optimizer"}


def test_binding_power_limit_lowers_all_rates_of_products():
    gpu = find_accelerator("H100-80GB")
    throttled, free = (
        ComputeTimes(work(fp8=True), dataclasses.replace(gpu, throttled=each), FITTED)
        for each in (True, False)
    )
    assert throttled.rate == pytest.approx(free.rate * FITTED.throttled_share)
    assert throttled.fp8_rate == pytest.approx(free.fp8_rate * FITTED.throttled_share)
    assert throttled.memory_rate == free.memory_rate
    assert not find_accelerator("A100-80GB").throttled and gpu.throttled


def test_fused_casts_write_activations_and_cast_weights_once_per_step():
    gpu, rows, k, n = find_accelerator("H100-80GB"), 4 * 2048, 4096, 16384
    seconds = {
        count: ComputeTimes(
            work(fp8=True, fused_casts=True, micro_batches=count), gpu, FITTED
        )._linear(k, n)
        for count in (1, 4)
    }
    rate = gpu.hbm_gb_s * 1e9 * FITTED.memory_share
    assert seconds[1] - seconds[4] == pytest.approx(2.5 * k * n * 2 * (1 - 1 / 4) / rate)
    product = ComputeTimes(work(fp8=True), gpu, FITTED).matmul(rows, k, n, in_fp8=True)
    written = 2 * (rows * k + 2.5 * k * n) / rate + FITTED.kernel_seconds
    assert seconds[1] == pytest.approx(product + written)


def test_newest_attention_kernels_use_the_rate_of_the_gpu():
    gpu = find_accelerator("H100-80GB")
    older, newest = (
        ComputeTimes(work(newest_attention=each), gpu, FITTED)._core for each in (False, True)
    )
    assert newest == pytest.approx(older * gpu.older_kernels)


def test_step_without_overlap_is_the_sum_of_tasks():
    found = run(prefetch=0, overlapped_reduce=False)
    parts, layers = found.blocks, SHAPE.layers
    gathers = parts.all_gather(parts.root_parameters) + (2 * layers - 1) * parts.block_all_gather
    reductions = layers * parts.block_reduce_scatter + parts.reduce_scatter(parts.root_parameters)
    assert found.busy["all-gather"] == pytest.approx(gathers)
    assert found.busy["reduce-scatter"] == pytest.approx(reductions)
    # the root and the first block are gathered on one stream; everything else is sequential
    assert found.seconds == pytest.approx(sum(found.busy.values()), rel=1e-9)


def test_overlapped_communication_exposes_only_its_ends():
    found = run(micro_batch=64)
    parts = found.blocks
    blocks = SHAPE.layers * sum(p.compute for p in (*parts.forward, *parts.backward))
    first = parts.all_gather(parts.root_parameters) + parts.block_all_gather
    last = parts.block_reduce_scatter + parts.reduce_scatter(parts.root_parameters)
    expected = first + blocks + sum(parts.head) + last + parts.optimizer_update
    assert found.seconds == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("cluster", ["p4d.24xlarge:4", "p5.48xlarge:4"])
def test_compute_and_exposed_time_add_up_to_the_step(passes, cluster):
    found = run(cluster, micro_batches=passes, mesh=Mesh(shard=8, replicate=4, ranks_per_node=8))
    assert found.busy["compute"] + sum(found.exposed.values()) == pytest.approx(found.seconds)
    for kind, value in found.exposed.items():
        assert value <= found.busy[kind] + 1e-12


def test_simulated_micro_batches_extrapolate_exactly(monkeypatch):
    quick = run(micro_batches=9, mesh=Mesh(shard=16, replicate=2, ranks_per_node=8))
    monkeypatch.setattr(step_time_module, "SIMULATED", 9)
    whole = run(micro_batches=9, mesh=Mesh(shard=16, replicate=2, ranks_per_node=8))
    assert quick.seconds == pytest.approx(whole.seconds, rel=1e-9)
    for kind in ("compute", "all-gather", "second hop"):
        assert quick.busy[kind] == pytest.approx(whole.busy[kind], rel=1e-9)


@pytest.mark.parametrize("once_root", [False, True])
def test_gradients_reduced_once_leave_one_reduction_per_step(once_root):
    found = run(micro_batches=3, reduced_once_blocks=5, reduced_once_root=once_root)
    parts = found.blocks
    blocks, roots = 3 * (SHAPE.layers - 5) + 5, 1 if once_root else 3
    assert found.busy["reduce-scatter"] == pytest.approx(
        blocks * parts.block_reduce_scatter + roots * parts.reduce_scatter(parts.root_parameters)
    )


def test_blocks_gathered_across_micro_batches_are_gathered_once():
    found = run(micro_batches=3, gathered_across_micro_batches=True, resident_blocks=5)
    gathered = [task.label for task in found.timeline.tasks if task.kind == "all-gather"]
    assert gathered.count("") == 1  # the root
    # the last block's backward pass follows its forward pass, and backward ends with block 0
    assert [gathered.count(f"block {n}") for n in range(8)] == [1] * 5 + [6, 6, 3]


def test_gather_starts_only_when_earlier_blocks_are_freed():
    tasks = run(prefetch=1, micro_batch=64).timeline.tasks
    forward = [task for task in tasks if task.kind == "all-gather"][: 1 + SHAPE.layers]
    gathers = {task.label: task.start for task in forward}
    ends = {task.label: task.end for task in tasks if task.kind == "compute"}
    for block in range(3, 8):
        assert gathers[f"block {block}"] == ends[f"forward {block - 3}"] > 0


def test_stream_runs_its_tasks_in_order():
    timeline = Timeline()
    first = timeline.add("a", 2.0)
    second = timeline.add("b", 1.0, [first])
    third = timeline.add("b", 3.0)
    assert (second.start, third.start, timeline.end) == (2.0, 3.0, 6.0)
    assert timeline.busy() == {"a": 2.0, "b": 4.0}
    assert timeline.exposed("a") == {"b": 4.0}
    assert timeline.exposed("b") == {"a": 2.0}


SIZES = st.sampled_from([1, 2, 4, 8, 16])


@settings(max_examples=25, deadline=None)
@given(batch=SIZES, passes=SIZES, shard=st.sampled_from([1, 2, 8, 16, 32]), recompute=st.booleans())
def test_step_time_is_monotonic(batch, passes, shard, recompute):
    asked = {
        "micro_batch": batch,
        "micro_batches": passes,
        "mesh": Mesh(shard=shard, replicate=32 // shard, ranks_per_node=8),
        "recompute": "block" if recompute else "none",
    }
    here = run(**asked).seconds
    assert run(**(asked | {"micro_batch": 2 * batch})).seconds > here
    assert run(**(asked | {"micro_batches": passes + 1})).seconds > here
    assert run(**(asked | {"recompute": "block"})).seconds >= here
    assert run("p4de.24xlarge:4", **asked).seconds <= here
    assert run("a100-40gb:4", **asked).seconds <= here
    slower = dataclasses.replace(FITTED, straggler=FITTED.straggler + 0.05)
    assert run(fitted=slower, **asked).seconds > here
    fewer = dataclasses.replace(SHAPE, layers=SHAPE.layers - 1)
    assert run(**(asked | {"shape": fewer})).seconds < here


@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_tensor_parallel_communication_is_exposed(tensor):
    mesh = Mesh(shard=32 // tensor, tensor=tensor, ranks_per_node=8)
    found = run(mesh=mesh)
    assert 0 < found.exposed["tensor"] == pytest.approx(found.busy["tensor"])
    beside = run(mesh=mesh, async_tensor_parallel=True).busy["tensor"]
    assert beside == pytest.approx(found.busy["tensor"] / tensor)


def test_timeline_figure_shows_every_task():
    from nearlinear import plots

    found = run(micro_batches=5, recompute="block")
    ax = plots.step_streams(found)
    drawn = sum(len(bars.get_paths()) for bars in ax.collections)
    assert drawn == sum(task.seconds > 0 for task in found.timeline.tasks)
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert {"all-gather", "compute: forward", "compute: recompute", "compute: backward"} <= set(
        labels
    )
    assert ax.get_xlabel() == "seconds (3 of 5 micro-batches)"


def test_gelu_operators_match_the_memory_model():
    """The time model counts the operators traced by the memory model."""
    listing = OpTrace(TracedTensor(2, 2))
    block_ops._gelu_by_tanh(listing, TracedTensor(2, 2))
    of_two = sum(len(operator.inputs) == 2 for operator in listing.operators)
    assert ACTIVATIONS["gelu_new"] == (len(listing.operators) - of_two, of_two)


@pytest.mark.parametrize(("activation", "passes"), [("gelu", 2), ("gelu_new", 6 * 2 + 2 * 3)])
def test_memory_traffic_of_an_activation_function(activation, passes):
    free = dataclasses.replace(FITTED, kernel_seconds=0.0)
    alone = Cluster(find_node("p4d.24xlarge"), 1, gpus=1)
    asked = work(mesh=Mesh(), shape=dataclasses.replace(SHAPE, activation=activation))
    found = step_time(asked, alone, free).blocks.compute
    inner, hidden = asked.tokens * SHAPE.inner, asked.tokens * SHAPE.width
    assert found._elementwise[1] == pytest.approx(
        (passes * inner + 5 * hidden) * 2 / found.memory_rate
    )
    compiled = step_time(dataclasses.replace(asked, compiled=True), alone, free).blocks.compute
    assert compiled._elementwise[1] == pytest.approx(
        (2 * inner + 4 * hidden) * 2 / found.memory_rate
    )


def test_float32_doubles_tensor_communication():
    mesh = Mesh(shard=8, tensor=4, ranks_per_node=8)
    half, whole = (run(mesh=mesh, precision=name) for name in ("bf16", "fp32"))
    assert whole.blocks.hidden_bytes == 2 * half.blocks.hidden_bytes
    assert whole.busy["tensor"] > 1.9 * half.busy["tensor"]


def test_offloaded_optimizer_adds_host_copies():
    here, away = run(), run(offload_optimizer=True)
    shard = here.blocks.block_parameters / 32
    more = shard * 4 / away.blocks.network.host  # bytes of a float32 value or gradient
    assert away.blocks.block_all_gather - here.blocks.block_all_gather == pytest.approx(more)
    assert away.blocks.block_reduce_scatter - here.blocks.block_reduce_scatter == pytest.approx(
        more
    )
    assert away.blocks.optimizer_update == pytest.approx(
        SHAPE.parameters / 32 * 32.0 / away.blocks.network.host
    )
    assert away.blocks.optimizer_update > 10 * here.blocks.optimizer_update


def test_smaller_optimizer_state_updates_faster():
    def update(**settings) -> float:
        asked = {"model": {"preset": "gpt2-small"}, "parallel": {"bf16": True}} | settings
        planned = workload_from_config(train_config.load(asked, environment={}), 32, 8)
        return BlockTimes(planned, parse_cluster("p4d.24xlarge:4"), FITTED).optimizer_update

    whole = update()
    assert update(optimizer={"kind": "adamw_8bit"}) == pytest.approx(
        whole * (16 + 4 * (1 + 4 / 256)) / 32
    )
    replicas = {"hybrid_shard_degree": 8, "bf16": True}
    shared = update(parallel=replicas | {"shard_optimizer_state": True})
    assert shared == pytest.approx(update(parallel=replicas) / 4)


def test_expert_parallel_experts_use_their_own_shard_group():
    mixture = dataclasses.replace(SHAPE, gated=True, experts=8, experts_per_token=2)
    asked = {"shape": mixture, "micro_batch": 1}
    whole = run(**asked).blocks
    divided = run(mesh=Mesh(shard=32, expert=8, ranks_per_node=8), **asked).blocks
    assert divided.expert_parameters == whole.expert_parameters / 8
    assert divided.expert_shard_group == RankGroup(ranks=4, nodes=4, sharing=8)
    rest = divided.block_parameters - divided.expert_parameters
    assert divided.block_all_gather == pytest.approx(
        divided.all_gather(rest)
        + divided.all_gather(divided.expert_parameters, divided.expert_shard_group)
    )
    # a rank updates as many parameters: an eighth of the experts, shared by an eighth of the ranks
    assert divided.optimizer_update == pytest.approx(whole.optimizer_update)
    rows = 2 * 2048 * SHAPE.width * 2  # bytes of every token for two experts
    assert divided.expert_all_to_all == divided.network.all_to_all(rows, RankGroup(8, 1, 1))
    assert whole.expert_all_to_all == 0.0


@pytest.mark.parametrize(
    ("asked", "exchanges"),
    [
        ({"sequence_parallel": True}, 1.5),  # the last reduce-scatter is spared
        ({}, 1.0),
        ({"early_stop": False, "sequence_parallel": True}, 2.0),
    ],
)
def test_early_stop_spares_the_last_reduce_scatter(asked, exchanges):
    mesh = Mesh(shard=8, tensor=4, ranks_per_node=8)
    found = run(mesh=mesh, recompute="block", **asked).blocks
    assert sum(piece.tensor for piece in found.recompute) == pytest.approx(
        exchanges * found.tensor_all_reduce
    )


def test_recomputation_repeats_the_communication_of_whole_blocks_only():
    mixture = dataclasses.replace(SHAPE, gated=True, experts=8, experts_per_token=2)
    mesh = Mesh(shard=8, tensor=4, expert=8, ranks_per_node=8)
    asked = {"shape": mixture, "mesh": mesh, "recomputed_share": 0.5}
    whole, part = (run(recompute=kind, **asked).blocks for kind in ("block", "selective"))
    assert sum(piece.expert for piece in whole.recompute) == whole.expert_all_to_all > 0
    assert whole.recompute[0].tensor == 0.5 * whole.tensor_all_reduce > 0
    assert part.compute.recompute.total > 0
    assert all(piece.expert == piece.tensor == 0.0 for piece in part.recompute)


def test_context_parallel_gradients_are_float32():
    """Backward sends keys and values again, and their gradients in twice the width."""
    mesh = Mesh(shard=4, context=8, ranks_per_node=8)
    ring, at_once = (run(mesh=mesh, context_all_gather=each).blocks for each in (False, True))
    there = ring.forward[0].overlapped_context
    size = 2 * 4 * 2048 * SHAPE.width * 2  # bytes of all keys and values in 16 bits
    assert there == ring.network.all_gather(size, RankGroup(8, 1, 4)) > 0
    twice = ring.network.all_gather(2 * size, RankGroup(8, 1, 4))
    assert ring.backward[1].overlapped_context == pytest.approx(there + twice)
    assert (at_once.forward[0].exposed_context, at_once.backward[1].exposed_context) == (
        there,
        twice,
    )
    assert at_once.forward[0].overlapped_context == at_once.backward[1].overlapped_context == 0.0


def test_context_all_gather_is_exposed():
    mesh = Mesh(shard=4, context=8, ranks_per_node=8)
    found = run(mesh=mesh, context_all_gather=True, recompute="block")
    parts = found.blocks
    each = (
        2 * parts.forward[0].exposed_context + parts.backward[1].exposed_context
    )  # once more for recomputation
    assert found.busy["context"] == pytest.approx(8 * each)
    assert run(mesh=mesh, recompute="block").seconds < found.seconds
