"""Elastic torchrun: after the loss of a node, the other node resumes from the last checkpoint."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import nearlinear as nl
from nearlinear.checkpoint import save
from nearlinear.config import train as train_config
from nearlinear.errors import ConfigError
from nearlinear.train import preflight
from tests.support.command_line import write


class Node:
    """Simulated node: torchrun and the ranks that it starts."""

    def __init__(self, port: int, config: Path, log: Path, has_rendezvous: bool = False):
        self.log = log
        rendezvous_options = "last_call_timeout=6,keep_alive_interval=1,keep_alive_max_attempt=6"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2",
            "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d",
            "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "elastic",
            "--rdzv-conf", f"{rendezvous_options},is_host={has_rendezvous}",
            "-m", "nearlinear.cli", "train", str(config),
        ]  # fmt: skip
        with log.open("wb") as output:
            self.launcher = subprocess.Popen(
                command, stdout=output, stderr=output, env=os.environ | {"OMP_NUM_THREADS": "1"}
            )

    @property
    def running(self) -> bool:
        return self.launcher.poll() is None

    def die(self) -> None:
        """Kill the launcher and its ranks without notice, as in a power failure."""
        number = self.launcher.pid
        ranks = Path(f"/proc/{number}/task/{number}/children").read_text().split()
        for process in (number, *map(int, ranks)):
            os.kill(process, signal.SIGKILL)
        self.launcher.wait()


def read_metrics(config: dict) -> list[dict]:
    path = Path(config["run"]["folder"], "metrics.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks of a launcher in /proc")
def test_run_continues_with_same_samples_and_losses_after_node_loss(small_run, tmp_path):
    """Compare batches and losses of every step with an uninterrupted run."""
    small_run["batch"] = {"micro_batch_size": 1, "sequences": 8}
    small_run["train"] |= {"steps": 24, "eval_sequences": 0, "sample_tokens": 0}
    expected = small_run | {"run": small_run["run"] | {"folder": str(tmp_path / "expected")}}
    nl.spmd.run(run_to_completion, 2, args=(expected,))
    small_run["checkpoint"] = {"folder": str(tmp_path / "kept"), "every": 2}
    small_run["run"]["memory_report"] = False
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = write(small_run, tmp_path)
    nodes = []
    try:
        nodes += [Node(port, config, tmp_path / "log-0", has_rendezvous=True)]
        nodes += [Node(port, config, tmp_path / "log-1")]
        wait_until(lambda: save.steps(tmp_path / "kept"), *nodes)
        nodes[1].die()
        wait_until(lambda: not nodes[0].running, nodes[0])
    finally:
        for node in nodes:
            if node.running:
                node.die()
    log = nodes[0].log.read_text()
    assert nodes[0].launcher.returncode == 0, log
    assert "24 steps of 256 tokens by 2 ranks" in log, log
    assert "24 steps of 256 tokens by 1 ranks" in log and "resumed after step" in log, log
    found, reference = read_metrics(small_run), read_metrics(expected)
    assert [row["batch_id"] for row in found] == [row["batch_id"] for row in reference]
    losses = [row["loss"] for row in reference]
    assert [row["loss"] for row in found] == pytest.approx(losses, abs=1e-5)


def wait_until(condition, *nodes: Node, seconds: float = 200) -> None:
    """Wait for ``condition``. Fail with the logs of the nodes after the timeout."""
    deadline = time.monotonic() + seconds
    while not condition():
        in_time = time.monotonic() < deadline and nodes[0].running
        assert in_time or condition(), "\n".join(node.log.read_text() for node in nodes)
        time.sleep(0.01)


def run_to_completion(rank: int, config: dict):
    return nl.Trainer(config).fit()


@pytest.mark.parametrize(
    ("parallel", "ranks", "message"),
    [
        (
            {"hybrid_shard_degree": 4},
            6,
            r"hybrid_shard_degree = 4 .* 6.*allowed are 1, 2, 3, 6",
        ),
        (
            {"tensor_parallel_degree": 2},
            3,
            r"tensor_parallel_degree = 2 .* 3.*allowed are 1, 3",
        ),
        ({}, 3, r"batch.sequences = 8 is not a multiple of .* 1 x 3: .*the number of ranks"),
    ],
)
def test_layout_error_lists_degrees_allowed_for_remaining_ranks(
    small_run, parallel, ranks, message
):
    small_run |= {"parallel": parallel, "batch": {"micro_batch_size": 1, "sequences": 8}}
    with pytest.raises(ConfigError, match=message):
        preflight.check_run(train_config.load(small_run), ranks)
