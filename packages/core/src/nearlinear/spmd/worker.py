"""The processes of `nearlinear.spmd.run(processes=True)`: one that starts the ranks, and a rank.

Imports of torch and of models take longer than many a run: they are done once, here, and the ranks
are forks of this process, which has used none of it.
"""

import json
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from contextlib import suppress
from importlib import import_module
from multiprocessing.process import BaseProcess
from pathlib import Path

from .. import leaving
from ..backends import known_to_torch
from ..orphan import end_with_parent

WANTED = ["torch.distributed.fsdp", "torch.distributed.tensor"]
GRACE = 3.0
"""seconds for the other ranks to notice a dead one themselves"""


def start(folder: Path, backend: str, timeout: float, modules: list[str]) -> None:
    """Start the ranks, wait for them, and leave the exit codes in ``folder``."""
    deadline = time.monotonic() + timeout
    for name in [*WANTED, *modules]:
        with suppress(ImportError):  # then a rank that needs it says so
            import_module(name)
    # elsewhere than on Linux libraries may not outlive a fork
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    ranks = [
        context.Process(target=be_rank, args=(rank, folder, backend, os.getpid()))
        for rank in range(int(os.environ["WORLD_SIZE"]))
    ]
    for rank in ranks:
        rank.start()
    wait(ranks, deadline)
    codes = [rank.exitcode for rank in ranks]
    (folder / "codes").write_text(json.dumps(codes))


def wait(ranks: list[BaseProcess], deadline: float) -> None:
    """Until all have ended, until ``deadline`` (monotonic), or a little longer than one failed."""
    while any(rank.is_alive() for rank in ranks):
        now = time.monotonic()
        if now > deadline:
            return
        if any(rank.exitcode for rank in ranks):
            deadline = min(deadline, now + GRACE)
        time.sleep(0.02)


def be_rank(rank: int, folder: Path, backend: str, parent: int) -> None:
    """From beginning to end; what it prints goes to a file."""
    end_with_parent(parent)
    output = os.open(folder / f"output-{rank}", os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    status = call(folder, backend)
    sys.stdout.flush()
    os._exit(status)


def call(folder: Path, backend: str) -> int:
    """Run the pickled call of ``folder`` as rank ``$RANK``; 0 if it returned."""
    import torch.distributed as dist

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        fn, args = pickle.loads((folder / "call").read_bytes())
        store = f"file://{folder}/store"
        known_to_torch(backend)
        dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks)
        result = pickle.dumps(fn(rank, *args))
        if dist.is_initialized():
            leaving.finish()
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
    end_with_parent(int(parent))
    start(Path(folder), backend, float(timeout), modules)
    os._exit(0)  # ranks that have not ended are ended by who waits for this process
