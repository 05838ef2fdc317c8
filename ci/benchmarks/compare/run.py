"""Run a comparison: all systems on one cluster, one step of each in turn.

Systems with the same requirements and default backend share processes. All processes live on one
cluster at the same time and wait in a broadcast, so that a disturbance of the machine affects every
system.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from ci.emulation.cluster import Cluster, RankFailed, as_completed

from . import peers, report
from .config import CompareConfig
from .systems import SYSTEMS

ROOT = Path(__file__).resolve().parents[3]


def run_comparison(config: CompareConfig, timelines: bool = False) -> list[dict]:
    """Return the record of every step, warm-up included.

    Args:
        config: The comparison.
        timelines: Run one more step of each system and record its timeline (``spans``).

    Raises:
        ClusterError: If the cluster cannot be created.
        PeerMissing: If a library cannot be installed.
        RankFailed: If a rank ends early.
    """
    records = []
    with Cluster(config.nodes, config.rate) as cluster:
        workers = [WorkerGroup(cluster, config, names) for names in group_systems(config.systems)]
        for group in workers:
            group.wait_until_ready()
        group_of = {name: group for group in workers for name in group.names}
        modes = ["warm-up"] * config.warm_up + ["timed"] * config.steps
        modes += ["traced"] * timelines + ["memory"] * config.memory
        for step, mode in enumerate(modes):
            for name in config.systems:
                record = group_of[name].run_step(name, step, mode)
                records.append({**record, "timed": mode == "timed"})
                print(report.format_record(records[-1]), flush=True)
        for group in workers:
            group.shut_down()
    return records


class WorkerGroup:
    """Rank processes of some systems, on every node of ``cluster``."""

    def __init__(self, cluster: Cluster, config: CompareConfig, names: list[str]):
        self.names = names
        python = peers.python_with(SYSTEMS[names[0]].requires)
        # An environment of its own has a .pth file that adds the packages of this one.
        path = [str(ROOT), *(filter(None, sys.path) if python == sys.executable else [])]
        module = f"{__package__}.rank"
        self.ranks = cluster.start(
            [python, "-W", "ignore", "-m", module, config.to_json(), *names],
            config.ranks_per_node,
            env={
                "PYTHONPATH": os.pathsep.join(path),
                "OMP_NUM_THREADS": "1",
                "DS_ACCELERATOR": "cpu",
                "HF_HUB_OFFLINE": "1",
                "KINETO_LOG_LEVEL": "9",
                "TORCH_CPP_LOG_LEVEL": "ERROR",
                "TRANSFORMERS_VERBOSITY": "error",
            },
            stdin=lambda rank: subprocess.DEVNULL if rank else subprocess.PIPE,
            stdout=lambda rank: subprocess.DEVNULL if rank else subprocess.PIPE,
            text=True,
        )
        self.leader = self.ranks[0]

    def wait_until_ready(self) -> None:
        self._read_answer("ready")

    def run_step(self, system: str, step: int, mode: str = "timed") -> dict:
        """Run one optimizer step of one system and return the record of rank 0."""
        request = {"system": system, "step": step, "mode": mode}
        self.leader.stdin.write(json.dumps(request) + "\n")
        self.leader.stdin.flush()
        return self._read_answer("seconds")

    def _read_answer(self, key: str) -> dict:
        for line in self.leader.stdout:
            if line.startswith("{"):
                answer = json.loads(line)
                if key in answer:
                    return answer
        failed = next((r for r in as_completed(self.ranks, 10) if r.returncode), self.leader)
        raise RankFailed(f"{failed} of {', '.join(self.names)} ended with {failed.returncode}")

    def shut_down(self) -> None:
        self.leader.stdin.close()
        for _ in as_completed(self.ranks, 20):
            pass


def group_systems(names: Iterable[str]) -> list[list[str]]:
    """Group systems that can share processes: same requirements and default backend."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in names:
        system = SYSTEMS[name]
        groups.setdefault((system.requires, system.default_backend), []).append(name)
    return list(groups.values())
