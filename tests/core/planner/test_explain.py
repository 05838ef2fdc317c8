"""``plan --explain``: alternatives of every setting, and the command line."""

import dataclasses
import json

import pytest

import nearlinear as nl
from nearlinear.cli import main
from nearlinear.config import train as train_config
from nearlinear.planner import explain
from nearlinear.planner.cluster import node_names

GPT2_30B = {
    "model": {"preset": "gpt2-30b"},
    "parallel": {"hybrid_shard_degree": 128, "bf16": True},
    "batch": {"micro_batch_size": 6},
    "activations": {"checkpoint": "each"},
}
BARE_30B = {"model": {"preset": "gpt2-30b"}, "parallel": {"bf16": True},
            "batch": {"micro_batch_size": 8}}  # fmt: skip


def planned(data, cluster, settings=(), **assumptions):
    return nl.plan(train_config.load(data, settings, environment={}), cluster, **assumptions)


def test_explanations_follow_the_order_of_the_checklist():
    found = explain.explain(planned(GPT2_30B, "p4d.24xlarge:32"))
    assert [each.topic for each in found] == [
        "large GPUs",
        "sharding",
        "activation checkpointing",
        "micro-batch",
        "tensor parallelism",
        "pipeline across nodes",
        "offloading activations",
    ]


def test_rule_of_one_node_per_three_billion_parameters():
    plan = planned(GPT2_30B, "p4d.24xlarge:32")
    assert explain.three_billion_rule(plan) == 128  # 10 nodes; the next power of two is 16
    small = planned(GPT2_30B, "p4d.24xlarge:32", ["model.overrides.n_layer=4"])
    assert explain.three_billion_rule(small) == 8


@pytest.mark.parametrize(
    ("data", "cluster", "settings"),
    [
        (GPT2_30B, "p4d.24xlarge:32", []),
        (BARE_30B, "p4d.24xlarge:16", []),
        (BARE_30B, "p4d.24xlarge:32", ["parallel.tensor_parallel_degree=8"]),
        ({"model": {"preset": "llama2-7b"}, "parallel": {"bf16": True}}, "h100:2", []),
    ],
)
def test_better_alternatives_are_faster_or_needed_to_fit(data, cluster, settings):
    plan = planned(data, cluster, settings)
    for each in explain.explain(plan):
        if each.better:
            assert each.reason in ("faster", "needed to fit") and not each.best.missing_gib
            assert each.reason != "faster" or each.best.gain >= explain.WORTH
        elif each.best is not None and each.keys and plan.fits:
            assert each.best.missing_gib or each.best.gain < explain.WORTH


def test_numbers_of_an_alternative_are_those_of_its_plan():
    """In a pipeline, micro_batch_size counts all micro-batches of a schedule."""
    data = {"model": {"preset": "llama2-7b"}, "batch": {"micro_batch_size": 32},
            "parallel": {"bf16": True, "pipeline_parallel_degree": 2, "microbatches": 16},
            "activations": {"checkpoint": "each"}}  # fmt: skip
    plan = planned(data, "p4d.24xlarge:2")
    found = explain.explain(plan)
    lines = explain.format_explanations(found, plan).splitlines()
    assert "batch.micro_batch_size = 32 with batch.accumulation = 1 with " in lines[3]
    assert "with parallel.microbatches = 16; " in lines[3]
    for each in found:
        if each.best and each.topic in ("activation checkpointing", "micro-batch"):
            settings = [f"{key}={json.dumps(value)}" for key, value in each.best.settings.items()]
            again = planned(data, "p4d.24xlarge:2", settings)
            assert each.best.gain == pytest.approx(plan.seconds / again.seconds - 1)
            extra = (again.memory - plan.memory) / 2**30
            assert each.best.extra_gib == pytest.approx(extra)


def test_explanation_prefers_machines_where_the_config_fits():
    plan = planned(GPT2_30B | {"batch": {"micro_batch_size": 16}}, "p4d.24xlarge:32")
    first = explain.explain(plan)[0]
    assert not plan.fits and not first.best.missing_gib
    assert first.best.value in node_names()
    fits = planned(GPT2_30B, "p4d.24xlarge:32", tokens=1e12)
    assert "USD per billion tokens" in str(explain.explain(fits)[0])
    assert fits.usd_per_billion_tokens * 1000 == pytest.approx(fits.usd, rel=1e-3)


def test_assumptions_of_a_plan_apply_to_all_alternatives():
    calm, slow = (
        explain.explain(planned(GPT2_30B, "p4d.24xlarge:32", straggler=s, vocabulary=60000))
        for s in (0.0, 0.2)
    )
    # the same relative slowdown on both sides leaves the gain of other machines similar
    assert calm[0].best.value == slow[0].best.value
    assert calm[0].best.gain == pytest.approx(slow[0].best.gain, abs=0.15)


def test_degrees_take_ranks_from_the_data_and_keep_the_batch():
    plan = planned(GPT2_30B, "p4d.24xlarge:32")
    found = explain.with_setting(plan, tensor=8, pipeline=4)
    again = nl.plan(found.config, "p4d.24xlarge:32")
    mesh = again.work.mesh
    assert (mesh.tensor, mesh.pipeline, mesh.data_ranks) == (8, 4, 8)
    assert again.work.step_tokens == plan.work.step_tokens
    assert found.config.parallel.hybrid_shard_degree == 8
    assert (found.seconds, found.memory) == (again.seconds, again.memory)
    assert explain.with_setting(plan, tensor=3) is None  # does not divide 256 ranks
    assert explain.with_setting(plan, micro_batch=5) is None  # does not divide 1536 sequences


def test_a_fixed_global_batch_stays_fixed():
    data = {**GPT2_30B, "batch": {"micro_batch_size": 6, "sequences": 1536}}
    found = explain.with_setting(planned(data, "p4d.24xlarge:32"), micro_batch=3)
    assert dataclasses.astuple(found.config.batch) == (3, 1, 1536)


def test_command_explains_the_config_as_it_is(tmp_path, capsys):
    file = tmp_path / "run.json"
    file.write_text(json.dumps(GPT2_30B))
    for flag in ("--explain", "--why"):
        assert main(["plan", str(file), "--cluster", "p4d.24xlarge:16", flag]) == 0
        out = capsys.readouterr().out
        assert "\n2. sharding: parallel.hybrid_shard_degree = 128; one node per 3 billion" in out
        assert "\n8. bottleneck: " in out


def test_command_writes_and_explains_the_fastest_layout(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("nearlinear.planner.search.TENSOR", (1, 4))
    monkeypatch.setattr("nearlinear.planner.search.PIPELINE", (1,))
    file, best, numbers = (tmp_path / n for n in ("run.json", "best.toml", "numbers.json"))
    file.write_text(json.dumps(BARE_30B))
    flags = ["--cluster", "p4d.24xlarge:32", "--write", str(best), "--json", str(numbers)]
    assert main(["advise", str(file), *flags]) == 0  # alias of plan --search --explain
    out = capsys.readouterr().out
    assert "fastest layouts of the same batch" in out and "\n1. large GPUs: p4d.24xlarge" in out
    written = train_config.load(best)
    assert written.plan.cluster == "p4d.24xlarge:32" and written.parallel.bf16
    found = json.loads(numbers.read_text())
    assert found["fits"] is False and len(found["explain"]) == 7
    again = nl.plan(written, "p4d.24xlarge:32")
    assert again.fits and again.seconds == pytest.approx(found["search"][0]["seconds"])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "--cluster is missing"),
        (["--cluster", "p4d.24xlarge:32", "--write", "x.json"], "must end in .toml"),
        (["--cluster", "p4d.24xlarge:32", "--json", "x.toml"], "must end in .json"),
        (["--cluster", "p4d.24xlarge:32", "--write", "{file}"], "is the config file itself"),
        (["--cluster", "p4d.24xlarge:32", "--write", "/proc/nowhere/x.toml"], "cannot be written"),
        (["--cluster", "p4d.24xlarge:32", "--json", "/proc/nowhere/x.json"], "cannot be written"),
        (["--cluster", "nowhere.toml:2"], "nowhere.toml"),
        (["--cluster", "p4d.24xlarge:32", "--straggler", "2"], "straggler = 2.0"),
    ],
)
def test_command_reports_a_mistake_in_one_line(tmp_path, capsys, flags, words):
    file = tmp_path / "run.toml"
    file.write_text("[model]\npreset = 'gpt2-xl'\n")
    assert main(["advise", str(file), *(flag.format(file=file) for flag in flags)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and words in err, err


def test_write_requires_a_search(tmp_path, capsys):
    flags = ["--cluster", "p4d.24xlarge:1", "--write", str(tmp_path / "x.toml")]
    assert main(["plan", *flags]) == 2
    assert "--write needs --search" in capsys.readouterr().err
