"""Rank processes of a job: command line, environment and completion order."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence

from ci.emulation.cluster.namespaces import END_WITH_PARENT


class RankFailed(RuntimeError):
    """A rank ended before its job; its own messages are on stderr."""


class Rank(subprocess.Popen):
    """A running rank: a Popen with ``rank`` and ``node``; ``pid`` is that of the command itself."""

    def __init__(self, command: Sequence[str], *, rank: int, node: int, **popen):
        self.rank = rank
        self.node = node
        super().__init__(command, **popen)

    def __str__(self) -> str:
        return f"node{self.node} rank{self.rank}"

    def stop(self) -> None:
        """Freeze the process with SIGSTOP; its connections stay open."""
        self.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue a frozen process with SIGCONT."""
        self.send_signal(signal.SIGCONT)


def command_on_node(
    holder: int, command: Sequence[str], cwd: str | os.PathLike | None
) -> list[str]:
    """Return the command line that runs ``command`` on the node of the process ``holder``.

    Each program of the chain replaces the previous one (exec), so that the pid stays the same.
    """
    enter = ["nsenter", f"--target={holder}", "--net", "--mount", "--uts", "--ipc"]
    # Entering a mount namespace changes the working directory to its root.
    folder = ["env", f"--chdir={os.fspath(cwd or os.getcwd())}"]
    return [*END_WITH_PARENT, *enter, *folder, *command]


def rank_environment(
    rank: int, ranks_per_node: int, nodes: int, address: str, port: int
) -> dict[str, str]:
    """Return this process's environment with torchrun's variables for ``rank``."""
    node, local_rank = divmod(rank, ranks_per_node)
    variables = {
        "RANK": rank,
        "WORLD_SIZE": nodes * ranks_per_node,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": ranks_per_node,
        "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": nodes,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": "eth0",
    }
    variables = {name: str(value) for name, value in variables.items()}
    return {"OMP_NUM_THREADS": "1", **os.environ, **variables}


def as_completed(ranks: Sequence[Rank], timeout: float | None = None) -> Iterator[Rank]:
    """Yield ranks as they end; stop after ``timeout`` seconds."""
    deadline = None if timeout is None else time.monotonic() + timeout
    with selectors.DefaultSelector() as running:
        try:
            for rank in ranks:
                if rank.returncode is not None:
                    yield rank
                else:
                    running.register(os.pidfd_open(rank.pid), selectors.EVENT_READ, rank)
            while running.get_map():
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                ready = running.select(left)
                if not ready:
                    return
                for key, _ in ready:
                    running.unregister(key.fd)
                    os.close(key.fd)
                    key.data.wait()
                    yield key.data
        finally:
            for key in list(running.get_map().values()):
                os.close(key.fd)
