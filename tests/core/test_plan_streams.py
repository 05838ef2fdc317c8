"""Steps laid out on streams, against sums that can be done by hand."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearlinear.mesh import Mesh
from nearlinear.plan import parameters, step, workload
from nearlinear.plan.groups import Group
from nearlinear.plan.hardware import Cluster, node, parse_cluster
from nearlinear.plan.memory import blocks
from nearlinear.plan.memory.listing import Listing, Value
from nearlinear.plan.parameters import Parameters
from nearlinear.plan.shape import ACTIVATIONS, Shape
from nearlinear.plan.streams import Timeline
from nearlinear.plan.workload import Workload
from nearlinear.train import config as train_config

FITTED = parameters.load()
SHAPE = Shape(layers=8, width=4096, heads=32, inner=16384, vocabulary=50000)


def work(**changes) -> Workload:
    asked = {
        "shape": SHAPE,
        "sequence": 2048,
        "micro_batch": 4,
        "passes": 1,
        "mesh": Mesh(shard=32, ranks_per_node=8),
    }
    return Workload(**(asked | changes))


def run(cluster="p4d.24xlarge:4", fitted: Parameters = FITTED, **changes) -> step.Step:
    return step.step(work(**changes), parse_cluster(cluster), fitted)


def test_one_rank_computes_and_nothing_else():
    alone = Cluster(node("p4d.24xlarge"), 1, gpus=1)
    found = step.step(work(mesh=Mesh(), passes=3), alone, FITTED)
    parts = found.parts
    blocks = SHAPE.layers * (parts.compute.forward.total + parts.compute.backward.total)
    expected = 3 * (blocks + sum(parts.compute.head)) + parts.update
    assert found.seconds == pytest.approx(expected, rel=1e-12)
    assert set(found.busy) == {"compute", "optimizer"}


def test_nothing_overlapped_is_the_sum_of_everything():
    found = run(prefetch=0, overlapped_reduce=False)
    parts, layers = found.parts, SHAPE.layers
    gathers = parts.gather(parts.root) + (2 * layers - 1) * parts.gather_block
    reductions = layers * parts.reduce_block + parts.reduce(parts.root)
    assert found.busy["all-gather"] == pytest.approx(gathers)
    assert found.busy["reduce-scatter"] == pytest.approx(reductions)
    # The root's gather goes before the first block's on the same stream; all else is in turn.
    assert found.seconds == pytest.approx(sum(found.busy.values()), rel=1e-9)


def test_communication_that_fits_beside_computation_costs_its_ends_only():
    found = run(micro_batch=64)
    parts = found.parts
    blocks = SHAPE.layers * sum(p.compute for p in (*parts.forward, *parts.backward))
    first = parts.gather(parts.root) + parts.gather_block
    last = parts.reduce_block + parts.reduce(parts.root)
    expected = first + blocks + sum(parts.head) + last + parts.update
    assert found.seconds == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("cluster", ["p4d.24xlarge:4", "p5.48xlarge:4"])
def test_computation_and_what_is_exposed_make_the_step(passes, cluster):
    found = run(cluster, passes=passes, mesh=Mesh(shard=8, replicate=4, ranks_per_node=8))
    assert found.busy["compute"] + sum(found.exposed.values()) == pytest.approx(found.seconds)
    for kind, value in found.exposed.items():
        assert value <= found.busy[kind] + 1e-12


def test_passes_that_are_not_laid_out_are_like_the_ones_before(monkeypatch):
    quick = run(passes=9, mesh=Mesh(shard=16, replicate=2, ranks_per_node=8))
    monkeypatch.setattr(step, "LAID_OUT", 9)
    whole = run(passes=9, mesh=Mesh(shard=16, replicate=2, ranks_per_node=8))
    assert quick.seconds == pytest.approx(whole.seconds, rel=1e-9)
    for kind in ("compute", "all-gather", "second hop"):
        assert quick.busy[kind] == pytest.approx(whole.busy[kind], rel=1e-9)


def test_a_stream_runs_its_tasks_in_turn():
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
def test_more_work_takes_longer_and_better_machines_less(batch, passes, shard, recompute):
    asked = {
        "micro_batch": batch,
        "passes": passes,
        "mesh": Mesh(shard=shard, replicate=32 // shard, ranks_per_node=8),
        "recompute": "block" if recompute else "none",
    }
    here = run(**asked).seconds
    assert run(**(asked | {"micro_batch": 2 * batch})).seconds > here
    assert run(**(asked | {"passes": passes + 1})).seconds > here
    assert run(**(asked | {"recompute": "block"})).seconds >= here
    assert run("p4de.24xlarge:4", **asked).seconds <= here
    assert run("a100-40gb:4", **asked).seconds <= here
    slower = dataclasses.replace(FITTED, straggler=FITTED.straggler + 0.05)
    assert run(fitted=slower, **asked).seconds > here
    fewer = dataclasses.replace(SHAPE, layers=SHAPE.layers - 1)
    assert run(**(asked | {"shape": fewer})).seconds < here


@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_tensor_ranks_wait_for_each_other(tensor):
    mesh = Mesh(shard=32 // tensor, tensor=tensor, ranks_per_node=8)
    found = run(mesh=mesh)
    assert 0 < found.exposed["tensor"] == pytest.approx(found.busy["tensor"])
    beside = run(mesh=mesh, overlapped_tensor=True).busy["tensor"]
    assert beside == pytest.approx(found.busy["tensor"] / tensor)


def test_the_figure_shows_every_task():
    from nearlinear import plots

    found = run(passes=5, recompute="block")
    ax = plots.step_streams(found)
    drawn = sum(len(bars.get_paths()) for bars in ax.collections)
    assert drawn == sum(task.seconds > 0 for task in found.timeline.tasks)
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert {"all-gather", "compute: forward", "compute: again", "compute: backward"} <= set(labels)
    assert ax.get_xlabel() == "seconds (3 of 5 passes)"


def test_an_activation_written_out_is_counted_as_memory_counts_it():
    """The operators of GPT-2's GELU are listed once, in the memory model."""
    listing = Listing(Value(2, 2))
    blocks._gelu_by_tanh(listing, Value(2, 2))
    of_two = sum(len(operator.inputs) == 2 for operator in listing.operators)
    assert ACTIVATIONS["gelu_new"] == (len(listing.operators) - of_two, of_two)


@pytest.mark.parametrize(("activation", "passes"), [("gelu", 2), ("gelu_new", 6 * 2 + 2 * 3)])
def test_what_passes_through_memory_for_an_activation(activation, passes):
    free = dataclasses.replace(FITTED, kernel_seconds=0.0)
    alone = Cluster(node("p4d.24xlarge"), 1, gpus=1)
    asked = work(mesh=Mesh(), shape=dataclasses.replace(SHAPE, activation=activation))
    found = step.step(asked, alone, free).parts.compute
    inner, hidden = asked.tokens * SHAPE.inner, asked.tokens * SHAPE.width
    assert found._between[1] == pytest.approx((passes * inner + 5 * hidden) * 2 / found.memory)
    compiled = step.step(dataclasses.replace(asked, compiled=True), alone, free).parts.compute
    assert compiled._between[1] == pytest.approx((2 * inner + 4 * hidden) * 2 / found.memory)


def test_float32_moves_twice_the_bytes():
    mesh = Mesh(shard=8, tensor=4, ranks_per_node=8)
    half, whole = (run(mesh=mesh, precision=name) for name in ("bf16", "fp32"))
    assert whole.parts.hidden == 2 * half.parts.hidden
    assert whole.busy["tensor"] > 1.9 * half.busy["tensor"]


def test_an_offloaded_optimizer_copies_and_waits():
    here, away = run(), run(offload_optimizer=True)
    shard = here.parts.block / 32
    more = shard * 4 / away.parts.links.host  # bytes of a value, or of a gradient, in float32
    assert away.parts.gather_block - here.parts.gather_block == pytest.approx(more)
    assert away.parts.reduce_block - here.parts.reduce_block == pytest.approx(more)
    assert away.parts.update == pytest.approx(SHAPE.parameters / 32 * 32.0 / away.parts.links.host)
    assert away.parts.update > 10 * here.parts.update


def test_less_of_the_optimizer_is_quicker():
    def update(**settings) -> float:
        asked = {"model": {"preset": "gpt2-small"}, "parallel": {"bf16": True}} | settings
        planned = workload.from_config(train_config.load(asked, environment={}), 32, 8)
        return step.Passes(planned, parse_cluster("p4d.24xlarge:4"), FITTED).update

    whole = update()
    assert update(optimizer={"kind": "adamw_8bit"}) == pytest.approx(
        whole * (16 + 4 * (1 + 4 / 256)) / 32
    )
    replicas = {"hybrid_shard_degree": 8, "bf16": True}
    shared = update(parallel=replicas | {"shard_optimizer_state": True})
    assert shared == pytest.approx(update(parallel=replicas) / 4)


def test_divided_experts_are_shared_by_fewer_ranks():
    mixture = dataclasses.replace(SHAPE, gated=True, experts=8, experts_per_token=2)
    asked = {"shape": mixture, "micro_batch": 1}
    whole = run(**asked).parts
    divided = run(mesh=Mesh(shard=32, expert=8, ranks_per_node=8), **asked).parts
    assert divided.experts == whole.experts / 8
    assert divided.expert_sharing == Group(ranks=4, nodes=4, sharing=8)
    rest = divided.block - divided.experts
    assert divided.gather_block == pytest.approx(
        divided.gather(rest) + divided.gather(divided.experts, divided.expert_sharing)
    )
    # A rank updates as many parameters as before: an eighth of the experts, shared by an eighth.
    assert divided.update == pytest.approx(whole.update)
    rows = 2 * 2048 * SHAPE.width * 2  # bytes: each token for each of its two experts
    assert divided.dispatch == divided.links.exchange(rows, Group(8, 1, 1))
    assert whole.dispatch == 0.0


@pytest.mark.parametrize(
    ("asked", "exchanges"),
    [
        ({"sequence_parallel": True}, 1.5),  # the second half's gather, without its scatter
        ({}, 1.0),
        ({"stops_early": False, "sequence_parallel": True}, 2.0),
    ],
)
def test_stopping_early_spares_the_last_scatter(asked, exchanges):
    mesh = Mesh(shard=8, tensor=4, ranks_per_node=8)
    found = run(mesh=mesh, recompute="block", **asked).parts
    assert sum(piece.tensor for piece in found.again) == pytest.approx(exchanges * found.exchange)


def test_context_ranks_send_gradients_in_float32():
    """There keys and values; back both again, and their gradients, twice as wide."""
    mesh = Mesh(shard=4, context=8, ranks_per_node=8)
    ring, at_once = (run(mesh=mesh, context_at_once=each).parts for each in (False, True))
    there = ring.forward[0].context
    size = 2 * 4 * 2048 * SHAPE.width * 2  # of keys and values of all tokens, in 16 bits
    assert there == ring.links.gather(size, Group(8, 1, 4)) > 0
    twice = ring.links.gather(2 * size, Group(8, 1, 4))
    assert ring.backward[1].context == pytest.approx(there + twice)
    assert (at_once.forward[0].at_once, at_once.backward[1].at_once) == (there, twice)
    assert at_once.forward[0].context == at_once.backward[1].context == 0.0


def test_keys_that_are_gathered_at_once_are_waited_for():
    mesh = Mesh(shard=4, context=8, ranks_per_node=8)
    found = run(mesh=mesh, context_at_once=True, recompute="block")
    parts = found.parts
    each = 2 * parts.forward[0].at_once + parts.backward[1].at_once  # once more to compute again
    assert found.busy["context"] == pytest.approx(8 * each)
    assert run(mesh=mesh, recompute="block").seconds < found.seconds
