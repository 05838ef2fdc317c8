"""`nearlinear advise`: the checklist, walked with the planner, and what it decides."""

import dataclasses
import json
import tomllib

import pytest

import nearlinear as nl
from nearlinear.cli import main
from nearlinear.plan import advise, answer, hardware
from nearlinear.plan.advise import items, trial
from nearlinear.train import config as train_config

GPT2_30B = {
    "model": {"preset": "gpt2-30b"},
    "parallel": {"hybrid_shard_degree": 128, "bf16": True},
    "batch": {"micro_batch_size": 6},
    "activations": {"checkpoint": "each"},
}
BARE_30B = {"model": {"preset": "gpt2-30b"}, "parallel": {"bf16": True},
            "batch": {"micro_batch_size": 8}}  # fmt: skip


def walked(data, cluster, settings=(), **asked):
    return nl.advise(train_config.load(data, settings, environment={}), cluster, **asked)


def test_the_list_is_in_its_order():
    found = walked(GPT2_30B, "p4d.24xlarge:32")
    first = [each.item.topic for each in found.decisions if not each.again]
    assert first == [
        "large GPUs",
        "sharding",
        "activation checkpointing",
        "micro-batch",
        "tensor parallelism",
        "pipeline across nodes",
        "offloading activations",
    ]


def test_the_rule_of_a_node_for_three_billion_parameters():
    plan = answer.plan(train_config.load(GPT2_30B, environment={}), "p4d.24xlarge:32")
    assert items.rule(plan) == 128  # 10 nodes, and 16 is the next power of two
    smaller = train_config.load(GPT2_30B, ["model.overrides.n_layer=4"], environment={})
    assert items.rule(answer.plan(smaller, "p4d.24xlarge:32")) == 8


@pytest.mark.parametrize(
    ("data", "cluster", "settings"),
    [
        (GPT2_30B, "p4d.24xlarge:32", []),
        (BARE_30B, "p4d.24xlarge:16", []),
        (BARE_30B, "p4d.24xlarge:32", ["parallel.tensor_parallel_degree=8"]),
        ({"model": {"preset": "llama2-7b"}, "parallel": {"bf16": True}}, "h100:2", []),
    ],
)
def test_what_is_taken_helps_or_is_needed_and_the_batch_stays(data, cluster, settings):
    found = walked(data, cluster, settings)
    assert found.after.work.step_tokens == found.before.work.step_tokens
    assert found.after.fits
    if found.before.fits:
        assert found.after.seconds <= found.before.seconds
    for each in found.decisions:
        if each.taken:
            assert each.why in ("faster", "needed to fit", "nearer to fitting")
            assert each.why != "faster" or (each.best.faster > 0 and not each.best.over)
        elif each.best is not None and each.item.keys and found.before.fits:
            assert each.best.over or each.best.faster < 0.01
    # what it ends with is the planner's own answer for that config
    again = answer.plan(found.after.config, cluster)
    assert (again.seconds, again.memory) == (found.after.seconds, found.after.memory)
    # and walking on from there changes nothing
    plan = found.after
    more = nl.advise(plan.config, plan.cluster)
    assert not any(each.taken for each in more.decisions)


def test_a_config_that_does_not_fit_is_made_to_fit():
    found = walked(BARE_30B, "p4d.24xlarge:16")
    assert not found.before.fits and found.after.fits
    checkpointing = found.decisions[2]
    assert checkpointing.taken and checkpointing.best.value == "each"
    assert found.after.config.activations.checkpoint


def test_what_fits_nowhere_says_so(capsys, tmp_path):
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"model": {"preset": "llama2-70b"}, "parallel": {"bf16": True}}))
    assert main(["advise", str(file), "--cluster", "p3dn.24xlarge:1", "--set",
                 "parallel.bf16=false", "--set", "parallel.fp16=true"]) == 0  # fmt: skip
    said = capsys.readouterr().out
    assert "does not make it fit, so that the config stays as it is" in said
    assert "no change of one key or of two makes it fit" in said
    shown = train_config.load(tomllib.loads(said[said.index("[model]") :]))
    assert shown.model.preset == "llama2-70b" and not shown.activations.checkpoint


def test_machines_where_it_fits_come_first():
    found = walked(GPT2_30B | {"batch": {"micro_batch_size": 16}}, "p4d.24xlarge:32").decisions[0]
    assert found.best.plan.fits and not found.plan.fits
    said = advise.text(walked(GPT2_30B, "p4d.24xlarge:32")).splitlines()[0]
    assert "USD per billion tokens" in said
    plan = answer.plan(train_config.load(GPT2_30B, environment={}), "p4d.24xlarge:32", tokens=1e12)
    assert plan.usd_per_billion_tokens * 1000 == pytest.approx(plan.usd, rel=1e-3)


def test_values_are_those_of_the_config():
    """Of a pipeline, micro_batch_size is what all its micro-batches are together."""
    data = {"model": {"preset": "llama2-7b"}, "batch": {"micro_batch_size": 32},
            "parallel": {"bf16": True, "pipeline_parallel_degree": 2, "microbatches": 16},
            "activations": {"checkpoint": "each"}}  # fmt: skip
    plan = answer.plan(train_config.load(data, environment={}), "p4d.24xlarge:2")
    decisions = advise.why(advise.Trial.of(plan), plan)
    lines = advise.why_text(decisions, plan).splitlines()
    assert "batch.micro_batch_size = 32 with batch.accumulation = 1 with " in lines[3]
    assert "with parallel.microbatches = 16; " in lines[3]
    for each in decisions:
        if each.best and each.item.keys:
            keys = advise.as_dict(advise.Advice(plan, plan, [each]))["items"][0]["best"]["settings"]
            asked = [f"{key}={json.dumps(value)}" for key, value in keys.items()]
            again = train_config.load(data, asked, environment={})
            for key in keys:
                table, name = key.split(".")
                one, other = (getattr(c, table) for c in (again, each.best.plan.config))
                assert getattr(one, name) == getattr(other, name)


def test_what_the_command_line_says_reaches_every_trial(monkeypatch):
    seen = []
    asked = {"straggler": 0.2, "vocabulary": 1000, "tokens": 1e9, "usd_per_hour": 7.0}
    real = answer.plan

    def plan(config, cluster, **keywords):
        seen.append(keywords)
        return real(config, cluster, **keywords)

    monkeypatch.setattr(trial.answer, "plan", plan)
    found = walked(GPT2_30B, "p4d.24xlarge:32", **asked)
    assert len(seen) > 20
    assert all(each["straggler"] == 0.2 and each["vocabulary"] == 1000 for each in seen)
    assert found.after.usd_per_hour == 7.0 and found.after.tokens == 1e9
    others = [each for each in seen if each["usd_per_hour"] is None]  # other machines, their prices
    assert 0 < len(others) < len(hardware.names())


def test_stragglers_slow_what_is_advised():
    calm, slow = (walked(GPT2_30B, "p4d.24xlarge:32", straggler=s) for s in (0.0, 0.2))
    assert slow.after.seconds > 1.3 * calm.after.seconds


def test_degrees_take_ranks_from_the_data_and_the_batch_stays():
    plan = answer.plan(train_config.load(GPT2_30B, environment={}), "p4d.24xlarge:32")
    asked = advise.Trial.of(plan)
    found = asked.changed(plan, tensor=8, pipeline=4)
    mesh = found.work.mesh
    assert (mesh.tensor, mesh.pipeline, mesh.data_ranks) == (8, 4, 8)
    assert found.work.step_tokens == plan.work.step_tokens
    assert found.config.parallel.hybrid_shard_degree == 8
    assert asked.changed(plan, tensor=3) is None  # 256 ranks
    assert asked.changed(plan, micro_batch=5) is None  # 1536 sequences


def test_a_batch_that_was_fixed_stays_fixed():
    data = {**GPT2_30B, "batch": {"micro_batch_size": 6, "sequences": 1536}}
    plan = answer.plan(train_config.load(data, environment={}), "p4d.24xlarge:32")
    found = advise.Trial.of(plan).changed(plan, micro_batch=3)
    assert dataclasses.astuple(found.config.batch) == (3, 1, 1536)


def test_the_command(tmp_path, capsys):
    file, kept, numbers = (tmp_path / n for n in ("run.json", "advised.toml", "numbers.json"))
    file.write_text(json.dumps(BARE_30B))
    flags = ["--cluster", "p4d.24xlarge:32", "--write", str(kept), "--json", str(numbers)]
    assert main(["advise", str(file), *flags]) == 0
    said = capsys.readouterr().out
    assert said.startswith("1. large GPUs: p4d.24xlarge; A100-40GB")
    assert "-> change: needed to fit" in said and "as advised:" in said
    written = train_config.load(kept)
    shown = train_config.load(tomllib.loads(said[said.index("[model]") : said.index("wrote ")]))
    assert shown == written and written.parallel.bf16
    assert written.plan.cluster == "p4d.24xlarge:32"
    found = json.loads(numbers.read_text())
    assert found["before"]["fits"] is False and found["after"]["fits"] is True
    assert found["items"][1]["keys"] == ["parallel.hybrid_shard_degree"]
    again = answer.plan(written, "p4d.24xlarge:32")
    assert again.seconds == found["after"]["step_seconds"]


def test_why_explains_without_deciding(tmp_path, capsys):
    file = tmp_path / "run.json"
    file.write_text(json.dumps(GPT2_30B))
    assert main(["plan", str(file), "--cluster", "p4d.24xlarge:16", "--why"]) == 0
    said = capsys.readouterr().out
    assert "\n2. sharding: parallel.hybrid_shard_degree = 128; a node for every 3 billion" in said
    assert "\n8. what binds: " in said and "->" not in said


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "--cluster is missing"),
        (["--cluster", "p4d.24xlarge:32", "--write", "x.json"], "must end in .toml"),
        (["--cluster", "p4d.24xlarge:32", "--json", "x.toml"], "must end in .json"),
        (["--cluster", "p4d.24xlarge:32", "--write", "{file}"], "is the config itself"),
        (["--cluster", "p4d.24xlarge:32", "--write", "/proc/nowhere/x.toml"], "cannot be written"),
        (["--cluster", "p4d.24xlarge:32", "--json", "/proc/nowhere/x.json"], "cannot be written"),
        (["--cluster", "nowhere.toml:2"], "no such config file"),
        (["--cluster", "p4d.24xlarge:32", "--straggler", "2"], "straggler = 2.0"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, capsys, flags, words):
    file = tmp_path / "run.toml"
    file.write_text("[model]\npreset = 'gpt2-xl'\n")
    assert main(["advise", str(file), *(flag.format(file=file) for flag in flags)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and words in err, err
