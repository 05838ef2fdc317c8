"""`ParallelConfig`: SMP keys and aliases, precedence of sources, and errors."""

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearlinear.config import parallel
from nearlinear.config.parallel import ParallelConfig
from nearlinear.errors import ConfigError


def test_defaults_match_smp_v2_documentation():
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
        assert getattr(ParallelConfig(), key) == value


def test_smp_v1_notebook_parameters_are_accepted(caplog):
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
        parsed = parallel.load(v1, {})
    assert parsed == ParallelConfig(
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


def test_smp_v1_parameter_counts_in_float_notation_are_accepted():
    config = {"sdp_max_live_parameters": 1e9, "sdp_reduce_bucket_size": 2e8}
    parsed = parallel.load(config, {})
    assert parsed == ParallelConfig(sdp_max_live_parameters=10**9, sdp_reduce_bucket_size=2 * 10**8)
    for key in config:
        with pytest.raises(ConfigError, match=f"{key} = -1: must be 0 or more"):
            parallel.load({key: -1}, {})
        with pytest.raises(ConfigError, match=f"{key} = 0.5: expected an integer"):
            parallel.load({key: 0.5}, {})


def test_launcher_variable_overrides_config_key_by_key():
    launcher = {parallel.LAUNCHER_VARIABLE: json.dumps({"sharded_data_parallel_degree": 8})}
    config = {"hybrid_shard_degree": 4, "bf16": True}
    assert parallel.load(config, launcher) == ParallelConfig(hybrid_shard_degree=8, bf16=True)
    assert parallel.load(None, launcher) == ParallelConfig(hybrid_shard_degree=8)
    config = parallel.load(ParallelConfig(bf16=True), launcher)
    assert config == ParallelConfig(hybrid_shard_degree=8, bf16=True)


@pytest.mark.parametrize("name", ["run.toml", "run.json", "whole.toml"])
def test_load_reads_toml_and_json_files(tmp_path, name):
    path = tmp_path / name
    texts = {
        "run.toml": "hybrid_shard_degree = 4",
        "run.json": '{"hybrid_shard_degree": 4}',
        "whole.toml": "[parallel]\nhybrid_shard_degree = 4\n[train]\nsteps = 3",
    }
    path.write_text(texts[name])
    assert parallel.load(path, {}) == ParallelConfig(hybrid_shard_degree=4)


@pytest.mark.parametrize(
    ("config", "launcher", "message"),
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
        ({}, "{", f"{parallel.LAUNCHER_VARIABLE} is not valid JSON"),
        ({}, "[]", "expected a JSON object"),
        ({}, '{"bf61": true}', "'bf61': did you mean 'bf16'"),
    ],
)
def test_invalid_keys_and_values_raise(config, launcher, message):
    with pytest.raises(ConfigError, match=message):
        parallel.load(config, {parallel.LAUNCHER_VARIABLE: launcher})


def test_keys_outside_the_parallel_table_raise(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("bf16 = true\n[parallel]\nhybrid_shard_degree = 4")
    with pytest.raises(ConfigError, match=r"'bf16' stands outside \[parallel\]"):
        parallel.load(path, {})


@pytest.mark.parametrize("config", [4, ["a"], b"x"])
def test_unsupported_config_type_raises(config):
    with pytest.raises(ConfigError, match="expected a dict, or a .toml or .json path"):
        parallel.load(config, {})


@pytest.mark.parametrize(
    ("config", "world", "message"),
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
def test_indivisible_degrees_raise(config, world, message):
    with pytest.raises(ConfigError, match=message):
        parallel.load(config, {}).degrees(world)


@given(st.integers(1, 64), st.integers(0, 64), st.integers(1, 8), st.integers(1, 4))
def test_degrees_multiply_to_world_size_or_raise(world, shard, tensor, context):
    config = ParallelConfig(
        hybrid_shard_degree=shard, tensor_parallel_degree=tensor, context_parallel_degree=context
    )
    try:
        degrees = config.degrees(world)
    except ConfigError:
        return
    product = 1
    for size in degrees.values():
        product *= size
    assert product == world
    assert degrees["shard"] * degrees["context"] == (shard or world // tensor)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"pipeline": "gpipe"}, "pipeline = gpipe has no effect with pipeline_parallel_degree = 1"),
        ({"cp_comm_type": "all_gather"}, "cp_comm_type = all_gather has no effect with context_"),
        ({"pipeline": "gpipe", "partitions": 2}, ""),
        ({"cp_comm_type": "all_gather", "context_parallel_degree": 2}, ""),
    ],
)
def test_settings_of_unused_axes_log_a_warning(data, message, caplog):
    parallel.parse(data).check_supported()
    assert message in caplog.text and bool(message) == bool(caplog.text)
