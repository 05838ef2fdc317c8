"""Run contenders in turn, round by round, and collect their output.

Interleaving makes ratios fair on a machine with varying speed: a disturbance affects all contenders
that run in the same minute.
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from ci.benchmarks.mpi.contenders import Contender

# Prefixes of files that libraries leave in /dev/shm; MPICH does so after every run.
LEFTOVERS = ("mpich_shm_", "impi-shm-", "Intel_MPI_", "sm_segment", "vader_segment", "ucx_")


@dataclass
class Sample:
    """Blocks of one contender for one operation, size and number of ranks."""

    seconds: list[float] = field(default_factory=list)
    """Seconds per call, one entry per block."""
    calls: int = 0
    """Calls in the last block."""
    wrong: int = 0

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def minimum(self) -> float:
        return min(self.seconds)


Key = tuple[int, str, int, str]  # ranks, operation, bytes, contender


@dataclass(frozen=True)
class MeasureConfig:
    """Settings of a measurement."""

    operations: list[str]
    ranks: list[int]
    sizes: list[int]
    rounds: int
    blocks: int
    block_seconds: float
    limit_seconds: float

    def arguments(self, operation: str) -> list[str]:
        sizes = ",".join(map(str, self.sizes))
        numbers = (self.blocks, self.block_seconds, self.limit_seconds)
        return [operation, sizes, *map(str, numbers)]

    @property
    def timeout(self) -> float:
        """Timeout of a run in seconds, far above the time that the call limits allow."""
        return 60 + 4 * len(self.sizes) * (self.blocks + 3) * max(1, self.limit_seconds)


def measure(
    contenders: list[Contender],
    config: MeasureConfig,
    found: dict[Key, Sample],
    failures: list[str],
) -> None:
    """Measure every contender, operation and number of ranks, ``config.rounds`` times in turn.

    Args:
        contenders: Programs to measure.
        config: Settings.
        found: Results by ranks, operation, bytes and contender; filled incrementally, so that an
            interrupted run keeps its results.
        failures: Messages of failed programs, which are skipped from then on.
    """
    failed: set[tuple[int, str, str]] = set()
    steps = [
        (ranks, operation, number, contender)
        for ranks in config.ranks
        for operation in config.operations
        for number in range(config.rounds)
        for contender in contenders
        if contender.name.split(":")[0] != "memcpy" or operation == "all_gather"
    ]
    before = _shared_memory()
    try:
        for index, (ranks, operation, number, contender) in enumerate(steps):
            _progress(
                index,
                len(steps),
                f"{operation}, {ranks} ranks, round {number + 1}: {contender.name}",
            )
            if (ranks, operation, contender.name) in failed:
                continue
            output, error = _run(contender, ranks, config.arguments(operation), config.timeout)
            if error:
                failed.add((ranks, operation, contender.name))
                failures.append(f"{contender.name}, {operation}, {ranks} ranks: {error}")
            _collect(output, ranks, contender.name, found)
    finally:
        _progress(len(steps), len(steps), "")
        for path in _shared_memory() - before:
            path.unlink(missing_ok=True)


def _run(contender: Contender, ranks: int, arguments: list[str], timeout: float):
    """Return the program's output, and its error message or None."""
    with tempfile.TemporaryDirectory(
        prefix="nlmpi-"
    ) as scratch:  # short prefix: the folder holds sockets
        child = subprocess.Popen(
            contender.command(ranks, arguments),
            env={**contender.environment(ranks), "TMPDIR": scratch},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a process group contains the launcher's ranks
        )
        try:
            output, words = child.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            _terminate(child)
            output, _ = child.communicate()
            return output, f"timed out after {timeout:g} s"
        except BaseException:
            _terminate(child)
            child.wait()
            raise
    if child.returncode == 0:
        return output, None
    last = " / ".join(line.strip() for line in words.splitlines()[-3:])
    return output, f"exit status {child.returncode}: {last or 'no output on stderr'}"


def _terminate(child: subprocess.Popen) -> None:
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, sign)
            child.wait(timeout=5)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def _collect(output: str, ranks: int, name: str, found: dict[Key, Sample]) -> None:
    for line in output.splitlines():
        if not line.startswith(("all_gather ", "reduce_scatter ", "all_reduce ")):
            continue  # other output of a library
        operation, size, calls, wrong, *seconds = line.split()
        sample = found.setdefault((ranks, operation, int(size), name), Sample())
        sample.seconds += map(float, seconds)
        sample.calls = int(calls)
        sample.wrong += int(wrong)


def _shared_memory() -> set[Path]:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return set()
    return {path for path in folder.iterdir() if path.name.startswith(LEFTOVERS)}


def _progress(done: int, steps: int, what: str) -> None:
    if sys.stderr.isatty():
        end = "\n" if done == steps else ""
        print(f"\r\x1b[K[{done}/{steps}] {what}", end=end, file=sys.stderr, flush=True)
    elif what:
        print(f"[{done + 1}/{steps}] {what}", file=sys.stderr, flush=True)
