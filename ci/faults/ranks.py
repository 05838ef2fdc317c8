"""Ranks of a run: forked from a server that has imported everything, or started as by launchers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

from nearlinear.distributed import rendezvous

from .places import HERE, Place

HOST = "127.0.0.1"
PRELOADED = ["nearlinear.train.trainer", "ci.faults.preload"]
EXIT_TIMEOUT = 20.0
"""Seconds in which ranks must end by themselves after losing a peer."""


class RankProcesses:
    """Processes of all ranks of a run.

    Args:
        count: Number of ranks.
        config: Configuration passed to ``work``.
        log: File to which the output of all ranks is appended.
        work: Importable function ``work(rank, config)``; `train` by default.
        place: Surroundings of the ranks.
        fresh: Start Python anew for each rank, which imports everything, as launchers do. Forked
            ranks start in a second.
    """

    def __init__(
        self,
        count: int,
        config: dict,
        log: Path,
        work: Callable | None = None,
        place: Place = HERE,
        fresh: bool = False,
    ):
        context = multiprocessing.get_context("spawn" if fresh else "forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.place = place
        self._store = rendezvous.serve_store(HOST, 0, all_local=True) if place.holds_store else None
        port = self._store.port if self._store else place.port() or free_port()
        self._victim: BaseProcess | None = None
        self.started = time.monotonic()
        arguments = (count, port, work or train, config, str(log), place)
        self.processes: list[BaseProcess] = [
            context.Process(target=run_rank, args=(rank, *arguments)) for rank in range(count)
        ]
        for process in self.processes:
            process.start()

    @property
    def running(self) -> bool:
        """True if any rank is alive."""
        return any(process.is_alive() for process in self.processes)

    @property
    def complete(self) -> bool:
        """True if all ranks ended with exit code 0."""
        return all(process.exitcode == 0 for process in self.processes)

    def wait_for_exit(self, seconds: float) -> None:
        """Wait until any rank ends, at most ``seconds``."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and all(p.is_alive() for p in self.processes):
            time.sleep(0.005)

    def wait_for_all(self, seconds: float, but_one: bool = False) -> None:
        """Wait until all ranks, or all but one, have ended, at most ``seconds``."""
        deadline = time.monotonic() + seconds
        while sum(p.is_alive() for p in self.processes) > but_one:
            if time.monotonic() > deadline:
                return
            time.sleep(0.005)

    def join_all_with(self, end: Callable[[BaseProcess], None]) -> None:
        """Call ``end`` for the ranks that are running, and wait for all."""
        for process in self.processes:
            if process.is_alive():
                end(process)
        self.join()

    def kill(self, rank: int) -> None:
        """Send SIGKILL to a rank if it is alive."""
        self._victim = process = self.processes[rank]
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill the ranks that are alive, and wait for all."""
        self.join_all_with(BaseProcess.kill)

    @property
    def killed(self) -> bool:
        """True if a rank ended by `kill`; valid after `join`."""
        return self._victim is not None and self._victim.exitcode == -signal.SIGKILL

    def join(self) -> float:
        """Wait for all ranks, kill those that do not end, and return the seconds waited."""
        begin = time.monotonic()
        for process in self.processes:
            process.join(max(0.0, begin + EXIT_TIMEOUT - time.monotonic()))
        waited = time.monotonic() - begin
        for process in self.processes:
            process.kill()
            process.join()
        return waited


def free_port() -> int:
    with socket.socket() as free:
        free.bind((HOST, 0))
        return free.getsockname()[1]


def run_rank(
    rank: int, count: int, port: int, work: Callable, config: dict, log: str, place: Place
) -> None:
    """Set up and run one of ``count`` ranks."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    place.enter(rank)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": place.address,
        "MASTER_PORT": str(port),
        **place.variables(rank),
    }
    if place.holds_store:
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    work(rank, config)


def train(rank: int, config: dict) -> None:
    from nearlinear.distributed import runtime
    from nearlinear.train.trainer import Trainer

    Trainer(config).fit()
    runtime.shutdown()
