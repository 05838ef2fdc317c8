"""Launcher of one machine: start its ranks, hold the job's store, and report the first failure.

On a machine without GPUs the launcher imports the libraries once and forks its ranks, because many
ranks then share few cores, and importing takes longer than a short run. With GPUs every rank is a
new interpreter, because CUDA does not survive a fork.

The ranks of one machine meet at a store on the loopback interface. Ranks of several machines meet
at a store in the launcher of the first one, on the interface of the rendezvous address. A signal to
the launcher reaches each rank once: ranks have process groups of their own, so that a terminal's
Ctrl-C does not reach them twice.
"""

from __future__ import annotations

import atexit
import gc
import io
import json
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import FrameType

from ..errors import Interrupted
from . import slurm
from .spec import TERMINATION_NOTICE

SHUTDOWN_TIMEOUT = TERMINATION_NOTICE - 10
"""Seconds that the ranks have after SIGTERM; the launcher needs a few of the notice itself."""
PEER_GRACE = 10.0
"""Seconds in which the other ranks may end by themselves after a failure, with their own report."""

STOPPING = b"stopping all ranks; Ctrl-C again stops them at once\n"
_POLL_INTERVAL = 0.05
_TOLD = (2, Interrupted.exit_code)
"""Exit codes whose message says everything: a user error, a stop that saved the run."""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True)
class LocalRanks:
    """The ranks that one machine of a job starts."""

    num_ranks: int
    """Processes on this machine."""
    num_hosts: int = 1
    """Machines of the job, each with the same number of ranks."""
    host_index: int = 0
    """Index of this machine."""
    rendezvous: str = ""
    """host:port on the first machine. A single machine finds a free port itself."""


@dataclass(frozen=True)
class ExitStatus:
    """Result of the ranks of one machine."""

    code: int
    """0: success; 2: user error; 1: any other failure; 128 and more: stopped by a signal."""
    reason: str = ""
    """One-line description of a failure."""


@dataclass(frozen=True)
class RankExit:
    """The end of one rank."""

    code: int
    """Exit code; negative: the signal that ended the rank."""
    message: str
    """Reason that the rank left with `process_exit.leave_error`, or an empty string."""
    by_peer: bool
    """True if the rank ended because it lost another rank."""
    time: float
    """Time of the end, in seconds since the epoch."""


def is_launched_rank() -> bool:
    """Return True if a launcher, torchrun, SageMaker or Slurm started this process as a rank.

    Translates the variables of a Slurm step to those of torchrun in ``os.environ``.
    """
    if "RANK" not in os.environ:
        os.environ.update(slurm.rank_variables(os.environ))
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def start_ranks(
    module: str, arguments: list[str], num_ranks: int, prepare: Callable[[], None] | None = None
) -> int:
    """Run ``python -m module arguments --launched-by PID`` as local ranks; return the exit code.

    A failing rank stops the others within seconds. The reason is printed to stderr. ``prepare``:
    see `run_ranks`.
    """
    arguments = [*arguments, "--launched-by", str(os.getpid())]
    status = run_ranks(LocalRanks(num_ranks), module, arguments, prepare)
    if status.code >= 128:
        print(f"stopped: {status.reason}" if status.reason else "stopped", file=sys.stderr)
    elif status.code == 2:
        print(f"error: {status.reason}", file=sys.stderr)
    elif status.code:
        print(
            f"error: {status.reason}; the other ranks were stopped, see the output above",
            file=sys.stderr,
        )
    return status.code


def run_ranks(
    ranks: LocalRanks,
    module: str,
    arguments: Sequence[str],
    prepare: Callable[[], None] | None = None,
) -> ExitStatus:
    """Run ``python -m module arguments`` as ``ranks`` and wait for all of them.

    SIGTERM and SIGINT reach the ranks as SIGTERM, on which they save the run and end. A second
    SIGINT kills them. ``prepare`` imports modules that forked ranks need.
    """
    from ..distributed.rendezvous import hold_store

    threads = max(1, (os.cpu_count() or 1) // ranks.num_ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    with (
        tempfile.TemporaryDirectory(prefix="nearlinear-ranks-") as folder,
        CountedSignals() as signals,
    ):
        fork = _can_fork()
        if fork and prepare:
            with suppress(ImportError):  # the ranks report it
                prepare()
        variables, listener = _rendezvous(ranks)
        group = RankGroup([module, *arguments], ranks, variables, Path(folder), fork, listener)
        # after the forks, which would inherit a store without its thread
        store = hold_store(variables["MASTER_ADDR"], listener) if listener else None
        try:
            exits = group.wait(signals)
        finally:
            group.kill()
            del store
    failed = {rank: end for rank, end in exits.items() if end.code}
    if not failed:
        return ExitStatus(0)
    status = first_failure(failed, ranks.num_hosts * ranks.num_ranks)
    if signals.first:
        saved = next((end.message for end in failed.values() if end.code >= 128), "")
        return ExitStatus(128 + signals.first, saved)
    return status


def _rendezvous(ranks: LocalRanks) -> tuple[dict[str, str], socket.socket | None]:
    """Return the variables with which ranks find the store, and its socket if it is held here."""
    from ..distributed import rendezvous

    single = ranks.num_hosts == 1
    host, _, port = (ranks.rendezvous or f"{rendezvous.LOOPBACK}:0").rpartition(":")
    if single:
        host, port = rendezvous.LOOPBACK, "0"
    listener = None
    if ranks.host_index == 0:
        local = single or rendezvous.is_loopback(host)
        listener = rendezvous.listen(host, int(port), all_local=local)
        port = str(listener.getsockname()[1])
    return {"MASTER_ADDR": host, "MASTER_PORT": port}, listener


def _can_fork() -> bool:
    """Return True if a fork of this process can be a rank: on Linux, and without GPUs."""
    import torch

    return sys.platform == "linux" and not torch.cuda.is_available()


class ForkedRank(ForkProcess):
    """A rank that is a fork of the launcher, with the methods of `subprocess.Popen`.

    Args:
        command: Module to run, and its arguments.
        environment: Environment variables of the rank.
        listener: Socket of the launcher, which the rank closes.
    """

    def __init__(
        self,
        command: list[str],
        environment: Mapping[str, str],
        listener: socket.socket | None,
    ):
        super().__init__()
        self._command, self._environment, self._listener = command, environment, listener
        # a signal to the rank must not reach the launcher's handler, which the fork inherits
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
        try:
            self.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)

    @property
    def returncode(self) -> int | None:
        return self.exitcode

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self) -> None:
        self.join()

    def send_signal(self, number: int) -> None:
        if self.exitcode is None and self.pid:
            os.kill(self.pid, number)

    def run(self) -> None:
        """Make this process equal to a new interpreter, and run the command in it."""
        atexit._clear()  # else the fork would remove the launcher's temporary folder
        os.setpgid(0, 0)
        for number in _STOP_SIGNALS:
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
        if self._listener:
            self._listener.close()
        os.environ.update(self._environment)
        logging.root.handlers.clear()  # configured again, for this rank
        sys.stdout, sys.stderr = _unbuffered(1), _unbuffered(2)
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # torch was imported before
        try:
            sys.argv = self._command
            runpy.run_module(self._command[0], run_name="__main__", alter_sys=True)
        finally:
            atexit._run_exitfuncs()


def _unbuffered(descriptor: int) -> io.TextIOWrapper:
    """Return a text stream without a buffer, as of ``python -u``."""
    raw = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(raw, errors="backslashreplace", write_through=True)


class RankGroup:
    """The rank processes of one machine.

    Args:
        command: Module that every rank runs, and its arguments.
        ranks: Number and place of the ranks.
        variables: Environment variables of the rendezvous.
        folder: Private folder for the messages of failing ranks.
        fork: True to fork the ranks.
        listener: Socket of the job's store, if this process holds it.
    """

    def __init__(
        self,
        command: list[str],
        ranks: LocalRanks,
        variables: Mapping[str, str],
        folder: Path,
        fork: bool,
        listener: socket.socket | None,
    ):
        self._folder = folder
        self._first = ranks.host_index * ranks.num_ranks
        self._processes: dict[int, subprocess.Popen | ForkedRank] = {}
        self._ends: dict[int, float] = {}
        self._terminated = False
        # -u: unbuffered, so that output appears immediately
        interpreter = [sys.executable, "-u", "-m"]
        if fork:
            gc.collect()
            gc.freeze()  # else a collection in a rank visits, and thereby copies, all modules
        for local_rank in range(ranks.num_ranks):
            rank = self._first + local_rank
            environment = {
                **os.environ,
                **variables,
                "RANK": str(rank),
                "LOCAL_RANK": str(local_rank),
                "GROUP_RANK": str(ranks.host_index),
                "WORLD_SIZE": str(ranks.num_hosts * ranks.num_ranks),
                "LOCAL_WORLD_SIZE": str(ranks.num_ranks),
                "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is held by the launcher
                "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_ERROR_FILE": str(self._error_file(rank)),
            }
            self._processes[rank] = (
                ForkedRank(command, environment, listener)
                if fork
                else subprocess.Popen([*interpreter, *command], env=environment, process_group=0)
            )

    def wait(self, signals: CountedSignals) -> dict[int, RankExit]:
        """Wait for the end of all ranks, and stop them after a failure or a signal."""
        passed_on, deadline = 0, float("inf")
        while self._running():
            if signals.count > passed_on:
                if signals.interrupts > 1:
                    self.kill()
                else:
                    self._send(signal.SIGTERM)
                    deadline = min(deadline, time.monotonic() + SHUTDOWN_TIMEOUT)
                passed_on = signals.count
            if deadline == float("inf") and self._failed():
                deadline = time.monotonic() + PEER_GRACE
            if time.monotonic() > deadline:
                if self._terminated:
                    self.kill()
                else:
                    self._send(signal.SIGTERM)
                    deadline = time.monotonic() + SHUTDOWN_TIMEOUT
            time.sleep(_POLL_INTERVAL)
        return {rank: self._exit(rank) for rank in self._processes}

    def kill(self) -> None:
        """Kill the ranks that are still running."""
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
        for process in self._processes.values():
            process.wait()

    def _send(self, number: int) -> None:
        self._terminated = True
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                process.send_signal(number)

    def _running(self) -> bool:
        for rank, process in self._processes.items():
            if rank not in self._ends and process.poll() is not None:
                self._ends[rank] = time.time()
        return len(self._ends) < len(self._processes)

    def _failed(self) -> bool:
        return any(self._processes[rank].returncode for rank in self._ends)

    def _error_file(self, rank: int) -> Path:
        return self._folder / f"error-{rank}.json"

    def _exit(self, rank: int) -> RankExit:
        code, left = self._processes[rank].returncode, {}
        assert code is not None
        with suppress(OSError, ValueError):
            left = json.loads(self._error_file(rank).read_text(encoding="utf-8"))
        message, by_peer = str(left.get("message", "")), bool(left.get("by_peer"))
        return RankExit(code, message, by_peer, self._ends[rank])


class CountedSignals:
    """Count the signals that ask the launcher to stop, instead of ending it."""

    def __init__(self):
        self.first: int = 0
        """The first signal, or 0."""
        self.count: int = 0
        self.interrupts: int = 0
        """Number of SIGINTs."""
        self._previous: dict[int, object] = {}

    def __enter__(self) -> CountedSignals:
        if threading.current_thread() is threading.main_thread():
            self._previous = {n: signal.signal(n, self._receive) for n in _STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.first = self.first or number
        self.count += 1
        self.interrupts += number == signal.SIGINT
        if self.count == 1 and number == signal.SIGINT:
            os.write(2, STOPPING)


def first_failure(failures: Mapping[int, RankExit], world_size: int) -> ExitStatus:
    """Return the status of the rank that failed first.

    Ranks end within one poll of each other, so the kind of exit decides before the time. User
    errors come first. A rank killed by a signal comes next: it could not leave a message, and the
    ranks that lost it did. Ranks that only lost another one come after other failures, and ranks
    that the launcher stopped with SIGTERM come last.
    """

    def order(rank: int) -> tuple:
        end = failures[rank]
        kinds = (
            end.code in _TOLD and bool(end.message) and not end.by_peer,
            end.code < 0 and end.code != -signal.SIGTERM,
            end.code > 0 and not end.by_peer,
            end.by_peer,
            True,
        )
        return kinds.index(True), end.time, rank

    rank = min(failures, key=order)
    end = failures[rank]
    if end.code in _TOLD and end.message:
        return ExitStatus(end.code, end.message)
    how = f"was killed by signal {-end.code}" if end.code < 0 else f"ended with code {end.code}"
    when = datetime.fromtimestamp(end.time).strftime("%Y-%m-%d_%H:%M:%S")
    reason = f"rank {rank} of {world_size} {how} at {when}"
    # a rank that could not leave a message is described by a rank that lost it
    message = end.message or next((e.message for e in failures.values() if e.by_peer), "")
    return ExitStatus(1, f"{reason}: {message}" if message else reason)
