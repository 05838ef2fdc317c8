"""Memory model of pipelines and MoE models, compared with the dry run."""

import dataclasses

import pytest

from nearlinear.config.train import TrainConfig, load
from nearlinear.distributed import runtime
from nearlinear.errors import ConfigError
from nearlinear.pipeline_parallel.schedules import SCHEDULES
from nearlinear.planner import dry_run, memory
from nearlinear.planner.memory import pipeline
from tests.support.planner_models import GPT2, LLAMA, MIXTRAL, config, off

MOST_OFF = 0.05
PIPE = {"pipeline_parallel_degree": 2, "microbatches": 4}
OFTEN = {**PIPE, "sdp_max_live_parameters": 0}
LATE = {**PIPE, "pipeline": "interleaved_1f1b", "pipeline_parallel_degree": 4}
WAVES = {**PIPE, "pipeline": "simple", "microbatches": 8, "active_microbatches": 3}
EIGHT = (GPT2[0], {**GPT2[1], "n_layer": 8})

PIPELINES = {
    "one forward, one backward": config(GPT2, micro_batch=8, **PIPE),
    "all forward, in waves of unequal size": config(LLAMA, micro_batch=8, **WAVES),
    "several stages on a rank": config(EIGHT, "each", micro_batch=8, **LATE),
    "freed after every forward pass": config(LLAMA, micro_batch=8, **OFTEN),
    "added up": config(GPT2, "each", micro_batch=8, accumulation=2, **PIPE),
    "tensor ranks": config(LLAMA, micro_batch=8, tensor_parallel_degree=2, **PIPE),
    "slices": config(
        LLAMA, micro_batch=8, hybrid_shard_degree=1, shard_optimizer_state=True, **PIPE
    ),
    "float32": config(GPT2, micro_batch=8, bf16=False, **PIPE),
}


def check(asked: TrainConfig, world: int, **which) -> None:
    plan, found = memory.estimate(asked, world), dry_run.measure(asked, world, **which)
    assert plan.persistent == found.persistent
    assert off(plan, found.peak) < MOST_OFF
    assert plan.pipeline_rank == found.pipeline_rank


@pytest.mark.parametrize("name", PIPELINES)
def test_estimate_matches_dry_run_for_pipelines(name):
    check(PIPELINES[name], 8 if name != "several stages on a rank" else 4)


def test_estimate_reports_the_largest_pipeline_rank():
    """The closed form and dry runs of both ranks agree on the larger one."""
    asked = config((LLAMA[0], {**LLAMA[1], "vocab_size": 20000}), micro_batch=8, **PIPE)
    ranks = [dry_run.measure(asked, 4, pipeline_rank=place) for place in range(2)]
    plan = memory.estimate(asked, 4)
    assert plan.pipeline_rank == 1 and ranks[1].peak > ranks[0].peak
    assert off(plan, ranks[1].peak) < MOST_OFF
    with pytest.raises(ConfigError, match="must be between 0 and 1"):
        dry_run.measure(asked, 4, pipeline_rank=2)


@pytest.mark.parametrize("name", [name for name, each in SCHEDULES.items() if each.splits_backward])
def test_zero_bubble_schedules_are_marked_rough(name):
    asked = config(EIGHT, micro_batch=8, **{**PIPE, "pipeline": name})
    plan, found = memory.estimate(asked, 2), dry_run.measure(asked, 2)
    assert plan.persistent == found.persistent
    assert off(plan, found.peak) < 0.06
    assert name in plan.rough and f"rough: {plan.rough}" in str(plan)


@pytest.mark.parametrize("name", SCHEDULES)
def test_long_runs_need_as_much_as_all_their_passes(monkeypatch, name):
    virtual = 3 if name.startswith("interleaved") else 0
    model = (GPT2[0], {**GPT2[1], "n_layer": 12})
    asked = [
        config(model, checkpoint, micro_batch=count, pipeline=name, microbatches=count,
               pipeline_parallel_degree=ranks, virtual_pipeline_degree=virtual, **more)
        for ranks, counts in ((2, (4, 9, 24)), (4, (15, 33, 64)))
        for count in counts if not virtual or count % max(1, count // ranks) == 0
        for checkpoint, more in (("", {}), ("each", {"sdp_max_live_parameters": 0}))
    ]  # fmt: skip
    asked += [
        dataclasses.replace(each, activations=dataclasses.replace(each.activations, offload=True))
        for each in asked
    ]
    short = [memory.estimate(each, 8) for each in asked]
    monkeypatch.setattr(pipeline, "_with_all_states", lambda plan, count: count)
    assert short == [memory.estimate(each, 8) for each in asked]
    assert len(asked) >= 9


MIXTURES = {
    "together": (4, config(MIXTRAL)),
    "divided": (8, config(MIXTRAL, expert_parallel_degree=4)),
    "one rank's alone": (4, config(MIXTRAL, "each", expert_parallel_degree=4)),
    "replicas": (
        8,
        config(
            MIXTRAL,
            "each",
            accumulation=2,
            hybrid_shard_degree=4,
            expert_parallel_degree=2,
            sdp_max_live_parameters=0,
        ),
    ),
    "tensor ranks": (8, config(MIXTRAL, expert_parallel_degree=2, tensor_parallel_degree=2)),
    "a pipeline": (8, config(MIXTRAL, micro_batch=8, expert_parallel_degree=2, **PIPE)),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_estimate_matches_dry_run_for_moe(name):
    world, asked = MIXTURES[name]
    check(asked, world)


def test_expert_parallel_units_have_fewer_ranks():
    """Each of 8 ranks holds an eighth of all states for any expert degree; nothing is padded."""
    together = memory.estimate(config(MIXTRAL, hybrid_shard_degree=8), 8)
    divided = memory.estimate(config(MIXTRAL, expert_parallel_degree=4), 8)
    assert divided.persistent == pytest.approx(together.persistent, rel=0.001)


def test_dry_run_rejects_float32_experts():
    with pytest.raises(ConfigError, match="bf16 only"):
        dry_run.measure(config(MIXTRAL, bf16=False), 2)
    assert memory.estimate(config(MIXTRAL, bf16=False), 2).peak


def test_estimate_with_a_fixed_global_batch():
    """The dry run derives its micro-batches from ``batch.sequences``."""
    asked = config(LLAMA, "each", sdp_max_live_parameters=0)
    batch = dataclasses.replace(asked.batch, sequences=16)
    many = dataclasses.replace(asked, batch=batch)
    assert dry_run.measure(many, 2).peak > dry_run.measure(asked, 2).peak
    check(many, 2)


def test_invalid_pipeline_rank_leaves_no_process_group():
    with pytest.raises(ConfigError, match="pipeline rank 5"):
        dry_run.measure(config(GPT2, micro_batch=8, **PIPE), 4, pipeline_rank=5)
    assert not runtime.is_initialized()


def test_report_prints_every_category():
    plan = memory.estimate(config(GPT2, micro_batch=8, **PIPE), 4)
    assert plan.parts["handed"] and "hidden states between stages" in str(plan)
    assert f"the peak of pipeline rank {plan.pipeline_rank}" in str(plan)
    assert load({}) and plan.as_dict()["pipeline_rank"] == plan.pipeline_rank
