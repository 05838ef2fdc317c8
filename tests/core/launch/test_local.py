"""Local launcher: ranks through torchrun's API, variables of srun, and cleanup after failures."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from nearlinear import cli
from nearlinear.errors import ConfigError
from nearlinear.launch import slurm


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("gpu07", "gpu07"),
        ("gpu[07-12,20],cpu1", "gpu07"),
        ("a1,a2", "a1"),
        ("node[1,3].cluster", "node1.cluster"),
        ("rack[2-3]node[08,11-12],cpu1", "rack2node08"),
        ("127.0.0.[1-2]", "127.0.0.1"),
        ("", ""),
    ],
)
def test_first_host_of_a_slurm_node_list(nodelist, host):
    assert slurm.first_host(nodelist) == host


def test_srun_task_gets_rank_variables():
    step = {
        "SLURM_PROCID": "9",
        "SLURM_NTASKS": "16",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "gpu[03-04]",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_JOB_ID": "123",
    }
    assert slurm.rank_variables(step) == {
        "RANK": "9",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": "20123",
    }
    assert slurm.rank_variables(step | {"MASTER_ADDR": "10.0.0.1"})["MASTER_ADDR"] == "10.0.0.1"
    assert slurm.rank_variables(step | {"SLURM_NTASKS": "1"}) == {}
    assert slurm.rank_variables({}) == {}
    even = {"SLURM_STEP_TASKS_PER_NODE": "8(x2)"}
    assert slurm.rank_variables(step | even) == slurm.rank_variables(step)


@pytest.mark.parametrize(("tasks", "nodes", "each"), [(3, 2, "2,1"), (4, 2, "3,1"), (3, 2, "")])
def test_uneven_tasks_per_node_are_rejected(tasks, nodes, each):
    step = {
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": str(tasks),
        "SLURM_LOCALID": "0",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_TASKS_PER_NODE": each,
    }
    with pytest.raises(ConfigError, match=f"{tasks} tasks on {nodes} nodes.*ntasks-per-node"):
        slurm.rank_variables(step)


@pytest.fixture
def config(small_run, tmp_path):
    """Write a config file of a run that takes minutes unless it is stopped."""
    small_run["train"] |= {"steps": 100_000, "eval_sequences": 0}
    path = tmp_path / "run.json"
    path.write_text(json.dumps(small_run))
    return path


def launch(config, *arguments):
    command = [sys.executable, "-m", "nearlinear.cli", "train", str(config), "--nproc", "2"]
    return subprocess.Popen(
        [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ranks_of(job):
    """Return the rank processes after the first reported step."""
    for line in job.stdout:
        if line.startswith("step="):
            break
    children = psutil.Process(job.pid).children(recursive=True)
    return [p for p in children if "--launched-by" in p.cmdline()]


def ended(processes, seconds=20.0):
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    for process in alive:
        process.kill()
    return not alive


@pytest.mark.slow
def test_killed_rank_stops_the_job_and_is_reported(config):
    job = launch(config)
    ranks = ranks_of(job)
    assert len(ranks) == 2
    ranks[1].kill()
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 1
    assert "was killed by signal 9" in output and "error: rank" in output
    assert ended(ranks)


@pytest.mark.slow
def test_ranks_end_with_a_killed_launcher(config):
    job = launch(config)
    ranks = ranks_of(job)
    job.kill()
    job.wait()
    assert ended(ranks)
    job.stdout.close()


@pytest.mark.slow
def test_interrupt_stops_all_ranks(config):
    job = launch(config)
    ranks = ranks_of(job)
    job.send_signal(signal.SIGINT)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 128 + signal.SIGINT
    assert "stopped" in output.splitlines()[-1] and "Traceback" not in output, output
    assert ended(ranks)


@pytest.mark.slow
def test_rank_error_is_printed_once(small_run, tmp_path):
    """An error that only the ranks detect is printed once, by the launcher."""
    state = {"format": 1, "next_sample": 0, "seed": 7, "sequence_length": 32, "dataset": "x"}
    (tmp_path / "state.json").write_text(json.dumps({"step": 1, "loader": state}))
    path = tmp_path / "run.json"
    path.write_text(json.dumps(small_run))
    job = launch(path, "--set", f"data.resume={tmp_path}/state.json")
    output, _ = job.communicate(timeout=120)
    assert job.returncode == 2
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "cannot resume the data order" in errors[0]
    assert "Traceback" not in output


def test_externally_launched_rank_prefixes_its_errors(small_run, tmp_path, monkeypatch, capsys):
    small_run["data"]["path"] = str(tmp_path / "nowhere")
    path = tmp_path / "run.json"
    path.write_text(json.dumps(small_run))
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["train", str(path)]) == 2
    assert capsys.readouterr().err.startswith("[rank 1] error: no token shards at")


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "0", "WORLD_SIZE": "x"}, "WORLD_SIZE = 'x' in the environment"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "MASTER_ADDR is not"),
    ],
)
def test_incomplete_rank_variables_are_reported(small_run, tmp_path, variables, words):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(small_run))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MASTER_")}
    command = [sys.executable, "-m", "nearlinear.cli", "train", str(path)]
    start = time.monotonic()
    done = subprocess.run(
        command, env=environment | variables, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr
    assert time.monotonic() - start < 100
