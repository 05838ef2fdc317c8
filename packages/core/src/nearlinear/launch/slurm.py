"""Ranks that Slurm's srun has started, one task per rank, in the words torchrun uses."""

import re
from collections.abc import Mapping

from ..errors import ConfigError


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE and the rest for this task of an srun step; {} outside one.

    The first host of the step is the meeting point, at a port that follows the job's number.
    ``MASTER_ADDR`` and ``MASTER_PORT`` win where they are set. Raises ConfigError where nodes have
    different numbers of tasks: no layout fits them.
    """
    needed = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_ID")
    if any(name not in environment for name in needed) or int(environment["SLURM_NTASKS"]) < 2:
        return {}
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    nodes = int(environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES", 1))
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    if "," in tasks or int(environment["SLURM_NTASKS"]) % nodes:
        raise ConfigError(
            f"Slurm has started {environment['SLURM_NTASKS']} tasks on {nodes} nodes, {tasks} on "
            "each: ask for as many on every node, as in srun --ntasks-per-node 8"
        )
    here = "127.0.0.1" if nodes == 1 else first_host(hosts)
    port = str(20000 + int(environment.get("SLURM_JOB_ID", 0)) % 20000)
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_NTASKS"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(int(environment["SLURM_NTASKS"]) // nodes),
        "MASTER_ADDR": environment.get("MASTER_ADDR", here),
        "MASTER_PORT": environment.get("MASTER_PORT", port),
    }


def first_host(nodelist: str) -> str:
    """The first of Slurm's compressed host names: ``gpu[07-12,20],cpu1`` gives ``gpu07``."""
    first = re.match(r"(\[[^\]]*\]|[^,\[])*", nodelist)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)
