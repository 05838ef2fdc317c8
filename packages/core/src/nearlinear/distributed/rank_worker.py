"""Processes of `nearlinear.spmd.run(processes=True)`: the starter and the ranks that it forks.

Importing torch and models takes longer than many runs. The starter imports them once. It reads
requests from its standard input, one JSON object a line, and forks a session for each, which forks
the ranks. The starter itself never uses what it has imported, so that its forks are safe.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import pickle
import select
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing.process import BaseProcess
from pathlib import Path

from . import process_exit
from .runtime import register_backend

PRELOADED = ["torch.distributed.fsdp", "torch.distributed.tensor"]
EXIT_GRACE = 3.0
"""Seconds for the other ranks to notice a dead one themselves."""
IDLE_LIMIT = 300.0
"""Seconds without a request after which the starter ends."""

# on other systems than Linux, libraries may not survive a fork
_fork = sys.platform == "linux"
_context = multiprocessing.get_context("fork") if _fork else multiprocessing.get_context("spawn")


def serve() -> None:
    """Run the sessions that standard input asks for, until it ends or has been idle for long.

    Replies with two lines to each request: the process id of the session, and its end.
    """
    import_libraries(PRELOADED)
    while select.select([sys.stdin], [], [], IDLE_LIMIT)[0]:
        line = sys.stdin.readline()
        if not line:
            return
        request = json.loads(line)
        import_libraries(request.pop("modules"))
        gc.freeze()  # else a collection in a rank visits, and thereby copies, all imported objects
        session = _context.Process(target=run_session, args=(os.getpid(),), kwargs=request)
        session.start()
        print(session.pid, flush=True)
        session.join()
        print("ended", flush=True)


def import_libraries(names: list[str]) -> None:
    """Import modules before the fork. A rank that needs a missing one raises the error."""
    for name in names:
        with suppress(ImportError):
            import_module(name)


def run_session(
    parent: int, folder: str, workdir: str, ranks: int, backend: str, timeout: float
) -> None:
    """Start the ranks, wait for them, and write their exit codes to ``folder``."""
    deadline = time.monotonic() + timeout
    os.setsid()  # so that all ranks and their children can be killed together
    process_exit.end_with_parent(parent)
    redirect_output(Path(folder) / "output")
    os.chdir(workdir)
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    processes = [
        _context.Process(target=run_rank, args=(rank, Path(folder), backend, os.getpid()))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    wait_for_ranks(processes, deadline)
    partial = Path(folder) / ".codes"
    partial.write_text(json.dumps([process.exitcode for process in processes]))
    partial.rename(partial.with_name("codes"))
    os.killpg(os.getpgrp(), signal.SIGKILL)


def redirect_output(file: Path) -> None:
    """Send standard output and standard error of this process to ``file``."""
    output = os.open(file, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)


def wait_for_ranks(ranks: Sequence[BaseProcess], deadline: float) -> None:
    """Wait until all ranks end, until ``deadline`` (monotonic), or `EXIT_GRACE` after a failure."""
    while any(rank.is_alive() for rank in ranks):
        now = time.monotonic()
        if now > deadline:
            return
        if any(rank.exitcode for rank in ranks):
            deadline = min(deadline, now + EXIT_GRACE)
        time.sleep(0.02)


def run_rank(rank: int, folder: Path, backend: str, parent: int) -> None:
    """Run one rank from start to exit, its output redirected to a file."""
    process_exit.end_with_parent(parent)
    redirect_output(folder / f"output-{rank}")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    status = call_function(folder, backend)
    sys.stdout.flush()
    os._exit(status)


def call_function(folder: Path, backend: str) -> int:
    """Run the pickled call of ``folder`` as rank ``$RANK``; return 0 if it succeeded."""
    import torch.distributed as dist

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        fn, args = pickle.loads((folder / "call").read_bytes())
        store = f"file://{folder}/store"
        register_backend(backend)
        dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks)
        result = pickle.dumps(fn(rank, *args))
        if dist.is_initialized():
            process_exit.run_callbacks()
            dist.barrier()
            dist.destroy_process_group()
    except BaseException as error:
        partial = folder / f".failure-{rank}"
        partial.write_text(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        partial.rename(folder / f"failure-{rank}")
        return 1
    (folder / f"result-{rank}").write_bytes(result)
    return 0


if __name__ == "__main__":
    process_exit.end_with_parent(int(sys.argv[1]))
    serve()
