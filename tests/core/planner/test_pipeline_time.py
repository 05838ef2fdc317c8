"""Pipeline orders compared with torch's, and pipeline times compared with sums by hand."""

import dataclasses

import pytest
from torch.distributed.pipelining import schedules as theirs

from nearlinear.config import train as train_config
from nearlinear.distributed.mesh import Mesh
from nearlinear.errors import ConfigError
from nearlinear.pipeline_parallel.schedules import (
    BACKWARD,
    FORWARD,
    INPUTS,
    SCHEDULES,
    WEIGHTS,
    PipelineSchedule,
    pass_orders,
)
from nearlinear.planner.api import parse_cluster
from nearlinear.planner.block_time import BlockTimes
from nearlinear.planner.fitted_constants import load_constants
from nearlinear.planner.model_shape import ModelShape
from nearlinear.planner.pipeline_time import PipelineTimes, simulate, task_graph
from nearlinear.planner.step_time import step_time
from nearlinear.planner.timeline import StepTime
from nearlinear.planner.workload import Workload, workload_from_config

FITTED = load_constants()
SHAPE = ModelShape(layers=8, width=4096, heads=32, inner=16384, vocabulary=50000)
KINDS = {"FORWARD": FORWARD, "FULL_BACKWARD": BACKWARD, "BACKWARD_INPUT": INPUTS,
         "BACKWARD_WEIGHT": WEIGHTS}  # fmt: skip
UNIT = {FORWARD: 1.0, BACKWARD: 2.0, INPUTS: 1.0, WEIGHTS: 1.0}
APART = [name for name, each in SCHEDULES.items() if each.splits_backward]


def seconds(plan: PipelineSchedule) -> dict[str, list[float]]:
    """A rank's stages take one second forward and two seconds backward in total."""
    return {kind: [took / plan.stages_per_rank] * plan.stages for kind, took in UNIT.items()}


def torchs(plan: PipelineSchedule, rank: int, count: int) -> list[tuple]:
    """Return the order of ``rank`` from the private method of torch's schedule."""
    schedule = object.__new__(getattr(theirs, plan.spec.torch_class))
    schedule.pp_group_size, schedule.rank, schedule._n_microbatches = plan.ranks, rank, count
    schedule.n_local_stages, schedule._stages = plan.stages_per_rank, [None] * plan.stages_per_rank
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
def test_pass_orders_match_torch_schedules(name, sizes):
    for ranks, per_rank, count in sizes:
        plan = PipelineSchedule(name, ranks, per_rank)
        found = pass_orders(plan, count)
        for rank in range(ranks):
            assert found[rank] == torchs(plan, rank, count), (ranks, per_rank, count, rank)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("count", [8, 24, 40])
def test_every_stage_runs_every_micro_batch_once(name, count):
    plan = PipelineSchedule(name, 4, SCHEDULES[name].stages_per_rank or 2)
    for rank, order in enumerate(pass_orders(plan, count)):
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
def test_bubble_matches_the_closed_form(name, ranks, count):
    plan = PipelineSchedule(name, ranks, 1)
    end, *_ = simulate(task_graph(plan, count), seconds(plan))
    assert 1 - count * 3.0 / end == pytest.approx((ranks - 1) / (count + ranks - 1))


@pytest.mark.parametrize(("ranks", "per_rank", "count"), [(2, 2, 4), (4, 2, 8), (4, 3, 16)])
def test_virtual_stages_divide_the_bubble(ranks, per_rank, count):
    plan = PipelineSchedule("interleaved_1f1b", ranks, per_rank)
    end, *_ = simulate(task_graph(plan, count), seconds(plan))
    assert end - count * 3.0 == pytest.approx((ranks - 1) * 3.0 / per_rank)


@pytest.mark.parametrize(("ranks", "count"), [(2, 8), (4, 8), (4, 16)])
def test_delayed_weight_gradients_fill_the_bubble(ranks, count):
    """ZB1P's bubble is (ranks - 1) (forward + inputs - weights); ZB-V's is only its ramp."""
    waits = {}
    for name in ("interleaved_1f1b", *APART):
        plan = PipelineSchedule(name, ranks, 2)
        end, *_ = simulate(task_graph(plan, count), seconds(plan))
        waits[name] = end - count * 3.0
    assert waits["interleaved_zero_bubble"] < waits["interleaved_1f1b"]
    assert waits["zbv_zero_bubble"] == pytest.approx((ranks - 1) / 2)  # time to reach the last rank
    assert waits["dualpipev"] < waits["interleaved_1f1b"]


def run(passes: int, mesh: Mesh, **changes) -> StepTime:
    work = Workload(SHAPE, 2048, micro_batch=1, micro_batches=passes, mesh=mesh, **changes)
    return step_time(work, parse_cluster("p4d.24xlarge:4"), FITTED)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("beside", [True, False])
def test_steady_state_extrapolation_matches_full_simulation(name, beside):
    """Compare the extrapolation of `PipelineTimes.run_seconds` with a full simulation."""
    per_rank = SCHEDULES[name].stages_per_rank or 2
    asked = {"virtual_stages": per_rank, "schedule": name, "overlapped_sends": beside}
    found = run(32, Mesh(pipeline=4, tensor=8, ranks_per_node=8), **asked)
    line = PipelineTimes(found.work, found.blocks)
    end, *_ = simulate(task_graph(line.plan, 32), *line.simulation_inputs)
    after = found.blocks.optimizer_update + found.blocks.tied_all_reduce
    assert found.seconds - after == pytest.approx(end, rel=0.02)


def test_1f1b_limits_micro_batches_in_flight():
    for rank, order in enumerate(pass_orders(PipelineSchedule("1f1b", 4, 1), 12)):
        ahead, most = 0, 0
        for way, _, _ in order:
            ahead += 1 if way == FORWARD else -1
            most = max(most, ahead)
        assert most == 4 - rank


def test_resharded_stages_are_gathered_per_micro_batch():
    mesh = Mesh(pipeline=4, shard=8, ranks_per_node=8)
    stay, freed = (run(16, mesh, reshard_after_forward=value) for value in (False, True))
    line = PipelineTimes(freed.work, freed.blocks)
    once = line.most_blocks * freed.blocks.block_all_gather + freed.blocks.all_gather(
        max(freed.blocks.end_parameters)
    )
    assert stay.busy["all-gather"] == pytest.approx(once)
    assert freed.busy["all-gather"] == pytest.approx(17 * once)
    assert freed.seconds > stay.seconds


def test_limited_active_micro_batches_refill_the_pipeline():
    mesh = Mesh(pipeline=4, shard=8, ranks_per_node=8)
    asked = {"reshard_after_forward": False, "overlapped_reduce": False}
    once = run(16, mesh, schedule="gpipe", **asked)
    four = run(16, mesh, schedule="gpipe", **asked, schedule_runs=(4,) * 4)
    each = run(4, mesh, schedule="gpipe", **asked)
    assert four.seconds > once.seconds
    assert four.busy["all-gather"] == pytest.approx(4 * each.busy["all-gather"])
    assert four.seconds - each.seconds == pytest.approx(
        3 * (each.seconds - each.blocks.optimizer_update - each.blocks.tied_all_reduce), rel=1e-6
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_busy_and_exposed_time_add_up_to_the_step(name):
    mesh = Mesh(pipeline=4, shard=8, ranks_per_node=8)
    found = run(16, mesh, schedule=name, virtual_stages=SCHEDULES[name].stages_per_rank or 2)
    together = found.busy["compute"] + sum(found.exposed.values())
    assert together == pytest.approx(found.seconds, rel=0.02)


def test_replicas_reduce_early_stages_while_later_ones_compute():
    mesh = Mesh(pipeline=4, replicate=16, ranks_per_node=8)
    at_the_end = run(8, mesh, schedule="interleaved_1f1b", virtual_stages=2)
    by_stage = run(8, mesh, schedule="interleaved_1f1b", virtual_stages=2, reduced_by_stage=True)
    times = PipelineTimes(by_stage.work, by_stage.blocks)
    hidden = 4 * times.seconds[BACKWARD][0]  # a round of the rank's other stage
    assert 0 < times.all_reduce
    assert at_the_end.seconds - by_stage.seconds == pytest.approx(min(hidden, times.all_reduce))


def planned(**parallel) -> Workload:
    asked = {"pipeline_parallel_degree": 4, "microbatches": 8, "bf16": True} | parallel
    data = {"model": {"preset": "gpt2-30b"}, "parallel": asked, "batch": {"micro_batch_size": 16}}
    return workload_from_config(train_config.load(data, environment={}), 64, 8)


def test_workload_of_a_pipeline_config():
    found = planned(pipeline="simple")
    assert (found.schedule, found.schedule_runs, found.micro_batch) == ("gpipe", (6, 2), 2)
    assert found.stage_blocks == (12, 12, 12, 12)
    assert not found.overlapped_reduce
    assert found.reshard_after_forward  # 12 blocks hold 7.4 billion parameters
    later = planned(pipeline="zbv_zero_bubble")
    assert (later.schedule, later.virtual_stages, later.reshard_after_forward) == (
        "zbv_zero_bubble",
        2,
        False,
    )
    assert not planned(sdp_max_live_parameters=10**10).reshard_after_forward
    assert planned(pipeline_parallel_degree=16, microbatches=16).schedule_runs == (16,)


def test_uneven_stages_hold_all_layers():
    found = planned(pipeline_parallel_degree=32, microbatches=16)
    assert sum(found.stage_blocks) == 48
    parts = BlockTimes(found, parse_cluster("p4d.24xlarge:8"), FITTED)
    assert parts.layers == 2 == max(found.stage_blocks)


@pytest.mark.parametrize(
    ("parallel", "word"),
    [
        ({"pipeline_parallel_degree": 64, "microbatches": 16}, "only 48 layers"),
        ({"pipeline": "dualpipev", "microbatches": 4}, "at least as many microbatches as stages"),
        ({"pipeline": "interleaved_1f1b", "microbatches": 16, "pipeline_parallel_degree": 8,
          "virtual_pipeline_degree": 8}, "needs as many blocks"),
    ],
)  # fmt: skip
def test_invalid_pipelines_raise(parallel, word):
    with pytest.raises(ConfigError, match=word):
        planned(**parallel)


def test_tied_table_is_held_by_both_ends():
    asked = planned()
    first, last = asked.shape.ends
    assert last == 50257 * 7168
    assert first == last + 2048 * 7168
    cluster = parse_cluster("p4d.24xlarge:8")
    block = asked.shape.block_parameters
    assert BlockTimes(asked, cluster, FITTED).rank_parameters == pytest.approx(12 * block + first)
    untied = dataclasses.replace(asked, shape=dataclasses.replace(asked.shape, tied=False))
    assert (
        BlockTimes(asked, cluster, FITTED).tied_all_reduce
        > BlockTimes(untied, cluster, FITTED).tied_all_reduce
        == 0.0
    )
