"""``nearlinear plan``: hardware table, model shapes, rates, cost and command line."""

import json
import math
import re
import subprocess
import sys

import pytest

import nearlinear as nl
from nearlinear.cli import main
from nearlinear.config import train as train_config
from nearlinear.config.train import ModelConfig
from nearlinear.errors import ConfigError
from nearlinear.hardware import find_instance_type, load_table, peak_tflops
from nearlinear.planner import api
from nearlinear.planner.api import parse_cluster
from nearlinear.planner.cluster import find_node
from nearlinear.planner.model_shape import model_shape
from nearlinear.planner.workload import workload_from_config
from nearlinear.train.model import build_model, flops_per_token

TABLE = load_table()
GPT2_30B = {
    "model": {"preset": "gpt2-30b"},
    "parallel": {"hybrid_shard_degree": 128, "bf16": True},
    "batch": {"micro_batch_size": 6},
    "activations": {"checkpoint": "each"},
}


@pytest.mark.parametrize("name", TABLE["node"])
def test_planner_nodes_match_instance_types(name):
    found, known = find_node(name), find_instance_type(name)
    assert found.network_gbps > 0
    if known:
        assert found.gpus == known.gpus
        assert find_node(f"ml.{name}") == found
    for source in (*found.sources, *found.gpu.sources):
        assert source in TABLE["sources"]
    assert {*TABLE["checked"]} <= {*TABLE["sources"]}
    assert bool(found.usd_per_hour) == bool(found.priced)


def test_required_nodes_are_known():
    families = ("p3dn", "p4d", "p4de", "p5", "p5e", "p5en", "p6-b200", "p6-b300")
    others = ("h100", "h200", "b200", "b300", "gb200", "gb300")
    assert {name.split(".")[0] for name in TABLE["node"]} >= {*families, *others}


@pytest.mark.parametrize("name", TABLE["gpu"])
def test_peak_of_a_device_name_is_the_peak_of_its_gpu_record(name):
    for precision, peak in TABLE["gpu"][name]["peak_tflops"].items():
        assert peak_tflops(f"NVIDIA {name}", precision) == peak


def test_peak_of_an_unknown_device_or_precision_is_none():
    assert peak_tflops("NVIDIA A10G", "bf16") == 70.0
    assert peak_tflops("NVIDIA A10G", "fp8") is None
    assert peak_tflops("NVIDIA GeForce RTX 4090", "bf16") is None


@pytest.mark.parametrize(
    "text",
    ["p4d.24xlarge:0", "p4d.24xlarge:x", "p9.large:2", "", ":3", "p4d.24xlarge:" + "9" * 5000],
)
def test_invalid_cluster_raises(text):
    with pytest.raises(ConfigError, match="--cluster"):
        parse_cluster(text)


def test_unsupported_precision_raises():
    with pytest.raises(ConfigError, match="does not support bf16"):
        nl.plan(GPT2_30B, "p3dn.24xlarge:32")


@pytest.mark.parametrize(
    "preset", ["gpt2-tiny", "llama-tiny", "gpt-neox-tiny", "mixtral-tiny", "llama2-7b"]
)
def test_model_shape_matches_the_built_model(preset):
    config = ModelConfig(preset=preset)
    found, model = model_shape(config, 512), build_model(config, 512)
    matrices = sum(p.numel() for p in model.parameters() if p.dim() >= 2)
    assert found.parameters == matrices
    assert found.flops_per_token(64) == pytest.approx(flops_per_token(model, 64), rel=1e-3)


@pytest.mark.parametrize(
    ("preset", "overrides", "words"),
    [
        ("gpt2-30b", {"n_head": 0}, "n_head = 0: must be at least 1"),
        ("gpt2-30b", {"n_embd": -7168}, "n_embd = -7168: must be at least 1"),
        ("gpt2-30b", {"n_head": 55}, "55 heads do not divide its hidden size of 7168"),
        (
            "gpt2-30b",
            {"n_layer": 9_999_999},
            "9,999,999 layers; the planner supports 10,000 at most",
        ),
        ("llama2-70b", {"num_key_value_heads": "8"}, "num_key_value_heads = '8': expected an int"),
        ("llama2-70b", {"num_key_value_heads": 5}, "does not divide its 64 query heads"),
        ("llama2-70b", {"num_attention_heads": None}, "num_attention_heads = None: expected an"),
        ("llama2-70b", {"max_position_embeddings": -5}, "max_position_embeddings = -5"),
        ("llama2-70b", {"hidden_act": ["silu"]}, "hidden_act"),
        ("llama2-70b", {"tie_word_embeddings": 3}, "true or false"),
        ("mixtral-tiny", {"num_local_experts": "8"}, "num_local_experts = '8': expected an int"),
        ("mixtral-tiny", {"num_local_experts": [8]}, "num_local_experts"),
        ("mixtral-tiny", {"num_experts_per_tok": 99}, "num_experts_per_tok = 99 exceeds"),
    ],
)
def test_invalid_model_overrides_raise(preset, overrides, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        nl.plan({"model": {"preset": preset, "overrides": overrides}}, "h100:8")


def test_null_overrides_use_family_defaults():
    null = {"num_key_value_heads": None, "num_local_experts": None}
    asked = ModelConfig(preset="llama2-7b", overrides=null)
    assert model_shape(asked) == model_shape(ModelConfig(preset="llama2-7b"))


def test_workload_of_a_config():
    settings = (
        "parallel.tensor_parallel_degree=2",
        "parallel.pipeline_parallel_degree=4",
        "parallel.microbatches=3",
        "parallel.gather_dtype=fp8",
        "batch.accumulation=2",
        "activations.checkpoint=selective",
        "activations.offload=true",
    )
    data = GPT2_30B | {"parallel": {"bf16": True}}
    config = train_config.load(data, settings, environment={})
    found = workload_from_config(config, 64, 8)
    assert (found.micro_batch, found.micro_batches, found.mesh.pipeline) == (2, 6, 4)
    assert (found.gather_bytes, found.reduce_bytes) == (2.0, 4.0)  # stages use FSDP2's all-gather
    assert found.recompute == "elementwise"
    assert found.offload
    assert found.step_tokens == 6 * 2 * 8 * 2048


def test_plan_of_the_30b_reference_model():
    found = nl.plan(GPT2_30B, "p4d.24xlarge:32", tokens=500e9)
    assert found.work.mesh.replicate == 2
    assert found.work.shape.parameters == pytest.approx(29.97e9, rel=1e-3)
    assert found.work.step_tokens == 1536 * 2048
    assert found.tokens_per_second_per_gpu == pytest.approx(
        found.work.step_tokens / 256 / found.seconds
    )
    assert found.mfu == pytest.approx(found.model_tflops_per_gpu / 312)
    assert found.days == pytest.approx(found.steps * found.seconds / 86400)
    assert found.usd == pytest.approx(found.days * 24 * 32 * 21.957642)
    assert found.fits
    assert found.bottleneck.startswith("compute: ")
    json.dumps(found.as_dict())


def test_slow_network_is_the_bottleneck():
    found = nl.plan(
        {
            "model": {"preset": "llama2-7b"},
            "parallel": {"bf16": True},
            "batch": {"micro_batch_size": 1},
        },
        "p4d.24xlarge:16",
        settings=("data.sequence_length=512",),
    )
    assert found.bottleneck.startswith(("all-gather", "reduce-scatter"))
    assert "micro_batch_size" in found.bottleneck


def test_unknown_price_gives_nan():
    found = nl.plan(GPT2_30B, "p5e.48xlarge:16")
    assert math.isnan(found.usd)
    assert "price unknown" in str(found)
    assert nl.plan(GPT2_30B, "p5e.48xlarge:16", usd_per_hour=50.0).usd > 0


def test_straggler_argument_slows_the_step():
    assert nl.plan(GPT2_30B, "p5.48xlarge:16", straggler=0.1).seconds > (
        1.1 * nl.plan(GPT2_30B, "p5.48xlarge:16").seconds
    )
    with pytest.raises(ConfigError, match="straggler"):
        nl.plan(GPT2_30B, "p5.48xlarge:16", straggler=1.0)


def test_plan_that_does_not_fit_suggests_a_change(capsys, tmp_path):
    file = tmp_path / "run.json"
    file.write_text(json.dumps(GPT2_30B | {"batch": {"micro_batch_size": 32}}))
    assert main(["plan", str(file), "--cluster", "p4d.24xlarge:32"]) == 1
    said = capsys.readouterr().out
    assert "more than the 39.5 of a A100-40GB" in said
    assert "cheapest change that makes it fit: " in said


def test_scaling_curve_reaches_16384_gpus():
    config = train_config.load(GPT2_30B, environment={})
    points = api.scaling_curve(config, parse_cluster("p4d.24xlarge:16"))
    assert [point.gpus for point in points] == [128 * 2**n for n in range(8)]
    assert points[0].efficiency == 1.0
    rates = [point.tokens_per_second_per_gpu for point in points]
    assert rates == sorted(rates, reverse=True)
    assert points[-1].efficiency > 0.9


def test_plan_command_writes_json_and_figure(capsys, tmp_path):
    file, numbers, figure = (tmp_path / name for name in ("run.json", "plan.json", "step.png"))
    file.write_text(json.dumps(GPT2_30B))
    asked = ["--cluster", "p4d.24xlarge:16", "--scale", "--why", "--json", str(numbers)]
    assert main(["plan", str(file), *asked, "--figure", str(figure)]) == 0
    said = capsys.readouterr().out
    assert "bottleneck: " in said
    assert "16,384" in said
    assert "1. large GPUs" in said
    found = json.loads(numbers.read_text())
    assert found["gpus"] == 128
    assert len(found["scaling"]) == 8
    assert figure.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ([], "--cluster"),
        (["--cluster", "p4d.24xlarge:2", "--json", "plan.txt"], ".json"),
        (["--cluster", "p4d.24xlarge:3", "--set", "parallel.hybrid_shard_degree=7"], "divide"),
    ],
)
def test_plan_command_reports_a_mistake_in_one_line(capsys, flags, word):
    assert main(["plan", *flags]) == 2
    said = capsys.readouterr().err
    assert word in said
    assert said.count("\n") == 1


def test_plan_does_not_import_torch():
    check = (
        "import sys, nearlinear as nl; nl.plan({'model': {'preset': 'gpt2-30b'}}, 'p5.48xlarge:8');"
        "print([m for m in ('torch', 'transformers', 'matplotlib') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert found.stdout.strip() == "[]", found.stdout + found.stderr
