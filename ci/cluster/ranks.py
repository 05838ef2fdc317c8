"""The ranks of a job: where each one runs, the environment it sees, and in which order they end."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence

from ci.cluster.namespaces import END_WITH_PARENT


class RankFailed(RuntimeError):
    """A rank ended before its job did; its own words are on stderr."""


class Rank(subprocess.Popen):
    """A running rank: a Popen with ``rank`` and ``node``; its ``pid`` is the command's own."""

    def __init__(self, command: Sequence[str], *, rank: int, node: int, **popen):
        self.rank = rank
        self.node = node
        super().__init__(command, **popen)

    def __str__(self) -> str:
        return f"node{self.node} rank{self.rank}"

    def stop(self) -> None:
        """Freeze the process (SIGSTOP): alive, its connections open, and silent."""
        self.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a frozen process go on (SIGCONT)."""
        self.send_signal(signal.SIGCONT)


def inside(holder: int, command: Sequence[str], cwd: str | os.PathLike | None) -> list[str]:
    """``command`` as run on the node of process ``holder``, each step replacing the one before."""
    enter = ["nsenter", f"--target={holder}", "--net", "--mount", "--uts", "--ipc"]
    # To enter another mount namespace is to land in its root folder: go back to where we were.
    folder = ["env", f"--chdir={os.fspath(cwd or os.getcwd())}"]
    return [*END_WITH_PARENT, *enter, *folder, *command]


def environment(
    rank: int, ranks_per_node: int, nodes: int, address: str, port: int
) -> dict[str, str]:
    """What torchrun would tell rank ``rank``, on top of this process's own environment."""
    node, local_rank = divmod(rank, ranks_per_node)
    place = {
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
    place = {name: str(value) for name, value in place.items()}
    return {"OMP_NUM_THREADS": "1", **os.environ, **place}


def in_order_of_end(ranks: Sequence[Rank], timeout: float | None = None) -> Iterator[Rank]:
    """Yield each rank when it has ended; stop early when ``timeout`` seconds have passed."""
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
