"""Processes of `nearlinear.spmd.run(processes=True)`: the starter and the ranks that it forks.

Importing torch and models takes longer than many runs. The starter imports them once; the ranks
are forks of it, made before it has used any of them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
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
EXIT_GRACE = 3.0  # seconds for the other ranks to notice a dead one themselves


def start_ranks(folder: Path, backend: str, timeout: float, modules: list[str]) -> None:
    """Start the ranks, wait for them, and write their exit codes to ``folder``."""
    deadline = time.monotonic() + timeout
    for name in [*PRELOADED, *modules]:
        with suppress(ImportError):  # a rank that needs it raises the error
            import_module(name)
    # on other systems than Linux, libraries may not survive a fork
    fork = sys.platform == "linux"
    context = multiprocessing.get_context("fork") if fork else multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=run_rank, args=(rank, folder, backend, os.getpid()))
        for rank in range(int(os.environ["WORLD_SIZE"]))
    ]
    for rank in ranks:
        rank.start()
    wait_for_ranks(ranks, deadline)
    codes = [rank.exitcode for rank in ranks]
    (folder / "codes").write_text(json.dumps(codes))


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
    output = os.open(folder / f"output-{rank}", os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
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
    folder, parent, backend, timeout, *modules = sys.argv[1:]
    process_exit.end_with_parent(int(parent))
    start_ranks(Path(folder), backend, float(timeout), modules)
    os._exit(0)  # the process that waits for this one kills ranks that are still running
