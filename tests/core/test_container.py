"""One host of a SageMaker job: what its ranks say passes through, and why they ended is left."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from nearlinear import leaving
from nearlinear.launch import local
from nearlinear.launch.sagemaker import container, request
from nearlinear.train import config as train_config
from nearlinear.train import preflight

TALKER = """\
import os, sys
if "RANK" in os.environ:
    for number in range(20):
        sys.stdout.write(f"out {number}\\n")
        sys.stderr.write(f"err {number}\\n")
"""


def lay_out(root, hyperparameters: dict, channels: dict | None = None) -> None:
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
def test_what_a_rank_says_is_in_order_and_its_mistake_is_left(tmp_path):
    """A rank that alternates between its two streams, then fails for a config without data."""
    (tmp_path / "sitecustomize.py").write_text(TALKER)
    lay_out(tmp_path / "ml", {"optimizer-lr": "1e-3"})
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
    assert "python -m data_prep" in why and "\n" not in why and f"error: {why}" in done.stdout


def test_outside_a_container_it_says_so(tmp_path, capsys):
    assert container.main(str(tmp_path)) == 2
    assert "--place emulate" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


class Failures:
    """Ranks that have failed, as torch's agent finds them."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.monkeypatch, self.found = folder, monkeypatch, {}

    def add(self, rank: int, code: int, said: str = "") -> None:
        path = self.folder / f"{rank}.json"
        if said:
            self.monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
            assert leaving.leave_error(said)
        self.found[rank] = ProcessFailure(rank, 1000 + rank, code, str(path))


@pytest.fixture
def failures(tmp_path, monkeypatch):
    return Failures(tmp_path, monkeypatch)


STOPPED = -signal.SIGTERM
KILLED = -signal.SIGKILL


@pytest.mark.parametrize(
    ("ends", "code", "words"),
    [
        # the ranks beside a failed one are told to stop, within the same second
        ([(0, STOPPED, ""), (1, 1, "RuntimeError: CUDA out of memory")], 1,
         ["rank 1 of 4 ended with code 1", "CUDA out of memory"]),
        # a killed rank says nothing; those that waited for it say that they lost it
        ([(0, 1, "RuntimeError: Connection closed by peer"), (1, KILLED, "")], 1,
         ["rank 1 of 4 was killed by signal 9"]),
        ([(0, 1, ""), (1, 2, "parallel.hybrid_shard_degree = 3: allowed are 1, 2, 4")], 2,
         ["hybrid_shard_degree = 3"]),
        ([(2, 3, "")], 1, ["rank 2 of 4 ended with code 3"]),
        ([(0, STOPPED, "")], 1, ["rank 0 of 4 was killed by signal 15"]),
    ],
)  # fmt: skip
def test_the_first_cause_is_named(failures, ends, code, words):
    for end in ends:
        failures.add(*end)
    ended = local._reason(failures.found, 4)
    assert ended.code == code and all(word in ended.why for word in words), ended
    assert "To enable traceback" not in ended.why


def test_a_defect_of_a_rank_is_handed_on_with_its_traceback(tmp_path, monkeypatch):
    """Not a mistake of the user: the process keeps its traceback, and its one line is left."""
    from nearlinear import cli

    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    monkeypatch.setattr("nearlinear.environment.text", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["env"])
    assert json.loads(path.read_text())["message"] == "ZeroDivisionError: division by zero"


def test_a_rank_nobody_listens_to_leaves_nothing(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert not leaving.leave_error("x")


CONFIG = {
    "model": {"preset": "gpt2-small", "overrides": {"n_layer": 2}},
    "data": {"resume": "7"},  # a text that looks like a number
    "parallel": {"hybrid_shard_degree": 2, "bf16": True},
    "optimizer": {"lr": 1e-3},
    "train": {"steps": 7, "two_hop": False, "sample_prompt": 'say "hi"'},
    "run": {"folder": "elsewhere"},
}


def test_the_config_comes_out_as_it_went_in(tmp_path, monkeypatch):
    asked = train_config.load(CONFIG)
    lay_out(tmp_path, request.hyperparameters(asked), {"train": {}})
    found = container.read(tmp_path)
    made = container.config(found)
    assert made.pop("data") == {"resume": "7", "path": str(tmp_path / "input" / "data" / "train")}
    expected = {name: table for name, table in CONFIG.items() if name not in ("data", "parallel")}
    assert made == expected
    monkeypatch.setenv("SM_HP_MP_PARAMETERS", container.variables(found)["SM_HP_MP_PARAMETERS"])
    assert train_config.load(made).parallel == asked.parallel


def test_sources_of_a_blend_are_channels(tmp_path, monkeypatch, token_folder):
    """The container leaves data.path to them; the training finds them where they were laid out."""
    blend = {"channel:train": 0.75, "channel:more-code": 0.25}
    asked = train_config.load({"data": {"sources": blend, "sequence_length": 64}})
    lay_out(tmp_path, request.hyperparameters(asked), {"train": {}, "more-code": {}})
    data = tmp_path / "input" / "data"
    for name in ("train", "more-code"):
        shutil.copytree(token_folder, data / name)
    found = container.read(tmp_path)
    made = train_config.load(container.config(found))
    assert made.data.sources == blend and not made.data.path
    for name, value in container.variables(found).items():
        monkeypatch.setenv(name, value)
    read = preflight.open_dataset(made, "train")
    assert [source.path for source in read.sources] == [data / "train", data / "more-code"]
    assert read.weights == [0.75, 0.25]


def test_names_are_what_a_shell_takes():
    """The SDK's driver writes ``export SM_HP_<NAME>`` of them; a dot would end the job there."""
    for name in request.hyperparameters(train_config.load(CONFIG)):
        assert container.variable(name).isidentifier() and "." not in name


def test_hyperparameters_by_hand_may_be_named_as_in_the_config(tmp_path):
    lay_out(tmp_path, {"optimizer.lr": "0.001", "model-preset": "gpt2-xl", "steps": "3"})
    made = container.config(container.read(tmp_path))
    assert made["optimizer"] == {"lr": 0.001} and made["model"] == {"preset": "gpt2-xl"}
    assert made["steps"] == 3  # no table: refused by name when the config is read
