"""Container entry point: output of the ranks, failure reason, config and variables."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from nearlinear.config import train as train_config
from nearlinear.distributed import process_exit
from nearlinear.launch import local
from nearlinear.launch.sagemaker import build_request, container
from nearlinear.train import preflight

TALKER = """\
import logging, os, sys
configure = logging.basicConfig
def configure_and_talk(**options):  # the command calls it once on every rank
    configure(**options)
    for number in range(20) if "RANK" in os.environ else ():
        sys.stdout.write(f"out {number}\\n")
        sys.stderr.write(f"err {number}\\n")
logging.basicConfig = configure_and_talk
"""


def write_inputs(root, hyperparameters: dict, channels: dict | None = None) -> None:
    folder = root / "input" / "config"
    folder.mkdir(parents=True)
    machines = {"hosts": ["algo-1"], "current_host": "algo-1", "current_instance_type": "ml.m5"}
    for name, content in (
        ("resourceconfig", machines),
        ("hyperparameters", hyperparameters),
        ("inputdataconfig", channels or {}),
    ):
        (folder / f"{name}.json").write_text(json.dumps(content))


@pytest.mark.slow
def test_output_order_is_kept_and_failure_is_written(tmp_path):
    """A rank alternates between stdout and stderr, then fails because the config has no data."""
    (tmp_path / "sitecustomize.py").write_text(TALKER)
    write_inputs(tmp_path / "ml", {"optimizer-lr": "1e-3"})
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    sources = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", "nearlinear.launch.sagemaker.container", str(tmp_path / "ml")],
        env=environment | {"PYTHONPATH": sources},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    said = [line for line in done.stdout.splitlines() if line.startswith(("out ", "err "))]
    assert said == [f"{stream} {number}" for number in range(20) for stream in ("out", "err")]
    assert done.returncode == 2
    why = (tmp_path / "ml" / "output" / "failure").read_text()
    assert "nearlinear data" in why and "\n" not in why and f"error: {why}" in done.stdout


def test_missing_container_files_are_reported(tmp_path, capsys):
    assert container.main(str(tmp_path)) == 2
    assert "--place emulate" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


class Failures:
    """Failed ranks, as the launcher reports them."""

    def __init__(self):
        self.found = {}

    def add(self, rank: int, code: int, said: str = "", by_peer: bool = False) -> None:
        self.found[rank] = local.RankExit(code, said, by_peer, time=1.7e9)


@pytest.fixture
def failures():
    return Failures()


STOPPED = -signal.SIGTERM
KILLED = -signal.SIGKILL


@pytest.mark.parametrize(
    ("ends", "code", "words"),
    [
        # torchrun stops the other ranks within the same second
        ([(0, STOPPED, ""), (1, 1, "RuntimeError: CUDA out of memory")], 1,
         ["rank 1 of 4 ended with code 1", "CUDA out of memory"]),
        # a killed rank leaves no message, but ranks that lost it do
        ([(0, 1, "RuntimeError: Connection closed by peer"), (1, KILLED, "")], 1,
         ["rank 1 of 4 was killed by signal 9"]),
        ([(0, 1, ""), (1, 2, "parallel.hybrid_shard_degree = 3: allowed are 1, 2, 4")], 2,
         ["hybrid_shard_degree = 3"]),
        ([(2, 3, "")], 1, ["rank 2 of 4 ended with code 3"]),
        ([(0, STOPPED, "")], 1, ["rank 0 of 4 was killed by signal 15"]),
        # ranks that lost another one describe it, and are not the cause
        ([(0, 143, "rank 1 died in step 3", True), (1, KILLED, "")], 1,
         ["rank 1 of 4 was killed by signal 9", "rank 1 died in step 3"]),
        ([(0, 1, "rank 1 ended in step 3", True), (1, 3, "")], 1,
         ["rank 1 of 4 ended with code 3", "rank 1 ended in step 3"]),
    ],
)  # fmt: skip
def test_first_failure_is_reported(failures, ends, code, words):
    for end in ends:
        failures.add(*end)
    ended = local.first_failure(failures.found, 4)
    assert ended.code == code and all(word in ended.reason for word in words), ended
    assert "To enable traceback" not in ended.reason


def test_unexpected_exception_keeps_its_traceback(tmp_path, monkeypatch):
    """For a bug, the process keeps its traceback and also stores the one-line message."""
    from nearlinear import cli

    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    monkeypatch.setattr("nearlinear.environment.format_report", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["env"])
    assert json.loads(path.read_text())["message"] == "ZeroDivisionError: division by zero"


def test_leave_error_without_an_error_file(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert not process_exit.leave_error("x")


CONFIG = {
    "model": {"preset": "gpt2-small", "overrides": {"n_layer": 2}},
    "data": {"resume": "7"},  # a string that looks like a number
    "parallel": {"hybrid_shard_degree": 2, "bf16": True},
    "optimizer": {"lr": 1e-3},
    "train": {"steps": 7, "two_hop": False, "sample_prompt": 'say "hi"'},
    "run": {"folder": "elsewhere"},
}


def test_config_round_trips_through_hyperparameters(tmp_path, monkeypatch):
    asked = train_config.load(CONFIG)
    write_inputs(tmp_path, build_request.hyperparameters(asked), {"train": {}})
    found = container.read_inputs(tmp_path)
    made = container.training_config(found)
    assert made.pop("data") == {"resume": "7", "path": str(tmp_path / "input" / "data" / "train")}
    expected = {name: table for name, table in CONFIG.items() if name not in ("data", "parallel")}
    assert made == expected
    monkeypatch.setenv(
        "SM_HP_MP_PARAMETERS", container.script_variables(found)["SM_HP_MP_PARAMETERS"]
    )
    assert train_config.load(made).parallel == asked.parallel


def test_mixture_sources_are_channels(tmp_path, monkeypatch, token_folder):
    """The container does not set data.path; training opens the folders of the channels."""
    blend = {"channel:train": 0.75, "channel:more-code": 0.25}
    asked = train_config.load({"data": {"sources": blend, "sequence_length": 64}})
    write_inputs(tmp_path, build_request.hyperparameters(asked), {"train": {}, "more-code": {}})
    data = tmp_path / "input" / "data"
    for name in ("train", "more-code"):
        shutil.copytree(token_folder, data / name)
    found = container.read_inputs(tmp_path)
    made = train_config.load(container.training_config(found))
    assert made.data.sources == blend and not made.data.path
    for name, value in container.script_variables(found).items():
        monkeypatch.setenv(name, value)
    read = preflight.open_dataset(made, "train")
    assert [source.path for source in read.sources] == [data / "train", data / "more-code"]
    assert read.weights == [0.75, 0.25]


def test_hyperparameter_names_are_valid_shell_variables():
    """The SDK's driver runs ``export SM_HP_<NAME>``, which fails for a name with a dot."""
    for name in build_request.hyperparameters(train_config.load(CONFIG)):
        assert container.variable_name(name).isidentifier() and "." not in name


def test_hyperparameters_accept_config_names(tmp_path):
    write_inputs(tmp_path, {"optimizer.lr": "0.001", "model-preset": "gpt2-xl", "steps": "3"})
    made = container.training_config(container.read_inputs(tmp_path))
    assert made["optimizer"] == {"lr": 0.001} and made["model"] == {"preset": "gpt2-xl"}
    assert made["steps"] == 3  # not in a table: the config rejects it by name
