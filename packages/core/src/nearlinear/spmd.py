"""Run a function on N ranks of this machine and collect the result of each rank.

`run` starts the ranks as threads of this process (real FSDP2 and real collectives, within seconds,
in a notebook cell) or, with ``processes=True``, as processes over gloo, as on a cluster. Threads
share one random generator and one address space: build models inside ``with one_at_a_time():`` or
with `nearlinear.deferred_init`, which takes the same lock.

Processes run exactly the code of a cluster. They are forks of a second interpreter
(`distributed.rank_worker`) instead of this process, since a fork of a process that has used its
thread pools can hang. That interpreter imports torch once and serves later calls, too, until it has
been idle for some minutes. When one rank fails, the others are stopped.

Example::

    def work(rank):
        mesh = nl.init({"hybrid_shard_degree": 2})
        return mesh.shard

    nl.spmd.run(work, 4)  # [2, 2, 2, 2]
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .errors import ConfigError, NearlinearError, RankError

__all__ = ["RankError", "one_at_a_time", "run"]


_model_lock = threading.RLock()


def run(
    fn: Callable[..., Any],
    ranks: int = 4,
    *,
    args: tuple[Any, ...] | list[Any] = (),
    processes: bool = False,
    backend: str = "gloo",
    timeout: float = 300.0,
) -> list[Any]:
    """Call ``fn(rank, *args)`` on every rank and return the results in rank order.

    The default process group exists inside ``fn``: ``torch.distributed`` and all of nearlinear work
    as on a cluster.

    Args:
        fn: Function of (rank, *args).
        ranks: Number of ranks.
        args: Further arguments of ``fn``, the same on every rank.
        processes: Run the ranks as processes over ``backend`` instead of threads. ``fn``, ``args``
            and the results are then pickled: a function defined in a notebook needs the package
            ``cloudpickle``.
        backend: Backend of ranks that are processes.
        timeout: Seconds for the whole call.

    Raises:
        RankError: A rank failed; it carries the traceback of the first one. The other ranks are
            stopped, threads at their next collective.
    """
    if not isinstance(ranks, int) or ranks < 1:
        raise ConfigError(f"spmd.run(ranks={ranks!r}): expected an integer of at least 1")
    if not callable(fn):
        raise ConfigError(f"spmd.run needs a function of (rank, *args), not {type(fn).__name__}")
    if processes:
        return run_processes(fn, ranks, tuple(args), timeout, backend)
    from .distributed.thread_backend import run_threads

    return run_threads(fn, ranks, tuple(args), timeout)


@contextmanager
def one_at_a_time(seed: int | None = None) -> Iterator[None]:
    """Admit one rank at a time: a lock for code that draws random numbers on ranks as threads.

    Call no collectives inside (`nearlinear.shard` is one): they would wait for the ranks outside.

    Args:
        seed: If given, seeds the generator for this block and restores its state afterwards, so
            that every rank builds the same model.
    """
    import torch

    with _model_lock:
        if seed is None:
            yield
            return
        gpus = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices=gpus):
            torch.default_generator.manual_seed(seed)
            if gpus:
                torch.cuda.manual_seed(seed)
            yield


def seed_generators(seed: int) -> None:
    """Seed this rank's generators. Ranks that are threads wait here for models being built."""
    import torch

    with _model_lock:
        torch.manual_seed(seed)


@contextmanager
def preserve_generators() -> Iterator[None]:
    """Restore the state of this rank's generators at the end of the block.

    Unlike ``torch.random.fork_rng``, ranks that are threads wait at both ends for models being
    built: restoring the state of the shared generator would change their initial values.
    """
    import torch

    cuda = torch.cuda.is_available()
    with _model_lock:
        cpu_state = torch.get_rng_state()
        cuda_state = torch.cuda.get_rng_state() if cuda else None
    try:
        yield
    finally:
        with _model_lock:
            torch.set_rng_state(cpu_state)
            if cuda_state is not None:
                torch.cuda.set_rng_state(cuda_state)


def run_processes(
    fn: Callable[..., Any], ranks: int, args: tuple[Any, ...], timeout: float, backend: str
) -> list[Any]:
    """Run ``fn`` on ranks that are processes, see `run`."""
    payload = _pickle(fn, args)
    with tempfile.TemporaryDirectory(prefix="nearlinear-spmd-") as name:
        folder = Path(name)
        (folder / "call").write_bytes(payload)
        codes = _run_session(folder, ranks, timeout, backend)
        output = [(folder / f"output-{rank}").read_text(errors="replace") for rank in range(ranks)]
        for text in output:
            sys.stdout.write(text)
        _raise_first_failure(codes, output, folder, timeout)
        return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(ranks)]


def _pickle(fn, args: tuple) -> bytes:
    try:
        import cloudpickle
    except ImportError:
        if getattr(fn, "__module__", None) == "__main__":
            raise NearlinearError(
                "spmd.run(processes=True) cannot send a function defined in a notebook or script. "
                "Install cloudpickle with pip install cloudpickle, or move the function to a "
                "module."
            ) from None
        return pickle.dumps((fn, args))
    return cloudpickle.dumps((fn, args))


def _run_session(folder: Path, ranks: int, timeout: float, backend: str) -> list[int | None]:
    """Start all ranks in a new process session and wait for them.

    Returns:
        The exit code of each rank; None for ranks that had to be killed at the timeout.
    """
    from .distributed.rendezvous import loopback_variables

    threads = max(1, (os.cpu_count() or 1) // ranks)
    environment = {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        **loopback_variables(),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    for rank in range(ranks):
        (folder / f"output-{rank}").touch()
    request = {
        "folder": str(folder),
        "workdir": os.getcwd(),
        "ranks": ranks,
        "backend": backend,
        "timeout": timeout,
        "modules": _imported_libraries(),
    }
    starter = _take_starter(environment)
    try:
        starter.run(request)
    except BaseException:
        starter.kill()
        raise
    _keep_starter(starter)
    if not (folder / "codes").exists():
        said = (folder / "output").read_text(errors="replace")
        raise NearlinearError(f"the process that starts the ranks failed: {said[-2000:]}")
    return json.loads((folder / "codes").read_text())


class _Starter:
    """A second interpreter that runs sessions of ranks, one after another (`rank_worker`)."""

    def __init__(self, environment: dict[str, str]):
        self.environment = environment
        self._session: int | None = None
        self._output = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "nearlinear.distributed.rank_worker", str(os.getpid())],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            start_new_session=True,  # a Ctrl-C of the terminal reaches this process only
            text=True,
        )

    def serves(self, environment: dict[str, str]) -> bool:
        """Return True if the process runs and has imported its libraries in ``environment``."""
        ours, theirs = ({**e, "PYTEST_CURRENT_TEST": ""} for e in (environment, self.environment))
        return ours == theirs and self._process.poll() is None

    def run(self, request: dict[str, Any]) -> None:
        """Run a session to its end. The ranks and all their children have ended then."""
        requests, replies = self._process.stdin, self._process.stdout
        assert requests and replies
        with suppress(BrokenPipeError):
            requests.write(json.dumps(request) + "\n")
            requests.flush()
        started = replies.readline()
        if not started:
            code = self._process.wait()
            self._output.seek(0)
            said = self._output.read().decode(errors="replace")
            raise NearlinearError(
                f"the process that starts the ranks ended with code {code}: {said[-2000:]}"
            )
        self._session = int(started)
        replies.readline()
        self._session = None

    def kill(self) -> None:
        """Stop the process and a session that is running."""
        for group in filter(None, (self._session, self._process.pid)):
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        self._process.communicate()


_idle_starter: list[_Starter] = []
os.register_at_fork(after_in_child=_idle_starter.clear)


def _take_starter(environment: dict[str, str]) -> _Starter:
    """Return the idle starter, or a new one if ``environment`` has changed since its start."""
    with suppress(IndexError):
        starter = _idle_starter.pop()
        if starter.serves(environment):
            return starter
        starter.kill()
    return _Starter(environment)


def _keep_starter(starter: _Starter) -> None:
    """Keep ``starter`` for the next call: one per process, as it holds some memory."""
    # the kernel ends it with the thread that started it
    if threading.current_thread() is threading.main_thread() and not _idle_starter:
        _idle_starter.append(starter)
    else:
        starter.kill()


def _imported_libraries() -> list[str]:
    """List the modules that are slow to import, that ranks need too, and that nobody edits."""
    names = ("nearlinear.", "transformers.models.")
    return [name for name in sorted(sys.modules) if name.startswith(names)]


def _raise_first_failure(
    codes: list[int | None], output: list[str], folder: Path, timeout: float
) -> None:
    """Raise RankError for the first failure: a signal, an exception, an exit code, a timeout."""
    ranks = len(codes)
    for rank, code in enumerate(codes):
        if code is not None and code < 0:
            message = f"its process was killed by signal {-code}"
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
