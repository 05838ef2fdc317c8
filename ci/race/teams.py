"""Teams of processes that wait for their turn: all contestants that can share processes are one.

All teams live on one cluster at once, so contestants take turns step by step and whatever disturbs
the machine meets all of them. A team that waits sleeps in a broadcast.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from ci.cluster import Cluster, RankFailed, in_order_of_end

from . import peers
from .contestants import ENTRIES
from .plan import Plan

ROOT = Path(__file__).resolve().parents[2]


class Team:
    """The ranks of some contestants, started on every node of ``cluster``."""

    def __init__(self, cluster: Cluster, plan: Plan, names: list[str]):
        self.names = names
        python = peers.python_with(ENTRIES[names[0]].requires)
        # An environment of its own finds the rest itself, behind what it has.
        path = [str(ROOT), *(filter(None, sys.path) if python == sys.executable else [])]
        self.ranks = cluster.start(
            [python, "-W", "ignore", "-m", "ci.race.rank", plan.to_json(), *names],
            plan.ranks_per_node,
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

    def await_ready(self) -> None:
        self._answer("ready")

    def turn(self, contestant: str, step: int, traced: bool = False) -> dict:
        """One optimizer step of one contestant; what its rank 0 measured, or traced."""
        turn = {"contestant": contestant, "step": step, "traced": traced}
        self.leader.stdin.write(json.dumps(turn) + "\n")
        self.leader.stdin.flush()
        return self._answer("seconds")

    def _answer(self, key: str) -> dict:
        for line in self.leader.stdout:
            if line.startswith("{"):
                found = json.loads(line)
                if key in found:
                    return found
        failed = next((r for r in in_order_of_end(self.ranks, 10) if r.returncode), self.leader)
        raise RankFailed(f"{failed} of {', '.join(self.names)} ended with {failed.returncode}")

    def end(self) -> None:
        self.leader.stdin.close()
        for _ in in_order_of_end(self.ranks, 20):
            pass


def teams_of(names: Iterable[str]) -> list[list[str]]:
    """Contestants that can share processes: those with the same needs and default backend."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in names:
        entry = ENTRIES[name]
        groups.setdefault((entry.requires, entry.default_backend), []).append(name)
    return list(groups.values())
