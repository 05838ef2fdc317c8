"""Start the replicas of an elastic job on one machine, and start lost ones again.

Each replica is a process of its own, ``nearlinear train`` with NEARLINEAR_REPLICA set, which starts
the ranks of the replica. On several machines a launcher of the cluster does the same. Free ports
are chosen here, so that one machine can run several jobs. They are not part of the run's config.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress

from .local import SHUTDOWN_TIMEOUT, CountedSignals

RESTART_DELAY = 1.0
"""Seconds between the end of a replica and its next start."""
END_GRACE = 20.0
"""Seconds in which all replicas end after the first one has, the figures of the run included."""
POLL = 0.05
PORTS = range(20000, 30000)
"""Ports of replicas on one machine, below those that the kernel gives to connections."""
USER_ERROR = 2
"""Exit code of a replica whose settings or data cannot be used."""


def free_ports(count: int) -> int:
    """Return the first of ``count`` free ports in a row; two jobs begin their search apart.

    A lost replica leaves its port free until it is started again, so that the kernel must not give
    it to a connection meanwhile.
    """
    start = PORTS[os.getpid() * count % (len(PORTS) - count)]
    for first in [*range(start, PORTS[-count], count), *range(PORTS[0], start, count)]:
        with ExitStack() as stack, suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise OSError(f"no {count} free ports in a row between {PORTS[0]} and {PORTS[-1]}")


def run_replicas(arguments: list[str], replicas: int, nproc: int, max_restarts: int) -> int:
    """Run ``nearlinear`` with ``arguments`` as ``replicas`` replicas; return the exit code.

    Args:
        arguments: Arguments of the command line.
        replicas: Number of replicas.
        nproc: Ranks of each.
        max_restarts: Starts of lost replicas before the job is given up.
    """
    command = [sys.executable, "-m", "nearlinear.cli", *arguments, "--nproc", str(nproc)]
    command += ["--launched-by", str(os.getpid())]

    chosen = {"NEARLINEAR_REPLICA_PORT": str(free_ports(replicas))}

    def start(replica: int) -> subprocess.Popen:
        own = {"NEARLINEAR_REPLICA": str(replica), "NEARLINEAR_FIRST_GPU": str(replica * nproc)}
        environment = {**chosen, **os.environ, **own}
        return subprocess.Popen(command, env=environment, process_group=0)

    with CountedSignals() as signals:
        running = {replica: start(replica) for replica in range(replicas)}
        try:
            return _supervise(running, start, signals, max_restarts)
        finally:
            for process in running.values():
                if process.poll() is None:
                    process.kill()
                    process.wait()


def _supervise(running, start, signals: CountedSignals, restarts_left: int) -> int:
    """Wait for the replicas in ``running``; see `run_replicas`."""
    due: dict[int, float] = {}
    codes: dict[int, int] = {}
    deadline, passed_on = float("inf"), 0
    while running:
        if 0 in codes.values() and deadline == float("inf"):
            deadline = time.monotonic() + END_GRACE  # a replica that starts now has no work
        if signals.count > passed_on:
            passed_on = signals.count
            number = signal.SIGKILL if signals.interrupts > 1 else signal.SIGTERM
            for process in running.values():
                process.send_signal(number)
            deadline = min(deadline, time.monotonic() + SHUTDOWN_TIMEOUT)
        if time.monotonic() > deadline:
            break
        for replica, process in list(running.items()):
            code = process.poll()
            if code is None:
                continue
            del running[replica]
            codes[replica] = code
            if code and not signals.count and 0 not in codes.values():
                if not running:
                    return _give_up(codes)
                if code != USER_ERROR:  # a new start has the same end
                    due[replica] = time.monotonic() + RESTART_DELAY
        for replica in [r for r, at in due.items() if time.monotonic() >= at]:
            del due[replica]
            if not running or 0 in codes.values() or signals.count:
                continue
            if not restarts_left:
                print(f"replica {replica} is not started again: elastic.max_restarts is reached",
                      file=sys.stderr)  # fmt: skip
                continue
            restarts_left -= 1
            print(f"starting replica {replica} again", file=sys.stderr, flush=True)
            running[replica] = start(replica)
        time.sleep(POLL)
    if signals.first:
        return 128 + signals.first
    return 0 if 0 in codes.values() else 1


def _give_up(codes: dict[int, int]) -> int:
    """Return the exit code of a job whose last replica has failed."""
    if set(codes.values()) == {USER_ERROR}:
        return USER_ERROR
    print("error: no replica is left; the next start resumes from the newest checkpoint",
          file=sys.stderr)  # fmt: skip
    return 1
