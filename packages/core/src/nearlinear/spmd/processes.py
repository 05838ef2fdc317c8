"""Ranks as processes on this machine: slower to start, and exactly what a cluster runs.

They are children of one fresh interpreter (``python -m nearlinear.spmd.worker``) and not of this
process: a fork of a process that has used its thread pools can hang. When one rank fails the
others are ended.
"""

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from ..errors import NearlinearError
from .failures import RankError


def run_processes(fn, ranks: int, args: tuple, timeout: float, backend: str) -> list:
    """`nearlinear.spmd.run` with processes."""
    payload = _pickle(fn, args)
    with tempfile.TemporaryDirectory(prefix="nearlinear-spmd-") as folder:
        folder = Path(folder)
        (folder / "call").write_bytes(payload)
        codes = _in_one_session(folder, ranks, timeout, backend)
        output = [(folder / f"output-{rank}").read_text(errors="replace") for rank in range(ranks)]
        for text in output:
            sys.stdout.write(text)
        _judge(codes, output, folder, timeout)
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


def _in_one_session(folder: Path, ranks: int, timeout: float, backend: str) -> list[int | None]:
    """Have all ranks started and waited for; how each ended (None: it had to be ended)."""
    threads = max(1, (os.cpu_count() or 1) // ranks)
    environment = {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    command = [sys.executable, "-m", "nearlinear.spmd.worker", str(folder), str(os.getpid())]
    command += [backend, str(timeout), *_models_known_here()]
    for rank in range(ranks):
        (folder / f"output-{rank}").touch()
    with open(folder / "output", "wb") as output:
        starter = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # so that the ranks can be ended with it
        )
    try:
        starter.wait()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(starter.pid, signal.SIGKILL)
        starter.wait()
    if not (folder / "codes").exists():
        said = (folder / "output").read_text(errors="replace")
        how = f"the process that starts the ranks ended with code {starter.returncode}"
        raise NearlinearError(f"{how}: {said[-2000:]}")
    return json.loads((folder / "codes").read_text())


def _models_known_here() -> list[str]:
    """Modules that take seconds to import and that ranks will want, for this process has them."""
    return [name for name in sys.modules if name.startswith("transformers.models.")]


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
