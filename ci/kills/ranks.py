"""The ranks of a run, forked from a process that has imported everything once: up in a second."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

PRELOADED = ["nearlinear.train.trainer", "ci.kills.preload"]
PATIENCE = 20.0
"""seconds that ranks which have lost one have to end by themselves"""


class Ranks:
    """All ranks of one start of a run; what they say goes to the file ``log``.

    Each calls ``work(rank, config)``, a function of a module.
    """

    def __init__(self, count: int, config: dict, log: Path, work: Callable | None = None):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._victim: BaseProcess | None = None
        self.processes: list[BaseProcess] = [
            context.Process(target=be, args=(rank, count, port, work or train, config, str(log)))
            for rank in range(count)
        ]
        for process in self.processes:
            process.start()

    @property
    def running(self) -> bool:
        """Whether any is."""
        return any(process.is_alive() for process in self.processes)

    @property
    def complete(self) -> bool:
        """Whether all have ended, and well."""
        return all(process.exitcode == 0 for process in self.processes)

    def wait(self, seconds: float) -> None:
        """Until one has ended, or for so long."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and all(p.is_alive() for p in self.processes):
            time.sleep(0.005)

    def kill(self, rank: int) -> None:
        """kill -9, if it is still there; after `end` it is ``killed``."""
        self._victim = process = self.processes[rank]
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)

    @property
    def killed(self) -> bool:
        """Whether one has ended by `kill`."""
        return self._victim is not None and self._victim.exitcode == -signal.SIGKILL

    def end(self) -> float:
        """Have all end: by themselves, or in the end by force; the seconds that took."""
        begin = time.monotonic()
        for process in self.processes:
            process.join(max(0.0, begin + PATIENCE - time.monotonic()))
        took = time.monotonic() - begin
        for process in self.processes:
            process.kill()
            process.join()
        return took


def be(rank: int, count: int, port: int, work: Callable, config: dict, log: str) -> None:
    """One of ``count`` ranks, from beginning to end."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    work(rank, config)


def train(rank: int, config: dict) -> None:
    from nearlinear import runtime
    from nearlinear.train.trainer import Trainer

    Trainer(config).fit()
    runtime.shutdown()
