"""Local launcher: processes of ranks, variables of srun, and cleanup after failures."""

import base64
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

from nearlinear import cli
from nearlinear.checkpoint import save
from nearlinear.distributed import rendezvous
from nearlinear.errors import ConfigError
from nearlinear.launch import local, slurm
from nearlinear.launch.local import ExitStatus, LocalRanks


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
    return psutil.Process(job.pid).children()


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


class Payload:
    """A pickle that creates a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def listening(processes):
    """Return addresses on which the processes listen for TCP connections."""
    found = (c for p in processes for c in p.net_connections("tcp") if c.status == "LISTEN")
    return {(c.laddr.ip, c.laddr.port) for c in found}


def poison(port, text):
    """Write ``text`` to every key of the job's store that another program could know."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=10))
    keys = [key for key in store.list_keys() if "/" in key] if hasattr(store, "list_keys") else []
    for key in [*keys, "torch.rendezvous.nearlinear", "/torch.rendezvous.nearlinear"]:
        store.set(key, text)
    return keys


@pytest.mark.slow
def test_job_listens_on_loopback_and_unpickles_nothing_and_saves_itself_on_interrupt(
    small_run, tmp_path
):
    small_run["train"] |= {"steps": 100_000, "eval_every": 0, "eval_sequences": 0}
    small_run["checkpoint"] = {"folder": str(tmp_path / "kept")}
    small_run["run"]["memory_report"] = False
    path = tmp_path / "run.json"
    path.write_text(json.dumps(small_run))
    job = launch(path)
    ranks = ranks_of(job)
    assert len(ranks) == 2
    launcher = psutil.Process(job.pid)
    assert {ip for ip, _ in listening([launcher, *ranks])} == {"127.0.0.1"}
    [(_, port)] = listening([launcher])
    marker = tmp_path / "executed"
    poison(port, base64.b64encode(pickle.dumps(Payload(marker))).decode())
    poison(port, pickle.dumps(Payload(marker), protocol=0).decode())
    time.sleep(2.5)  # two heartbeats
    assert not marker.exists() and job.poll() is None
    job.send_signal(signal.SIGINT)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 128 + signal.SIGINT, output
    [done] = save.steps(tmp_path / "kept")
    assert output.splitlines()[-1].startswith(f"stopped: SIGTERM: stopped after step {done}")
    assert "Traceback" not in output and ended(ranks) and not marker.exists(), output


NAMESPACE = "nearlinear-test"


def ip(*arguments):
    return subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() or not shutil.which("ip"),
    reason="needs root and the command ip, to create a network namespace",
)
def test_store_is_unreachable_from_another_network_namespace():
    """The store of several machines is reachable through its own interface, and only there."""
    ip("netns", "add", NAMESPACE)
    try:
        for number in (1, 2):
            names = f"nlt{number}", f"nlp{number}"
            ip("link", "add", names[0], "type", "veth", "peer", "name", names[1])
            ip("link", "set", names[1], "netns", NAMESPACE)
            ip("addr", "add", f"10.251.{number}.1/24", "dev", names[0])
            ip("link", "set", names[0], "up")
            ip("-n", NAMESPACE, "addr", "add", f"10.251.{number}.2/24", "dev", names[1])
            ip("-n", NAMESPACE, "link", "set", names[1], "up")
        local = rendezvous.serve_store("127.0.0.1", 0, all_local=True)
        shared = rendezvous.serve_store("10.251.1.1", 0, all_local=False)
        reached = {
            (name, number)
            for name, store in (("local", local), ("shared", shared))
            for number in (1, 2)
            if reaches(f"10.251.{number}.1", store.port)
        }
        assert reached == {("shared", 1)}
    finally:
        ip("netns", "delete", NAMESPACE)


def reaches(host, port):
    """Return True if the namespace can connect."""
    program = f"import socket; socket.create_connection(({host!r}, {port}), 5)"
    command = ["ip", "netns", "exec", NAMESPACE, sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True).returncode == 0


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


@pytest.mark.parametrize("forked", [True, False])
def test_forked_ranks_and_new_interpreters_end_alike(forked, monkeypatch, capfd):
    monkeypatch.setattr(local, "_can_fork", lambda: forked)
    prepared = []

    def run(*arguments):
        launched = ["train", *arguments, "--launched-by", str(os.getpid())]
        return local.run_ranks(
            LocalRanks(2), "nearlinear.cli", launched, lambda: prepared.append(arguments)
        )

    assert run("--print-config") == ExitStatus(0)
    assert capfd.readouterr().out.count("[optimizer]") == 2
    refused = run("--set", "optimizer.lrr=1")
    assert refused.code == 2 and "unknown key 'lrr'" in refused.reason
    assert len(prepared) == (2 if forked else 0)
    assert "RANK" not in os.environ
