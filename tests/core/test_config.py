"""The parallel layout: SMP's keys and aliases, who wins, and every refusal's words."""

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearlinear import config
from nearlinear.config import Config
from nearlinear.errors import ConfigError


def test_defaults_are_those_smp_v2_documents():
    documented = {
        "hybrid_shard_degree": 0,
        "sm_activation_offloading": True,
        "activation_loading_horizon": 2,
        "fsdp_cache_flush_warnings": True,
        "allow_empty_shards": False,
        "tensor_parallel_degree": 1,
        "context_parallel_degree": 1,
        "expert_parallel_degree": 1,
    }
    for key, value in documented.items():
        assert getattr(Config(), key) == value


def test_the_parameters_of_the_published_notebook_are_accepted(caplog):
    v1 = {
        "ddp": True,
        "skip_tracing": True,
        "delayed_parameter_initialization": True,
        "offload_activations": True,
        "activation_loading_horizon": 4,
        "sharded_data_parallel_degree": 128,
        "fp16": False,
        "bf16": True,
        "partitions": 1,
    }
    with caplog.at_level(logging.INFO, logger="nearlinear"):
        parsed = config.load(v1, {})
    assert parsed == Config(
        hybrid_shard_degree=128,
        delayed_parameter_initialization=True,
        sm_activation_offloading=True,
        activation_loading_horizon=4,
        bf16=True,
    )
    assert [r.args[0] for r in caplog.records] == ["ddp", "skip_tracing"]
    assert parsed.degrees(256) == {
        "pipeline": 1,
        "replicate": 2,
        "shard": 128,
        "context": 1,
        "tensor": 1,
    }


def test_counts_of_parameters_as_v1_writes_them():
    asked = {"sdp_max_live_parameters": 1e9, "sdp_reduce_bucket_size": 2e8}
    parsed = config.load(asked, {})
    assert parsed == Config(sdp_max_live_parameters=10**9, sdp_reduce_bucket_size=2 * 10**8)
    for key in asked:
        with pytest.raises(ConfigError, match=f"{key} = -1: must be 0 or more"):
            config.load({key: -1}, {})
        with pytest.raises(ConfigError, match=f"{key} = 0.5: expected an integer"):
            config.load({key: 0.5}, {})


def test_the_launcher_wins_key_by_key():
    launcher = {config.LAUNCHER_VARIABLE: json.dumps({"sharded_data_parallel_degree": 8})}
    asked = {"hybrid_shard_degree": 4, "bf16": True}
    assert config.load(asked, launcher) == Config(hybrid_shard_degree=8, bf16=True)
    assert config.load(None, launcher) == Config(hybrid_shard_degree=8)
    assert config.load(Config(bf16=True), launcher) == Config(hybrid_shard_degree=8, bf16=True)


@pytest.mark.parametrize("name", ["run.toml", "run.json", "whole.toml"])
def test_files(tmp_path, name):
    path = tmp_path / name
    texts = {
        "run.toml": "hybrid_shard_degree = 4",
        "run.json": '{"hybrid_shard_degree": 4}',
        "whole.toml": "[parallel]\nhybrid_shard_degree = 4\n[train]\nsteps = 3",
    }
    path.write_text(texts[name])
    assert config.load(path, {}) == Config(hybrid_shard_degree=4)


@pytest.mark.parametrize(
    ("asked", "launcher", "words"),
    [
        ({"hybrid_shard_degre": 2}, "", "'hybrid_shard_degre': did you mean 'hybrid_shard_degree'"),
        ({"sharded_data_paralel_degree": 2}, "", "did you mean 'sharded_data_parallel_degree'"),
        ({"hybrid_shard_degree": "four"}, "", "hybrid_shard_degree = 'four': expected an integer"),
        ({"hybrid_shard_degree": -1}, "", "must be 0 .all data ranks. or more"),
        ({"tensor_parallel_degree": 0}, "", "tensor_parallel_degree = 0: must be at least 1"),
        ({"bf16": True, "fp16": True}, "", "choose one"),
        ({"bf16": "yes"}, "", "bf16 = 'yes': expected true or false"),
        (
            {"hybrid_shard_degree": 2, "sharded_data_parallel_degree": 4},
            "",
            "two names for one setting",
        ),
        ({}, "{", f"{config.LAUNCHER_VARIABLE} is not valid JSON"),
        ({}, "[]", "expected a JSON object"),
        ({}, '{"bf61": true}', "'bf61': did you mean 'bf16'"),
    ],
)
def test_mistakes(asked, launcher, words):
    with pytest.raises(ConfigError, match=words):
        config.load(asked, {config.LAUNCHER_VARIABLE: launcher})


def test_keys_beside_the_parallel_table_are_not_lost(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("bf16 = true\n[parallel]\nhybrid_shard_degree = 4")
    with pytest.raises(ConfigError, match=r"'bf16' stands outside \[parallel\]"):
        config.load(path, {})


@pytest.mark.parametrize("asked", [4, ["a"], b"x"])
def test_something_that_is_no_config(asked):
    with pytest.raises(ConfigError, match="expected a dict, or a .toml or .json path"):
        config.load(asked, {})


@pytest.mark.parametrize(
    ("asked", "world", "words"),
    [
        ({"hybrid_shard_degree": 3}, 4, "hybrid_shard_degree = 3 .* 4: allowed are 1, 2, 4"),
        ({"hybrid_shard_degree": 8}, 4, "hybrid_shard_degree = 8 .* allowed are 1, 2, 4"),
        ({"tensor_parallel_degree": 3}, 8, "tensor_parallel_degree = 3 .* allowed are 1, 2, 4, 8"),
        (
            {"tensor_parallel_degree": 4, "pipeline_parallel_degree": 4},
            8,
            "pipeline_parallel_degree x tensor_parallel_degree = 16",
        ),
        (
            {"tensor_parallel_degree": 2, "hybrid_shard_degree": 8},
            8,
            "beside tensor and pipeline parallelism, 4",
        ),
        (
            {"context_parallel_degree": 4, "hybrid_shard_degree": 2},
            8,
            "context_parallel_degree = 4 does not divide hybrid_shard_degree, 2",
        ),
        (
            {"expert_parallel_degree": 3, "hybrid_shard_degree": 4},
            8,
            "expert_parallel_degree = 3 does not divide hybrid_shard_degree, 4",
        ),
    ],
)
def test_degrees_that_do_not_divide(asked, world, words):
    with pytest.raises(ConfigError, match=words):
        config.load(asked, {}).degrees(world)


@given(st.integers(1, 64), st.integers(0, 64), st.integers(1, 8), st.integers(1, 4))
def test_degrees_fill_the_world_or_are_refused(world, shard, tensor, context):
    asked = Config(
        hybrid_shard_degree=shard, tensor_parallel_degree=tensor, context_parallel_degree=context
    )
    try:
        degrees = asked.degrees(world)
    except ConfigError:
        return
    product = 1
    for size in degrees.values():
        product *= size
    assert product == world
    assert degrees["shard"] * degrees["context"] == (shard or world // tensor)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"pipeline": "gpipe"}, "pipeline = gpipe has no effect with pipeline_parallel_degree = 1"),
        ({"cp_comm_type": "all_gather"}, "cp_comm_type = all_gather has no effect with context_"),
        ({"pipeline": "gpipe", "partitions": 2}, ""),
        ({"cp_comm_type": "all_gather", "context_parallel_degree": 2}, ""),
    ],
)
def test_keys_of_ranks_that_are_not_there_are_said_to_have_no_effect(data, said, caplog):
    config.parse(data).check_supported()
    assert said in caplog.text and bool(said) == bool(caplog.text)
