"""The planner's memory of pipelines and of mixtures of experts, against the dry run of them."""

import dataclasses

import pytest

from nearlinear import runtime
from nearlinear.errors import ConfigError
from nearlinear.parallel.pipeline.schedules import SCHEDULES
from nearlinear.plan import dry_run, memory
from nearlinear.train.config import TrainConfig, load
from tests.support.planned import GPT2, LLAMA, MIXTRAL, config, off, outside_of_jobs  # noqa: F401

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
def test_pipelines(name):
    check(PIPELINES[name], 8 if name != "several stages on a rank" else 4)


def test_the_rank_that_needs_the_most_is_found():
    """By the closed form; a dry run of each says the same."""
    asked = config((LLAMA[0], {**LLAMA[1], "vocab_size": 20000}), micro_batch=8, **PIPE)
    ranks = [dry_run.measure(asked, 4, pipeline_rank=place) for place in range(2)]
    plan = memory.estimate(asked, 4)
    assert plan.pipeline_rank == 1 and ranks[1].peak > ranks[0].peak
    assert off(plan, ranks[1].peak) < MOST_OFF
    with pytest.raises(ConfigError, match="there are 2"):
        dry_run.measure(asked, 4, pipeline_rank=2)


@pytest.mark.parametrize("name", [name for name, each in SCHEDULES.items() if each.apart])
def test_zero_bubble_is_rough_and_says_so(name):
    asked = config(EIGHT, micro_batch=8, **{**PIPE, "pipeline": name})
    plan, found = memory.estimate(asked, 2), dry_run.measure(asked, 2)
    assert plan.persistent == found.persistent
    assert off(plan, found.peak) < 0.06
    assert name in plan.rough and f"rough: {plan.rough}" in str(plan)


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
def test_mixtures(name):
    world, asked = MIXTURES[name]
    check(asked, world)


def test_divided_experts_are_shared_by_fewer_ranks():
    """Every rank of 8 has an eighth of all states, whoever shares them; padding is none here."""
    together = memory.estimate(config(MIXTRAL, hybrid_shard_degree=8), 8)
    divided = memory.estimate(config(MIXTRAL, expert_parallel_degree=4), 8)
    assert divided.persistent == pytest.approx(together.persistent, rel=0.001)


def test_experts_in_float32_are_refused_by_the_dry_run():
    with pytest.raises(ConfigError, match="bf16 only"):
        dry_run.measure(config(MIXTRAL, bf16=False), 2)
    assert memory.estimate(config(MIXTRAL, bf16=False), 2).peak


def test_steps_of_a_fixed_number_of_sequences():
    """Micro-batches follow from ``batch.sequences`` in the dry run, too."""
    asked = config(LLAMA, "each", sdp_max_live_parameters=0)
    batch = dataclasses.replace(asked.batch, sequences=16)
    many = dataclasses.replace(asked, batch=batch)
    assert dry_run.measure(many, 2).peak > dry_run.measure(asked, 2).peak
    check(many, 2)


def test_a_pipeline_rank_that_is_not_there_leaves_no_job_behind():
    with pytest.raises(ConfigError, match="pipeline rank 5"):
        dry_run.measure(config(GPT2, micro_batch=8, **PIPE), 4, pipeline_rank=5)
    assert not runtime.is_initialized()


def test_parts_are_named_and_printed():
    plan = memory.estimate(config(GPT2, micro_batch=8, **PIPE), 4)
    assert plan.parts["handed"] and "hidden states between stages" in str(plan)
    assert f"the peak of pipeline rank {plan.pipeline_rank}" in str(plan)
    assert load({}) and plan.as_dict()["pipeline_rank"] == plan.pipeline_rank
