"""Rank processes that outlive a test: started once, used by many cases, replaced after a failure.

`Pool.run` calls a module-level function on the first n ranks with a new default group; `Pool.start`
lets a test kill or stop ranks meanwhile. A case that exceeds its time limit is ended, with the
stacks of its ranks in the error. Ranks are separate processes with one compute thread each.
"""

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Pipe, wait
from pathlib import Path

import torch.distributed as dist

from tests.collectives.worker import Call, Outcome, receive, send

# Backend under test. With gloo, most of these tests check c10d's own backend: a failure there is an
# error of the test, or a limit of gloo that the test should skip.
BACKEND = os.environ.get("TEST_BACKEND", "nearlinear")
SERVER = "from tests.collectives.worker import main"
GRACE = 5.0  # seconds for the other ranks of a case to notice a failed one


def open_store() -> dist.TCPStore:
    """Create a store for the ranks of this machine.

    It listens on IPv4 only: torch's own socket sees peers as ::ffff:127.0.0.1 and resolves that
    name by DNS, which can take seconds.
    """
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    handle = listening.detach()
    return dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=handle
    )


class RanksFailed(AssertionError):
    """Ranks of a case raised, died or hung. The message has their errors, stacks and output."""


class Rank:
    """A forked process and the connection to it."""

    def __init__(self, pool: "Pool", number: int):
        ours, theirs = Pipe()
        self.output = pool.folder / f"rank-{number}-{next(pool.numbers)}"
        request = str(self.output).encode()
        socket.send_fds(pool.control, [request], [theirs.fileno()])
        theirs.close()
        self.connection = ours
        self.pid = int(pool.control.recv(64))
        self.shown = 0

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def end(self) -> None:
        self.signal(signal.SIGKILL)
        self.connection.close()

    def printed(self) -> str:
        """Return the output of the process since the last call."""
        if not self.output.exists():
            return ""
        text = self.output.read_bytes()[self.shown :]
        self.shown += len(text)
        return text.decode(errors="replace")


class Case:
    """A call in flight on several ranks."""

    def __init__(self, pool: "Pool", ranks: list[Rank], name: str):
        self.pool, self.ranks, self.name = pool, ranks, name
        self.outcomes: dict[int, Outcome] = {}

    def kill(self, rank: int, number: int = signal.SIGKILL, reap: bool = False) -> float:
        """Signal a rank; ``reap`` also reaps the zombie. Returns time.monotonic() of the signal."""
        now = time.monotonic()
        os.kill(self.ranks[rank].pid, number)
        if reap:
            while self.ranks[rank].pid not in self.pool.reap():
                time.sleep(0.001)
        return now

    def heard(self, key: str, ranks=None, timeout: float = 60.0) -> None:
        """Wait until all ranks (or ``ranks``) have called ``worker.announce(key)``."""
        wanted = range(len(self.ranks)) if ranks is None else ranks
        store = dist.PrefixStore(f"{self.name}/", self.pool.store)
        keys = [f"{key}/{rank}" for rank in wanted]
        end = time.monotonic() + timeout
        while not store.check(keys):
            if time.monotonic() > end:
                raise RanksFailed(f"no word of {key!r} in {timeout:g} s\n{self.stacks()}")
            time.sleep(0.002)

    def collect(self, timeout: float, ranks=None, grace: float | None = None) -> bool:
        """Wait for the outcomes of ``ranks`` (default: all); False if some are missing.

        With ``grace``, wait no longer than that after the first failure.
        """
        wanted = set(range(len(self.ranks)) if ranks is None else ranks)
        end = time.monotonic() + timeout
        while missing := wanted - self.outcomes.keys():
            left = end - time.monotonic()
            if left <= 0:
                return False
            places = {self.ranks[rank].connection: rank for rank in missing}
            for connection in wait(places, timeout=left):
                outcome = self._receive(connection)
                self.outcomes[places[connection]] = outcome
                if outcome.failed and grace is not None:
                    end = min(end, time.monotonic() + grace)
        return True

    @staticmethod
    def _receive(connection) -> Outcome:
        try:
            return receive(connection)
        except (EOFError, ConnectionResetError):
            return Outcome(error="the process ended")

    def stacks(self) -> str:
        """Return the output of every rank, and the stacks of those without an outcome."""
        for number, rank in enumerate(self.ranks):
            if number not in self.outcomes:
                rank.signal(signal.SIGCONT)
                rank.signal(signal.SIGUSR1)
        time.sleep(0.5)
        return "\n".join(self._report(number) for number in range(len(self.ranks)))

    def _report(self, number: int) -> str:
        outcome = self.outcomes.get(number)
        if outcome is None:
            state = "has not come back; its stacks are the last lines of its output"
        elif outcome.failed:
            state = f"failed: {outcome.traceback or outcome.error}"
        else:
            state = f"returned {str(outcome.value)[:500]}"
        printed = self.ranks[number].printed()[-6000:]
        return f"--- rank {number} {state}\n{printed}".rstrip()

    def close(self, replace: bool = False) -> None:
        """Let the ranks leave their groups together; replace those of a failed case."""
        whole = len(self.outcomes) == len(self.ranks)
        if replace or not whole or any(outcome.failed for outcome in self.outcomes.values()):
            self.pool.replace(self.ranks)
        elif not self._leave(timeout=20):
            stacks = self.stacks()
            self.pool.replace(self.ranks)
            raise RanksFailed(f"destroy_process_group() failed or did not end\n{stacks}")

    def _leave(self, timeout: float) -> bool:
        for rank in self.ranks:
            send(rank.connection, None)
        end = time.monotonic() + timeout
        for number, rank in enumerate(self.ranks):
            if not rank.connection.poll(max(0.0, end - time.monotonic())):
                del self.outcomes[number]
                return False
            answer = self._receive(rank.connection)
            if answer is not None:
                self.outcomes[number] = answer
                return False
        return True


class Pool:
    """Up to 8 ranks on this machine, forked on demand."""

    def __init__(self):
        self.numbers = itertools.count()
        self._folder = tempfile.TemporaryDirectory(prefix="collectives-ranks-")
        self.folder = Path(self._folder.name)
        self.store = open_store()
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join(filter(None, sys.path))
        self.server = subprocess.Popen(
            [sys.executable, "-c", f"{SERVER}; main({theirs.fileno()})"],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self.ranks: list[Rank] = []

    def start(
        self, function, *args, ranks: int, backend: str | None = BACKEND, timeout: float = 60.0
    ) -> Case:
        """Call ``function(rank, *args)`` on every rank, and return at once.

        ``backend`` is that of the default group, with ``timeout`` seconds; None creates no group.
        """
        while len(self.ranks) < ranks:
            self.ranks.append(Rank(self, len(self.ranks)))
        case = Case(self, self.ranks[:ranks], f"case-{next(self.numbers)}")
        for number, rank in enumerate(case.ranks):
            rank.printed()
            call = Call(function, args, number, ranks, self.store.port, case.name, backend, timeout)
            send(rank.connection, call)
        return case

    def run(
        self,
        function,
        *args,
        ranks: int,
        backend: str | None = BACKEND,
        timeout: float = 60.0,
        limit: float | None = None,
        discard: bool = False,
    ) -> list:
        """Call `start` and return the values of all ranks in rank order, or raise RanksFailed.

        A case that takes longer than ``limit`` seconds (default: ``timeout``) is ended. With
        ``discard``, the processes are not reused.
        """
        case = self.start(function, *args, ranks=ranks, backend=backend, timeout=timeout)
        limit = timeout if limit is None else limit
        try:
            came_back = case.collect(limit, grace=GRACE)
            failed = [n for n, outcome in sorted(case.outcomes.items()) if outcome.failed]
            if failed or not came_back:
                why = f"ranks {failed} failed" if failed else f"not done within {limit:g} s"
                raise RanksFailed(f"{function.__name__} on {ranks} ranks: {why}\n{case.stacks()}")
        finally:
            case.close(replace=discard)
        return [case.outcomes[number].value for number in range(ranks)]

    def reap(self) -> dict[int, int]:
        self.control.send(b"reap")
        return {int(pid): code for pid, code in json.loads(self.control.recv(65536)).items()}

    def replace(self, ranks: list[Rank]) -> None:
        """End these ranks; later cases fork new ones on demand."""
        for rank in ranks:
            rank.end()
            self.ranks.remove(rank)
        self.reap()

    def close(self) -> None:
        for rank in self.ranks:
            rank.connection.close()
        self.control.close()
        self.server.kill()  # which ends the ranks
        self.server.wait()
        self._folder.cleanup()
