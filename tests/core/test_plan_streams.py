"""Steps laid out on streams, against sums that can be done by hand."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearlinear.mesh import Mesh
from nearlinear.plan import parameters, pipelines, step
from nearlinear.plan.hardware import Cluster, node, parse_cluster
from nearlinear.plan.links import Links
from nearlinear.plan.parameters import Parameters
from nearlinear.plan.shape import Shape
from nearlinear.plan.streams import Timeline
from nearlinear.plan.workload import Group, Workload, group

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
    gathers = parts.gather(parts.root) + (2 * layers - 1) * parts.gather(parts.block)
    reductions = layers * parts.reduce(parts.block) + parts.reduce(parts.root)
    assert found.busy["all-gather"] == pytest.approx(gathers)
    assert found.busy["reduce-scatter"] == pytest.approx(reductions)
    # The root's gather goes before the first block's on the same stream; all else is in turn.
    assert found.seconds == pytest.approx(sum(found.busy.values()), rel=1e-9)


def test_communication_that_fits_beside_computation_costs_its_ends_only():
    found = run(micro_batch=64)
    parts = found.parts
    blocks = SHAPE.layers * sum(p.compute for p in (*parts.forward, *parts.backward))
    first = parts.gather(parts.root) + parts.gather(parts.block)
    last = parts.reduce(parts.block) + parts.reduce(parts.root)
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


@pytest.mark.parametrize(("ranks", "batches"), [(2, 4), (4, 8), (8, 8), (3, 17)])
@pytest.mark.parametrize("schedule", ["simple", "1f1b"])
def test_the_bubble_of_a_pipeline(ranks, batches, schedule):
    order = pipelines.orders(ranks, 1, batches, schedule)
    timeline = pipelines.run(order, [1.0] * ranks, [2.0] * ranks)
    bubble = 1 - batches * 3.0 / timeline.end
    assert bubble == pytest.approx((ranks - 1) / (batches + ranks - 1))


@pytest.mark.parametrize(("ranks", "virtual", "batches"), [(2, 2, 4), (4, 2, 8), (4, 3, 16)])
def test_several_stages_per_rank_divide_the_bubble(ranks, virtual, batches):
    order = pipelines.orders(ranks, virtual, batches, "1f1b")
    stages = ranks * virtual
    timeline = pipelines.run(order, [1.0] * stages, [2.0] * stages)
    idle = timeline.end - batches * virtual * 3.0
    assert idle == pytest.approx((ranks - 1) * 3.0)


@pytest.mark.parametrize("virtual", [1, 2])
@pytest.mark.parametrize("batches", [8, 24, 40])
def test_every_stage_does_every_micro_batch_once(virtual, batches):
    for rank, order in enumerate(pipelines.orders(4, virtual, batches, "1f1b")):
        stages = range(rank, 4 * virtual, 4)
        assert sorted(order) == sorted(
            (way, stage, batch)
            for way in ("forward", "backward")
            for stage in stages
            for batch in range(batches)
        )


@pytest.mark.parametrize("virtual", [1, 2])
@pytest.mark.parametrize("schedule", ["1f1b", "simple"])
@pytest.mark.parametrize("beside", [True, False])
def test_a_full_pipeline_takes_as_long_for_every_micro_batch(virtual, beside, schedule):
    """What `pipelines.pipelined` leaves out, against laying all of it out."""
    mesh = Mesh(pipeline=4, tensor=8, ranks_per_node=8)
    asked = {"virtual": virtual, "overlapped_sends": beside, "schedule": schedule}
    found = run(passes=32, mesh=mesh, micro_batch=1, **asked)
    there, back = pipelines._stages(found.work, found.parts, 4 * virtual)
    order = pipelines.orders(4, virtual, 32, schedule)
    whole = pipelines.run(order, there, back, found.parts.handing_on, beside)
    after = found.seconds - found.parts.update
    assert after == pytest.approx(whole.end, rel=0.03)


def test_where_a_group_of_ranks_stands():
    mesh = Mesh(pipeline=2, replicate=2, shard=8, tensor=4, ranks_per_node=8)
    assert group(mesh, "tensor") == Group(ranks=4, nodes=1, sharing=2)
    assert group(mesh, "shard", "context") == Group(ranks=8, nodes=4, sharing=4)
    assert group(mesh, "replicate") == Group(ranks=2, nodes=2, sharing=8)
    assert group(mesh, "pipeline") == Group(ranks=2, nodes=2, sharing=8)
    assert group(Mesh(shard=4), "shard") == Group(ranks=4, nodes=1, sharing=1)


def test_collectives_move_what_they_must():
    free = dataclasses.replace(
        FITTED, hop_inside=0.0, hop_between=0.0, link_share=1.0, network_share=1.0
    )
    links, size = Links(node("p4d.24xlarge"), free), 8e9
    inside = Group(ranks=8, nodes=1, sharing=1)
    assert links.gather(size, inside) == pytest.approx(size * 7 / 8 / 300e9)
    across = Group(ranks=32, nodes=4, sharing=1)
    assert links.gather(size, across) == pytest.approx(size * 3 / 4 / 50e9)
    assert links.reduce(size, across) == pytest.approx(2 * links.gather(size, across))
    eighth = Group(ranks=4, nodes=4, sharing=8)
    assert links.gather(size / 8, eighth) == pytest.approx(links.gather(size, across))
    assert links.gather(size, across, direct=True) < links.gather(size, across)
    assert links.gather(size, Group(1, 1, 8)) == links.reduce(size, Group(1, 1, 8)) == 0.0


def test_small_messages_are_slow():
    links = Links(node("p4d.24xlarge"), FITTED)
    group_of_all = Group(ranks=256, nodes=32, sharing=1)
    rates = [size / links.gather(size, group_of_all) for size in (1e5, 1e7, 1e9, 1e11)]
    assert rates == sorted(rates)
    assert rates[0] < rates[-1] / 100


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


def test_offloaded_activations_come_back_in_time_or_are_waited_for():
    kept = run()
    block = run(offload=True, recompute="block")
    assert block.seconds == pytest.approx(run(recompute="block").seconds, rel=0.02)
    everything = run(offload=True)
    assert everything.exposed["offload"] > 0
    assert everything.seconds > kept.seconds


def test_the_figure_shows_every_task():
    from nearlinear import plots

    found = run(passes=5, recompute="block")
    ax = plots.step_streams(found)
    drawn = sum(len(bars.get_paths()) for bars in ax.collections)
    assert drawn == sum(task.seconds > 0 for task in found.timeline.tasks)
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert {"all-gather", "compute: forward", "compute: again", "compute: backward"} <= set(labels)
    assert ax.get_xlabel() == "seconds (3 of 5 passes)"


def test_1f1b_keeps_no_more_micro_batches_than_stages_to_come():
    for rank, order in enumerate(pipelines.orders(4, 1, 12, "1f1b")):
        ahead, most = 0, 0
        for way, _, _ in order:
            ahead += 1 if way == "forward" else -1
            most = max(most, ahead)
        assert most == 4 - rank
