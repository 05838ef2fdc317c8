"""Ranks as processes on this machine: slower to start, and exactly what a cluster runs.

Each rank is a fresh interpreter (``python -m nearlinear.spmd.worker``), never a fork: a fork of a
process that has used its thread pools can hang. When one rank fails the others are ended.
"""

import os
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ..errors import NearlinearError
from .failures import RankError

_GRACE = 3.0  # seconds for the other ranks to notice a dead one themselves


def run_processes(fn, ranks: int, args: tuple, timeout: float, backend: str) -> list:
    """`nearlinear.spmd.run` with processes."""
    payload = _pickle(fn, args)
    with tempfile.TemporaryDirectory(prefix="nearlinear-spmd-") as folder:
        folder = Path(folder)
        (folder / "call").write_bytes(payload)
        workers = [_start(folder, rank, ranks, backend) for rank in range(ranks)]
        try:
            _wait(workers, folder, timeout)
        finally:
            for worker in workers:
                if worker.poll() is None:
                    worker.kill()
                worker.wait()
        return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(ranks)]


def _pickle(fn, args: tuple) -> bytes:
    try:
        import cloudpickle
    except ImportError:
        if getattr(fn, "__module__", None) == "__main__":
            raise NearlinearError(
                "spmd.run(processes=True) cannot send a function defined in a notebook or script: "
                "pip install cloudpickle, or move the function to a module"
            ) from None
        return pickle.dumps((fn, args))
    return cloudpickle.dumps((fn, args))


def _start(folder: Path, rank: int, ranks: int, backend: str) -> subprocess.Popen:
    threads = max(1, (os.cpu_count() or 1) // ranks)
    environment = {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    command = [sys.executable, "-m", "nearlinear.spmd.worker"]
    command += [str(folder), str(os.getpid()), backend]
    with open(folder / f"output-{rank}", "wb") as output:
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )


def _wait(workers: list[subprocess.Popen], folder: Path, timeout: float) -> None:
    """Until all ranks have ended; show their output in rank order; RankError if one failed."""
    start, failed_at = time.monotonic(), None
    while any(worker.poll() is None for worker in workers):
        now = time.monotonic()
        if failed_at is None and any(worker.poll() for worker in workers):
            failed_at = now
        if now - start > timeout or (failed_at is not None and now - failed_at > _GRACE):
            break
        time.sleep(0.02)
    codes = [worker.poll() for worker in workers]
    output = [(folder / f"output-{r}").read_text(errors="replace") for r in range(len(workers))]
    for text in output:
        sys.stdout.write(text)
    _judge(codes, output, folder, timeout)


def _judge(codes: list[int | None], output: list[str], folder: Path, timeout: float) -> None:
    """RankError for the rank that failed first; a killed one comes before those it took along."""
    ranks = len(codes)
    for rank, code in enumerate(codes):
        if code is not None and code < 0:
            message = f"its process was ended by signal {-code}"
            raise RankError(rank, ranks, message, output[rank][-2000:])
    failures = sorted(folder.glob("failure-*"), key=lambda path: path.stat().st_mtime_ns)
    if failures:
        summary, _, text = failures[0].read_text().partition("\n")
        raise RankError(int(failures[0].name.removeprefix("failure-")), ranks, summary, text)
    for rank, code in enumerate(codes):
        if code:
            message = f"its process ended with code {code}"
            raise RankError(rank, ranks, message, output[rank][-2000:])
    if None in codes:
        raise RankError(codes.index(None), ranks, f"it did not finish within {timeout:g} s")
