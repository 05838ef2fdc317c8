"""``nearlinear tune`` as a command: mistakes, measurements on real ranks, and the tuned config."""

import dataclasses
import json

import pytest

import nearlinear as nl
from nearlinear import cli
from nearlinear.config import train as train_config
from nearlinear.distributed import runtime
from nearlinear.distributed.mesh import Mesh
from nearlinear.errors import ConfigError
from nearlinear.planner.calibrate import rates
from nearlinear.planner.cluster import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from tests.support.command_line import nearlinear, write

PICKED = [
    "hybrid_shard_degree",
    "communication_backend",
    "hierarchical_all_gather",
    "prefetch_depth",
    "sdp_max_live_parameters",
    "sdp_reduce_bucket_size",
]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--set", "run.nproc=4", "--set", "parallel.hybrid_shard_degree=3"], "allowed are 1, 2"),
        (["--set", "data.path="], "nearlinear data"),
        (
            ["--set", "parallel.tensor_parallel_degree=2"],
            "tune only measures sharded data parallelism",
        ),
        (["--rounds", "0"], "--rounds 0: must be at least 1"),
        (["--memory", "-1"], "--memory -1.0"),
        (["--validate", "-1"], "--validate -1: must be 0"),
        (["--memory", "nan"], "--memory nan"),
        (["--write", "tuned.json"], "must end in .toml"),
        (["--write", "/proc/nowhere/tuned.toml"], "cannot be written"),
        (["--json", "numbers.txt"], "must end in .json"),
        (["--json", "{config}"], "is the config file itself"),
        (["--set", "model.overrides.n_embd=-4"], "must be at least 1"),
    ],
)
def test_tune_reports_a_mistake_in_one_line(small_run, tmp_path, capsys, flags, words):
    path = write(small_run, tmp_path)
    flags = [flag.format(config=path) for flag in flags]
    assert cli.main(["tune", str(path), *flags]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and words in err, err


def test_tune_help_has_examples():
    shown = nearlinear("tune", "--help")
    assert shown.returncode == 0 and "nearlinear tune run.toml" in shown.stdout


@pytest.fixture
def quick(monkeypatch):
    """Measurements too short for exact rates."""
    monkeypatch.setattr(rates, "CHUNK_SECONDS", 1e-3)
    monkeypatch.setitem(rates.EDGES, "cpu", (16, 32))


def test_tune_on_one_rank(small_run, tmp_path, capsys, quick):
    numbers, path = tmp_path / "numbers.json", str(write(small_run, tmp_path))
    assert cli.main(["tune", path, "--rounds", "1", "--json", str(numbers)]) == 0
    shown = capsys.readouterr().out
    assert "matrix products, TFLOPS" in shown and "the only possible value" in shown
    found = json.loads(numbers.read_text())
    assert found["measured"] == [] and list(found["settings"]) == PICKED
    assert cli.main(["tune", path, "--rounds", "1", "--memory", "1e-3"]) == 2
    assert "the model does not fit" in capsys.readouterr().err


@pytest.mark.slow
def test_tuned_config_trains(small_run, tmp_path):
    ranks = 2
    small_run["train"] |= {"steps": 2, "eval_sequences": 0, "sample_tokens": 0}
    tuned, numbers = tmp_path / "tuned.toml", tmp_path / "numbers.json"
    flags = ["--nproc", ranks, "--rounds", 1, "--write", tuned, "--json", numbers]
    # settings of gloo and of nearlinear: the ranks leave and join several times
    shown = nearlinear("tune", write(small_run, tmp_path), *flags)
    assert shown.returncode == 0, shown.stderr
    assert not (tmp_path / "run").exists()  # nothing is trained
    found = json.loads(numbers.read_text())
    kinds = {row["kind"] for row in found["measured"]}
    assert {ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE} <= kinds
    backends = {row["backend"] for row in found["measured"]}
    assert "gloo" in backends and len(found["estimated"]) == len(backends) * 2
    before, after = train_config.load(str(write(small_run, tmp_path))), train_config.load(tuned)
    values = {key: setting["value"] for key, setting in found["settings"].items()}
    assert after.parallel == dataclasses.replace(before.parallel, **values)
    assert after.run.nproc == ranks and after.data == before.data and after.model == before.model
    measured = [each["measured"] for each in found["finalists"]]
    assert len(measured) > 2 and min(measured) > 0
    assert found["chosen"]["measured"] <= 1.005 * min(measured)
    assert "real steps on random tokens" in shown.stdout
    for key, value in values.items():
        assert f"{key} = {json.dumps(value)}" in shown.stdout
    results = nl.spmd.run(lambda rank: nl.Trainer(train_config.load(tuned)).fit(), ranks)
    assert [result.steps for result in results] == [2, 2]


def test_a_backend_that_one_rank_cannot_load_is_skipped(monkeypatch):
    def candidates(rank):
        mesh = nl.init()
        assert mesh == Mesh(shard=2)
        return rates.candidate_backends("gloo", runtime.current().device)

    def missing(name):
        raise ConfigError("not installed")

    monkeypatch.setattr(rates.backends, "register_backend", missing)
    assert nl.spmd.run(candidates, 2) == [["gloo"]] * 2
