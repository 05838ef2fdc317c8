"""A pipeline's orders against those that torch runs, and its times against sums done by hand."""

import dataclasses

import pytest
from torch.distributed.pipelining import schedules as theirs

from nearlinear.errors import ConfigError
from nearlinear.mesh import Mesh
from nearlinear.parallel.pipeline.schedules import SCHEDULES, Plan
from nearlinear.plan import flow, parameters, pipelines, workload
from nearlinear.plan.hardware import parse_cluster
from nearlinear.plan.orders import BACKWARD, FORWARD, INPUTS, WEIGHTS, orders
from nearlinear.plan.passes import Passes
from nearlinear.plan.shape import Shape
from nearlinear.plan.step import Step, step
from nearlinear.plan.workload import Workload
from nearlinear.train import config as train_config

FITTED = parameters.load()
SHAPE = Shape(layers=8, width=4096, heads=32, inner=16384, vocabulary=50000)
KINDS = {"FORWARD": FORWARD, "FULL_BACKWARD": BACKWARD, "BACKWARD_INPUT": INPUTS,
         "BACKWARD_WEIGHT": WEIGHTS}  # fmt: skip
UNIT = {FORWARD: 1.0, BACKWARD: 2.0, INPUTS: 1.0, WEIGHTS: 1.0}
APART = [name for name, each in SCHEDULES.items() if each.apart]


def seconds(plan: Plan) -> dict[str, list[float]]:
    """A stage takes one second forwards and two backwards, with ``per_rank`` stages together."""
    return {kind: [took / plan.per_rank] * plan.stages for kind, took in UNIT.items()}


def torchs(plan: Plan, rank: int, count: int) -> list[tuple]:
    """The order that torch's schedule writes for ``rank``, of its private method."""
    schedule = object.__new__(getattr(theirs, plan.schedule.kind))
    schedule.pp_group_size, schedule.rank, schedule._n_microbatches = plan.ranks, rank, count
    schedule.n_local_stages, schedule._stages = plan.per_rank, [None] * plan.per_rank
    schedule.num_stages = schedule._num_stages = plan.stages
    schedule.number_of_rounds = max(1, count // plan.ranks)
    schedule.microbatches_per_round = count // schedule.number_of_rounds
    found = schedule._calculate_single_rank_operations(rank)
    flat = [each for action in found if action for each in action.sub_actions or (action,)]
    return [(KINDS[a.computation_type.name], a.stage_index, a.microbatch_index) for a in flat]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("looped_bfs", [(2, 2, 4), (4, 2, 3), (3, 3, 9)]),
        ("interleaved_1f1b", [(2, 2, 4), (4, 2, 3), (8, 2, 10), (4, 3, 8), (3, 3, 9)]),
        ("interleaved_zero_bubble", [(2, 2, 4), (4, 2, 3), (8, 2, 10), (4, 3, 8)]),
        ("zbv_zero_bubble", [(2, 2, 4), (4, 2, 3), (8, 2, 10), (5, 2, 13)]),
        ("dualpipev", [(2, 2, 4), (4, 2, 8), (5, 2, 13), (8, 2, 16)]),
    ],
)
def test_orders_are_those_that_torch_runs(name, sizes):
    for ranks, per_rank, count in sizes:
        plan = Plan(name, ranks, per_rank)
        found = orders(plan, count)
        for rank in range(ranks):
            assert found[rank] == torchs(plan, rank, count), (ranks, per_rank, count, rank)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("count", [8, 24, 40])
def test_every_stage_does_every_micro_batch_once(name, count):
    plan = Plan(name, 4, SCHEDULES[name].stages_per_rank or 2)
    for rank, order in enumerate(orders(plan, count)):
        done = [
            (way, stage, batch)
            for kind, stage, batch in order
            for way in {BACKWARD: (INPUTS, WEIGHTS)}.get(kind, (kind,))
        ]
        assert sorted(done) == sorted(
            (way, stage, batch)
            for way in (FORWARD, INPUTS, WEIGHTS)
            for stage in plan.stages_of(rank)
            for batch in range(count)
        )


@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (4, 8), (8, 8), (3, 17)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_bubble_of_a_pipeline(name, ranks, count):
    plan = Plan(name, ranks, 1)
    end, *_ = flow.run(flow.flow(plan, count), seconds(plan))
    assert 1 - count * 3.0 / end == pytest.approx((ranks - 1) / (count + ranks - 1))


@pytest.mark.parametrize(("ranks", "per_rank", "count"), [(2, 2, 4), (4, 2, 8), (4, 3, 16)])
def test_several_stages_per_rank_divide_the_bubble(ranks, per_rank, count):
    plan = Plan("interleaved_1f1b", ranks, per_rank)
    end, *_ = flow.run(flow.flow(plan, count), seconds(plan))
    assert end - count * 3.0 == pytest.approx((ranks - 1) * 3.0 / per_rank)


@pytest.mark.parametrize(("ranks", "count"), [(2, 8), (4, 8), (4, 16)])
def test_what_nobody_waits_for_fills_the_bubble(ranks, count):
    """ZB1P keeps (ranks - 1) (forward + inputs - weights); ZB-V nothing but its way in and out."""
    waits = {}
    for name in ("interleaved_1f1b", *APART):
        plan = Plan(name, ranks, 2)
        end, *_ = flow.run(flow.flow(plan, count), seconds(plan))
        waits[name] = end - count * 3.0
    assert waits["interleaved_zero_bubble"] < waits["interleaved_1f1b"]
    assert waits["zbv_zero_bubble"] == pytest.approx((ranks - 1) / 2)  # one way to the last rank
    assert waits["dualpipev"] < waits["interleaved_1f1b"]


def run(passes: int, mesh: Mesh, **changes) -> Step:
    work = Workload(SHAPE, 2048, micro_batch=1, passes=passes, mesh=mesh, **changes)
    return step(work, parse_cluster("p4d.24xlarge:4"), FITTED)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("beside", [True, False])
def test_a_full_pipeline_takes_as_long_for_every_micro_batch(name, beside):
    """What `pipelines.Pipeline.filling` leaves out, against laying all of it out."""
    per_rank = SCHEDULES[name].stages_per_rank or 2
    asked = {"virtual": per_rank, "schedule": name, "overlapped_sends": beside}
    found = run(32, Mesh(pipeline=4, tensor=8, ranks_per_node=8), **asked)
    line = pipelines.Pipeline(found.work, found.parts)
    end, *_ = flow.run(flow.flow(line.plan, 32), *line.sends)
    after = found.parts.update + found.parts.tie
    assert found.seconds - after == pytest.approx(end, rel=0.02)


def test_1f1b_keeps_no_more_micro_batches_than_stages_to_come():
    for rank, order in enumerate(orders(Plan("1f1b", 4, 1), 12)):
        ahead, most = 0, 0
        for way, _, _ in order:
            ahead += 1 if way == FORWARD else -1
            most = max(most, ahead)
        assert most == 4 - rank


def test_stages_that_may_not_stay_gathered_are_gathered_for_every_micro_batch():
    mesh = Mesh(pipeline=4, shard=8, ranks_per_node=8)
    stay, freed = (run(16, mesh, resharded=value) for value in (False, True))
    line = pipelines.Pipeline(freed.work, freed.parts)
    once = line.largest * freed.parts.gather_block + freed.parts.gather(max(freed.parts.ends))
    assert stay.busy["all-gather"] == pytest.approx(once)
    assert freed.busy["all-gather"] == pytest.approx(17 * once)
    assert freed.seconds > stay.seconds


def test_a_schedule_that_is_given_few_micro_batches_fills_again():
    mesh = Mesh(pipeline=4, shard=8, ranks_per_node=8)
    asked = {"resharded": False, "overlapped_reduce": False}
    once = run(16, mesh, schedule="gpipe", **asked)
    four = run(16, mesh, schedule="gpipe", **asked, at_once=(4,) * 4)
    each = run(4, mesh, schedule="gpipe", **asked)
    assert four.seconds > once.seconds
    assert four.busy["all-gather"] == pytest.approx(4 * each.busy["all-gather"])
    assert four.seconds - each.seconds == pytest.approx(
        3 * (each.seconds - each.parts.update - each.parts.tie), rel=1e-6
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_busy_and_what_is_waited_for_make_the_step(name):
    mesh = Mesh(pipeline=4, shard=8, ranks_per_node=8)
    found = run(16, mesh, schedule=name, virtual=SCHEDULES[name].stages_per_rank or 2)
    together = found.busy["compute"] + sum(found.exposed.values())
    assert together == pytest.approx(found.seconds, rel=0.02)


def planned(**parallel) -> Workload:
    asked = {"pipeline_parallel_degree": 4, "microbatches": 8, "bf16": True} | parallel
    data = {"model": {"preset": "gpt2-30b"}, "parallel": asked, "batch": {"micro_batch_size": 16}}
    return workload.from_config(train_config.load(data, environment={}), 64, 8)


def test_a_config_becomes_its_pipeline():
    found = planned(pipeline="simple")
    assert (found.schedule, found.at_once, found.micro_batch) == ("gpipe", (6, 2), 2)
    assert found.stages == (12, 12, 12, 12)
    assert not found.overlapped_reduce
    assert found.resharded  # 12 blocks are 7.4 billion parameters
    later = planned(pipeline="zbv_zero_bubble")
    assert (later.schedule, later.virtual, later.resharded) == ("zbv_zero_bubble", 2, False)
    assert not planned(sdp_max_live_parameters=10**10).resharded
    assert planned(pipeline_parallel_degree=16, microbatches=16).at_once == (16,)


def test_layers_that_do_not_divide_are_all_somewhere():
    found = planned(pipeline_parallel_degree=32, microbatches=16)
    assert sum(found.stages) == 48
    parts = Passes(found, parse_cluster("p4d.24xlarge:8"), FITTED)
    assert parts.layers == 2 == max(found.stages)


@pytest.mark.parametrize(
    ("parallel", "word"),
    [
        ({"pipeline_parallel_degree": 64, "microbatches": 16}, "only 48 layers"),
        ({"pipeline": "dualpipev", "microbatches": 4}, "at least as many microbatches as stages"),
        ({"pipeline": "interleaved_1f1b", "microbatches": 16, "pipeline_parallel_degree": 8,
          "virtual_pipeline_degree": 8}, "needs as many blocks"),
    ],
)  # fmt: skip
def test_pipelines_that_the_trainer_refuses(parallel, word):
    with pytest.raises(ConfigError, match=word):
        planned(**parallel)


def test_a_tied_table_is_at_both_ends():
    asked = planned()
    first, last = asked.shape.ends
    assert last == 50257 * 7168
    assert first == last + 2048 * 7168
    cluster = parse_cluster("p4d.24xlarge:8")
    block = asked.shape.block_parameters
    assert Passes(asked, cluster, FITTED).held == pytest.approx(12 * block + first)
    untied = dataclasses.replace(asked, shape=dataclasses.replace(asked.shape, tied=False))
    assert Passes(asked, cluster, FITTED).tie > Passes(untied, cluster, FITTED).tie == 0.0
