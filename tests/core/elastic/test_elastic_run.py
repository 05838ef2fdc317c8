"""``nearlinear train`` with replicas: the losses of one job, and new starts of a lost replica."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import nearlinear as nl
from nearlinear.config import schema, train
from nearlinear.elastic.job import peer_addresses
from nearlinear.errors import ConfigError
from nearlinear.launch import replicas


def train_plainly(rank: int, config: dict) -> None:
    nl.Trainer(config).fit()


def rows_of(folder: Path) -> list[dict]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


@pytest.mark.slow
def test_losses_equal_those_of_one_job_though_a_replica_is_lost(small_run, tmp_path):
    """Float16 without dropout; the first steps overflow; one of four ranks is killed."""
    small_run = without_dropout(small_run, 16)
    small_run["parallel"] = {
        "fp16": True, "init_scale": 2.0**40, "scale_factor": 2.0**8, "delayed_shift": 1
    }  # fmt: skip
    plain = small_run | {"run": small_run["run"] | {"folder": str(tmp_path / "plain")}}
    plain["parallel"] = small_run["parallel"] | {"hybrid_shard_degree": 2}
    nl.spmd.run(train_plainly, 4, args=(plain,))
    lose_a_rank_in_training(small_run, tmp_path, 4)
    check_rows(Path(small_run["run"]["folder"]), tmp_path / "plain")


@pytest.mark.gpu
def test_replicas_share_a_gpu_and_one_is_lost(small_run, tmp_path):
    """Two replicas of a rank on one GPU, and a job of one rank with twice the micro-batches."""
    small_run = without_dropout(small_run, 8)
    plain = small_run | {"run": small_run["run"] | {"folder": str(tmp_path / "plain")}}
    nl.spmd.run(train_plainly, 1, args=(plain,))
    lose_a_rank_in_training(small_run, tmp_path, 2)
    check_rows(Path(small_run["run"]["folder"]), tmp_path / "plain")


def without_dropout(config: dict, sequences: int) -> dict:
    config["batch"] = {"micro_batch_size": 2, "sequences": sequences}
    config["model"]["overrides"] |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)
    config["train"] |= {"steps": 10, "eval_every": 0, "sample_tokens": 0}
    return config


def lose_a_rank_in_training(config: dict, folder: Path, ranks: int) -> None:
    """Train with two replicas, of which one loses a rank and is started again.

    The other replica stands still until then: its last steps take less time than the launcher needs
    to see the end of a rank.
    """
    config = config | {"elastic": {"replicas": 2, "silence_seconds": 60.0},
                       "checkpoint": {"folder": "auto"}}  # fmt: skip
    file = folder / "run.toml"
    file.write_text(schema.to_toml(train.load(config)))
    command = [sys.executable, "-m", "nearlinear.cli", "train", str(file), "--nproc", str(ranks)]
    told = folder / "output"
    with told.open("w") as stream:
        job = subprocess.Popen(command, stderr=subprocess.STDOUT, stdout=stream)

    def wait_until(reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not reached():
            assert job.poll() is None and time.monotonic() < deadline, told.read_text()
            time.sleep(0.02)

    try:
        wait_until(lambda: len(rows_of(Path(config["run"]["folder"]))) >= 3)
        lost, other = (children(each) or [each] for each in children(job.pid)[:2])
        for rank in other:
            os.kill(rank, signal.SIGSTOP)
        os.kill(lost[-1], signal.SIGKILL)
        wait_until(lambda: "starting replica 0 again" in told.read_text())
        for rank in other:
            os.kill(rank, signal.SIGCONT)
        job.wait(timeout=180)
    finally:
        job.kill()
    output = told.read_text()
    assert job.returncode == 0, output
    assert "replica 0 is lost in step" in output and "done: 10 steps" in output


def check_rows(folder: Path, plain: Path) -> None:
    """Compare the metrics of a run in ``folder`` that lost a replica with those of one job."""
    rows = rows_of(folder)
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert min(row["replicas"] for row in rows) == 1
    for row, other in zip(rows, rows_of(plain), strict=True):
        assert row["batch_id"] == other["batch_id"]
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert row.get("loss_scale") == other.get("loss_scale")
    assert (folder / "checkpoints" / "step-00000010").is_dir()


def children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replicas": 1}, "at least 2"),
        ({"replicas": 2, "min_replicas": 3}, "min_replicas = 3 is not between 1"),
        ({"replicas": 2, "silence_seconds": 0.0}, "must be positive"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ConfigError, match=message):
        train.load({"elastic": settings})


def test_jobs_on_one_machine_choose_other_ports(monkeypatch):
    first = replicas.free_ports(4)
    with socket.create_server(("127.0.0.1", first + 2)):
        second = replicas.free_ports(4)
    assert set(range(first, first + 4)).isdisjoint(range(second, second + 4))
    monkeypatch.setattr(os, "getpid", lambda: 10**6 + 1)
    assert replicas.free_ports(4) != first
    monkeypatch.setenv("NEARLINEAR_REPLICA_PORT", "20100")
    assert peer_addresses([], 2, 0) == [("127.0.0.1", 20100), ("127.0.0.1", 20101)]
    assert peer_addresses([], 2, 21000)[1] == ("127.0.0.1", 21001)
    assert peer_addresses(["a", "b:5"], 2, 0) == [("a", 29700), ("b", 5)]


def refusal(rank: int, config: dict) -> str:
    try:
        nl.Trainer(config)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"parallel": {"shard_optimizer_state": True}}, "shard_optimizer_state cannot be combined"),
        ({"train": {"two_hop": False}}, "train.two_hop = false cannot be combined"),
        ({}, "NEARLINEAR_REPLICA is '': set it to the index of the replica, 0 to 1"),
    ],
)
def test_unsupported_jobs_are_refused(small_run, table, message):
    config = small_run | {"elastic": {"replicas": 2}} | table
    (told,) = nl.spmd.run(refusal, 1, args=(config,))
    assert message in told
