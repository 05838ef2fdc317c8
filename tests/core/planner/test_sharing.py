"""``hybrid_shard_degree = "auto"``: the fewest ranks that share the model states."""

import dataclasses

import pytest

import nearlinear as nl
from nearlinear.config.train import TrainConfig
from nearlinear.errors import ConfigError
from nearlinear.planner import memory
from nearlinear.planner.memory.sharing import HEADROOM, with_fewest_sharing
from tests.support.planner_models import LLAMA, WORDS, config

WORLD, PER_NODE = 24, 8


def auto(**parallel) -> TrainConfig:
    return config(LLAMA, hybrid_shard_degree="auto", **parallel)


def needed(asked: TrainConfig, degree: int) -> int:
    parallel = dataclasses.replace(asked.parallel, hybrid_shard_degree=degree)
    found = memory.estimate(dataclasses.replace(asked, parallel=parallel), WORLD, vocabulary=WORDS)
    return found.total


def chosen(asked: TrainConfig, bytes_of_rank: float) -> int:
    found = with_fewest_sharing(
        asked, WORLD, bytes_of_rank, ranks_per_node=PER_NODE, vocabulary=WORDS
    )
    assert dataclasses.replace(found, parallel=asked.parallel) == asked
    return found.parallel.sharing


def test_the_fewest_ranks_that_hold_the_model_share_it():
    """Degrees of 24 ranks on nodes of 8: 3, 6 and 12 would straddle nodes."""
    allowed = [1, 2, 4, 8, 24]
    sizes = [needed(auto(), degree) for degree in allowed]
    assert sizes == sorted(sizes, reverse=True)
    for degree, size in zip(allowed, sizes, strict=True):
        assert chosen(auto(), 1.001 * size / (1 - HEADROOM)) == degree
    with pytest.raises(ConfigError, match="does not fit; 24 .1 needs .* of .* GiB per rank"):
        chosen(auto(), sizes[-1])


def test_shard_groups_hold_whole_context_groups():
    asked = auto(context_parallel_degree=4)
    assert chosen(asked, 2**60) == 4
    asked = auto(tensor_parallel_degree=8)  # a node is one data rank
    assert chosen(asked, 2**60) == 1


def test_a_number_is_kept():
    asked = config(LLAMA, hybrid_shard_degree=3)
    assert with_fewest_sharing(asked, WORLD, 1.0, ranks_per_node=PER_NODE) is asked


def test_plan_chooses_the_degree_for_the_cluster():
    asked = {
        "parallel": {"hybrid_shard_degree": "auto", "bf16": True},
        "data": {"sequence_length": 1024},
        "activations": {"checkpoint": "each"},
    }
    plans = [
        nl.plan({**asked, "model": {"preset": preset}}, "p4d.24xlarge:2")
        for preset in ("gpt2-small", "llama2-7b", "llama2-70b")
    ]
    assert [plan.config.parallel.sharing for plan in plans] == [1, 4, 0]
    assert [plan.fits for plan in plans] == [True, True, False]


def test_scripts_need_a_number():
    with pytest.raises(ConfigError, match="give a number here"):
        nl.init({"hybrid_shard_degree": "auto"})
    with pytest.raises(ConfigError, match="'most': expected an integer; allowed are"):
        nl.plan({"parallel": {"hybrid_shard_degree": "most"}}, "p4d.24xlarge:1")
