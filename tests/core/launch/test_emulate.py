"""Emulated SageMaker hosts: they get the files of a training container, and train."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nearlinear.checkpoint import save
from nearlinear.errors import ConfigError
from nearlinear.launch import local, spec
from nearlinear.launch.sagemaker import container, emulate
from nearlinear.launch.sagemaker.build_request import render_request
from tests.support.command_line import end_after

TOKENS = {"fsx": "fs-0123456789abcdef0", "directory": "/abcdefgh/tokens"}


def request_of(run, **job):
    data = run | {"job": {"nodes": 2, "inputs": {"train": TOKENS}} | job}
    return render_request(*spec.load(data), "small-1", "s3://bucket/small-1")


def job_table(**job) -> dict:
    """Return a job table without problems."""
    return {
        "image": "123456789012.dkr.ecr.us-west-2.amazonaws.com/nearlinear:2.13",
        "role": "arn:aws:iam::123456789012:role/nearlinear",
        "output": "s3://bucket/output",
        "inputs": {"train": TOKENS},
        "subnets": ["subnet-0123456789abcdef0"],
        "security_groups": ["sg-0123456789abcdef0"],
    } | job


@pytest.fixture
def stand_ins(token_folder, tmp_path):
    code = tmp_path / "code"
    code.mkdir()
    return {"fs-0123456789abcdef0/abcdefgh/tokens": token_folder,
            "s3://bucket/small-1/input/code": code}  # fmt: skip


@pytest.mark.slow
def test_failure_is_written_to_the_failure_file(small_run, stand_ins, tmp_path):
    del small_run["data"]["path"]
    small_run["parallel"] = {"hybrid_shard_degree": 3}
    assert emulate.run_emulated(request_of(small_run), tmp_path / "job", stand_ins, 0, 2) == 2
    failures = [path.read_text() for path in Path(tmp_path, "job").glob("*/output/failure")]
    assert failures and all("hybrid_shard_degree = 3" in why for why in failures)


@pytest.mark.slow
def test_interrupted_job_resumes_from_copied_checkpoints(small_run, token_folder, tmp_path):
    del small_run["data"]["path"], small_run["run"]["folder"]
    small_run["parallel"] = {"sharded_data_parallel_degree": 2}
    small_run["train"] |= {"steps": 400, "eval_every": 0, "sample_tokens": 0}
    small_run["job"] = job_table(nodes=2, checkpoints="s3://bucket/kept")
    config = tmp_path / "run.json"
    config.write_text(json.dumps(small_run))
    kept_folder = tmp_path / "bucket"
    kept_folder.mkdir()

    def launched(folder: str, *settings: str) -> subprocess.Popen:
        stand_ins = [f"fs-0123456789abcdef0/abcdefgh/tokens={token_folder}",
                     f"s3://bucket/kept={kept_folder}"]  # fmt: skip
        words = ["launch", str(config), "--place", "emulate", "--folder", str(tmp_path / folder)]
        words += ["--hosts", "2", "--ranks", "1"]
        words += [word for one in stand_ins for word in ("--stand-in", one)]
        words += [word for one in settings for word in ("--set", one)]
        return subprocess.Popen(
            [sys.executable, "-m", "nearlinear.cli", *words],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    running = launched("first")
    metrics = tmp_path / "first" / "algo-1" / "output" / "data" / "metrics.jsonl"
    said = end_after(running, metrics, 3)
    assert running.returncode == 128 + signal.SIGTERM, said
    [done] = save.steps(kept_folder)
    hosts = [tmp_path / "first" / f"algo-{number}" / "checkpoints" for number in (1, 2)]
    assert not any(
        save.steps(host) for host in hosts
    )  # each host has half of the shards: only S3 has all

    resumed = launched("second", f"train.steps={done + 2}")
    said, _ = resumed.communicate(timeout=150)
    assert resumed.returncode == 0, said
    assert f"resumed after step {done}" in said
    first, second = (tmp_path / "second" / f"algo-{number}" / "output" for number in (1, 2))
    rows = (first / "data" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [done + 1, done + 2]
    assert "hybrid_shard_degree = 2" in (first / "data" / "config.toml").read_text()
    assert not list((second / "data").iterdir())
    assert not (first / "failure").exists()


def test_input_without_stand_in_is_rejected(small_run, tmp_path):
    with pytest.raises(ConfigError, match="--stand-in fs-0123456789abcdef0/abcdefgh/tokens=FOLDER"):
        emulate.run_emulated(request_of(small_run), tmp_path, {}, 0, 1)


def test_script_variables_match_the_container(small_run, tmp_path, monkeypatch):
    found = request_of(small_run | {"parallel": {"bf16": True}})
    names = ["algo-1", "algo-2"]
    emulate.write_host_files(
        tmp_path, found, names, "algo-2", {"train": tmp_path, "sm_drivers": None}
    )
    monkeypatch.delenv("SM_MASTER_ADDR", raising=False)
    here = container.read_inputs(tmp_path)
    seen = container.script_variables(here)
    assert json.loads(seen["SM_HOSTS"]) == names and seen["SM_CURRENT_HOST"] == "algo-2"
    assert seen["SM_NUM_GPUS"] == "8" and seen["SM_MASTER_ADDR"] == "algo-1"
    assert seen["SM_CHANNEL_TRAIN"] == str(tmp_path / "input" / "data" / "train")
    assert json.loads(seen["SM_HP_MP_PARAMETERS"]) == {"bf16": True}
    assert seen["SM_HP_OPTIMIZER_WARMUP_STEPS"] == "2"
    assert os.access(tmp_path / "input" / "data" / "sm_drivers" / "sm_train.sh", os.X_OK)
    assert container.local_ranks(here) == local.LocalRanks(
        8, num_hosts=2, host_index=1, rendezvous="algo-1:7777"
    )
