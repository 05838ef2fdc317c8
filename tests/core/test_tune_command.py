"""`nearlinear tune` as a command: its refusals, its numbers on real ranks, and that they train."""

import dataclasses
import json
import os

import pytest

import nearlinear as nl
from nearlinear import cli, runtime
from nearlinear.errors import ConfigError
from nearlinear.mesh import Mesh
from nearlinear.train import config as train_config
from nearlinear.tune import command, measure, report
from nearlinear.tune.estimate import GATHER, GATHER_STAGED, JOIN, REDUCE, REDUCE_STAGED
from tests.support.command_line import nearlinear, write
from tests.support.releases import needs_hooks

PICKED = [
    "hybrid_shard_degree",
    "communication_backend",
    "hierarchical_all_gather",
    "prefetch_depth",
    "sdp_max_live_parameters",
    "sdp_reduce_bucket_size",
]


@pytest.fixture(autouse=True)
def leave_the_group():
    """A command run in this process may fail after it has become a job of one rank."""
    yield
    runtime.shutdown()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--set", "run.nproc=4", "--set", "parallel.hybrid_shard_degree=3"], "allowed are 1, 2"),
        (["--set", "data.path="], "python -m data_prep"),
        (["--set", "parallel.tensor_parallel_degree=2"], "tune measures sharded data parallelism"),
        (["--rounds", "0"], "--rounds 0: must be at least 1"),
        (["--memory", "-1"], "--memory -1.0"),
        (["--memory", "nan"], "--memory nan"),
        (["--memory", "1e-3"], "the model does not fit"),
        (["--write", "tuned.json"], "must end in .toml"),
        (["--write", "/proc/nowhere/tuned.toml"], "cannot be written"),
        (["--json", "numbers.txt"], "must end in .json"),
        (["--json", "{config}"], "is the config itself"),
        (["--set", "model.overrides.n_embd=-4"], "the model cannot be built"),
    ],
)
def test_a_mistake_is_one_line(small_run, tmp_path, capsys, flags, words):
    path = write(small_run, tmp_path)
    flags = [flag.format(config=path) for flag in flags]
    assert cli.main(["tune", str(path), *flags]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and words in err, err


def test_help_has_examples():
    shown = nearlinear("tune", "--help")
    assert shown.returncode == 0 and "nearlinear tune run.toml" in shown.stdout


def test_one_rank(small_run, tmp_path, capsys):
    numbers = tmp_path / "numbers.json"
    assert cli.main(["tune", str(write(small_run, tmp_path)), "--json", str(numbers)]) == 0
    shown = capsys.readouterr().out
    assert "one block, one micro-batch" in shown and "there is one rank" in shown
    found = json.loads(numbers.read_text())
    assert found["measured"] == [] and list(found["settings"]) == PICKED
    assert found["work"]["activations"] > 0 and found["work"]["forward"] > 0


@pytest.mark.slow
def test_what_it_writes_trains(small_run, tmp_path):
    ranks = 2
    small_run["train"] |= {"steps": 2, "eval_sequences": 0, "sample_tokens": 0}
    tuned, numbers = tmp_path / "tuned.toml", tmp_path / "numbers.json"
    flags = ["--nproc", ranks, "--rounds", 2, "--write", tuned, "--json", numbers]
    shown = nearlinear("tune", write(small_run, tmp_path), *flags)
    assert shown.returncode == 0, shown.stderr
    assert not (tmp_path / "run").exists()  # nothing is trained
    found = json.loads(numbers.read_text())
    rows = {(row["degree"], row["collective"]) for row in found["measured"]}
    assert {(1, JOIN), (ranks, GATHER), (ranks, REDUCE)} <= rows
    assert all(row["seconds"] > 0 for row in found["measured"])
    backends = {row["backend"] for row in found["measured"]}
    assert "gloo" in backends and len(found["estimated"]) == len(backends) * (ranks // 2 + 1)
    before, after = train_config.load(str(write(small_run, tmp_path))), train_config.load(tuned)
    values = {key: setting["value"] for key, setting in found["settings"].items()}
    assert after.parallel == dataclasses.replace(before.parallel, **values)
    assert after.run.nproc == ranks and after.data == before.data and after.model == before.model
    for key, value in values.items():
        assert f"{key} = {json.dumps(value)}" in shown.stdout
    trained = nearlinear("train", tuned)
    assert trained.returncode == 0 and "step=2" in trained.stdout, trained.stderr


def on_two_nodes(rank, config):
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    found = command.find(train_config.load(config), command.Options(rounds=1))
    return report.plain(found), report.text(found)


@needs_hooks
@pytest.mark.slow
def test_across_nodes_both_ways_are_measured(small_run):
    results = nl.spmd.run(on_two_nodes, 4, args=(small_run,), processes=True)
    plain, text = results[0]
    ways = {row["collective"] for row in plain["measured"] if row["degree"] == 4}
    assert {GATHER, GATHER_STAGED, REDUCE, REDUCE_STAGED} <= ways
    assert GATHER_STAGED not in {r["collective"] for r in plain["measured"] if r["degree"] == 2}
    assert "4 ranks (cpu) on 2 nodes" in text
    picks = [result["settings"] for result, _ in results]
    assert all(pick == picks[0] for pick in picks)  # every rank has the slowest rank's numbers


def test_a_rank_that_cannot_load_a_backend_rules_it_out(monkeypatch):
    def candidates(rank):
        mesh = nl.init()
        assert mesh == Mesh(shard=2)
        return measure.candidates("gloo", runtime.current().device)

    def missing(name):
        raise ConfigError("not installed")

    monkeypatch.setattr(measure.backends, "known_to_torch", missing)
    assert nl.spmd.run(candidates, 2) == [["gloo"]] * 2
