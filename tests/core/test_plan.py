"""What ``nearlinear plan`` answers: hardware, workloads, rates, cost, layouts."""

import json
import math
import re
import subprocess
import sys
import tomllib

import pytest

import nearlinear as nl
from nearlinear.cli import main
from nearlinear.errors import ConfigError
from nearlinear.launch import instances
from nearlinear.plan import hardware, scaling, shape, workload
from nearlinear.train import config as train_config
from nearlinear.train import flops
from nearlinear.train.model import build_model
from nearlinear.train.tables import ModelConfig

TABLE = tomllib.loads((hardware.DATA / "hardware.toml").read_text(encoding="utf-8"))
GPT2_30B = {
    "model": {"preset": "gpt2-30b"},
    "parallel": {"hybrid_shard_degree": 128, "bf16": True},
    "batch": {"micro_batch_size": 6},
    "activations": {"checkpoint": "each"},
}


@pytest.mark.parametrize("name", TABLE["node"])
def test_nodes_agree_with_what_jobs_are_sent_to(name):
    found, known = hardware.node(name), instances.known(name)
    assert found.network_gbps > 0
    if known:
        assert found.gpus == known.accelerators
        assert hardware.node(f"ml.{name}") == found
    for source in (*found.sources, *found.gpu.sources):
        assert source in TABLE["sources"]
    assert {*TABLE["checked"]} <= {*TABLE["sources"]}
    assert bool(found.usd_per_hour) == bool(found.priced)


def test_the_nodes_that_were_asked_for_are_there():
    families = ("p3dn", "p4d", "p4de", "p5", "p5e", "p5en", "p6-b200")
    assert {name.split(".")[0] for name in TABLE["node"]} >= {*families, "h100", "h200", "b200"}


def test_peaks_are_those_that_training_is_held_against():
    for (part, precision), peak in flops.PEAK_TFLOPS.items():
        for name, gpu in TABLE["gpu"].items():
            if name.startswith(part):
                assert gpu["peak_tflops"][precision] == peak


def test_a_gpu_held_to_less_power_is_slower():
    whole, held = (hardware.accelerator(n) for n in ("H100-80GB", "H100-96GB-500W"))
    share = held.best_product("bf16") / whole.best_product("bf16")
    assert share == pytest.approx((500 / 700) ** (1 / 3))


@pytest.mark.parametrize(
    "text",
    ["p4d.24xlarge:0", "p4d.24xlarge:x", "p9.large:2", "", ":3", "p4d.24xlarge:" + "9" * 5000],
)
def test_a_cluster_that_is_none(text):
    with pytest.raises(ConfigError, match="--cluster"):
        hardware.parse_cluster(text)


def test_a_precision_that_a_gpu_has_not():
    with pytest.raises(ConfigError, match="no bf16"):
        nl.plan(GPT2_30B, "p3dn.24xlarge:32")


@pytest.mark.parametrize(
    "preset", ["gpt2-tiny", "llama-tiny", "gpt-neox-tiny", "mixtral-tiny", "llama2-7b"]
)
def test_shapes_are_those_of_the_models(preset):
    config = ModelConfig(preset=preset)
    found, model = shape.of_model(config, 512), build_model(config, 512)
    matrices = sum(p.numel() for p in model.parameters() if p.dim() >= 2)
    assert found.parameters == matrices
    assert found.flops_per_token(64) == pytest.approx(flops.flops_per_token(model, 64), rel=1e-3)


@pytest.mark.parametrize(
    ("preset", "overrides", "words"),
    [
        ("gpt2-30b", {"n_head": 0}, "n_head = 0: must be at least 1"),
        ("gpt2-30b", {"n_embd": -7168}, "n_embd = -7168: must be at least 1"),
        ("gpt2-30b", {"n_head": 55}, "55 heads do not divide its width of 7168"),
        ("gpt2-30b", {"n_layer": 9_999_999}, "9,999,999 layers, of which the planner takes 10,000"),
        ("llama2-70b", {"num_key_value_heads": "8"}, "num_key_value_heads = '8': expected an int"),
        ("llama2-70b", {"num_key_value_heads": 5}, "does not divide its 64 heads"),
        ("llama2-70b", {"num_attention_heads": None}, "num_attention_heads = None: expected an"),
        ("llama2-70b", {"max_position_embeddings": -5}, "max_position_embeddings = -5"),
        ("llama2-70b", {"hidden_act": ["silu"]}, "hidden_act"),
        ("llama2-70b", {"tie_word_embeddings": 3}, "true or false"),
        ("mixtral-tiny", {"num_local_experts": "8"}, "num_local_experts = '8': expected an int"),
        ("mixtral-tiny", {"num_local_experts": [8]}, "num_local_experts"),
        ("mixtral-tiny", {"num_experts_per_tok": 99}, "num_experts_per_tok = 99, of "),
    ],
)
def test_a_model_that_cannot_be(preset, overrides, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        nl.plan({"model": {"preset": preset, "overrides": overrides}}, "h100:8")


def test_null_is_what_the_family_has():
    null = {"num_key_value_heads": None, "num_local_experts": None}
    asked = ModelConfig(preset="llama2-7b", overrides=null)
    assert shape.of_model(asked) == shape.of_model(ModelConfig(preset="llama2-7b"))


def test_a_config_becomes_a_step():
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
    found = workload.from_config(config, 64, 8)
    assert (found.micro_batch, found.passes, found.mesh.pipeline) == (2, 6, 4)
    assert (found.gather_bytes, found.reduce_bytes) == (2.0, 4.0)  # stages gather as FSDP2 does
    assert found.recompute == "elementwise"
    assert found.offload
    assert found.step_tokens == 6 * 2 * 8 * 2048


def test_the_answer_for_the_30b_model_of_the_seed():
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
    assert found.binding.startswith("computation")
    json.dumps(found.as_dict())


def test_a_slow_network_binds():
    found = nl.plan(
        {
            "model": {"preset": "llama2-7b"},
            "parallel": {"bf16": True},
            "batch": {"micro_batch_size": 1},
        },
        "p4d.24xlarge:16",
        settings=("data.sequence_length=512",),
    )
    assert found.binding.startswith(("all-gather", "reduce-scatter"))
    assert "micro_batch_size" in found.binding


def test_a_price_that_is_not_known():
    found = nl.plan(GPT2_30B, "p5e.48xlarge:16")
    assert math.isnan(found.usd)
    assert "price not known" in str(found)
    assert nl.plan(GPT2_30B, "p5e.48xlarge:16", usd_per_hour=50.0).usd > 0


def test_stragglers_can_be_asked_for():
    assert nl.plan(GPT2_30B, "p5.48xlarge:16", straggler=0.1).seconds > (
        1.1 * nl.plan(GPT2_30B, "p5.48xlarge:16").seconds
    )
    with pytest.raises(ConfigError, match="straggler"):
        nl.plan(GPT2_30B, "p5.48xlarge:16", straggler=1.0)


def test_what_does_not_fit_says_by_how_much_and_what_to_change(capsys, tmp_path):
    file = tmp_path / "run.json"
    file.write_text(json.dumps(GPT2_30B | {"batch": {"micro_batch_size": 32}}))
    assert main(["plan", str(file), "--cluster", "p4d.24xlarge:32"]) == 0
    said = capsys.readouterr().out
    assert "more than the 39.5 of a A100-40GB" in said
    assert "cheapest change that makes it fit: " in said


def test_curves_reach_further_than_anyone_here():
    config = train_config.load(GPT2_30B, environment={})
    points = scaling.curve(config, hardware.parse_cluster("p4d.24xlarge:16"))
    assert [point.gpus for point in points] == [128 * 2**n for n in range(8)]
    assert points[0].efficiency == 1.0
    rates = [point.tokens_per_second_per_gpu for point in points]
    assert rates == sorted(rates, reverse=True)
    assert points[-1].efficiency > 0.9


def test_the_command_writes_what_it_says(capsys, tmp_path):
    file, numbers, figure = (tmp_path / name for name in ("run.json", "plan.json", "step.png"))
    file.write_text(json.dumps(GPT2_30B))
    asked = ["--cluster", "p4d.24xlarge:16", "--scale", "--why", "--json", str(numbers)]
    assert main(["plan", str(file), *asked, "--figure", str(figure)]) == 0
    said = capsys.readouterr().out
    assert "what binds: " in said
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
def test_mistakes_are_one_line(capsys, flags, word):
    assert main(["plan", *flags]) == 2
    said = capsys.readouterr().err
    assert word in said
    assert said.count("\n") == 1


def test_planning_is_light():
    check = (
        "import sys, nearlinear as nl; nl.plan({'model': {'preset': 'gpt2-30b'}}, 'p5.48xlarge:8');"
        "print([m for m in ('torch', 'transformers', 'matplotlib') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert found.stdout.strip() == "[]", found.stdout + found.stderr
