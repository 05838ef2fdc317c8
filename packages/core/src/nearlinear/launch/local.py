"""Start a job's ranks on this machine through torchrun's API, the launcher a cluster uses."""

import json
import os
import sys
import time
import uuid

from . import slurm


def joined() -> bool:
    """Whether this process is a rank that torchrun, SageMaker or Slurm has started already.

    Slurm names ranks its own way; its variables are translated into torchrun's here.
    """
    if "RANK" not in os.environ:
        os.environ.update(slurm.variables(os.environ))
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def start(module: str, arguments: list[str], ranks: int) -> int:
    """Run ``python -m module arguments --launched-by PID`` as ``ranks`` ranks; the exit code.

    A rank that ends with an error ends the others within seconds. Of the one-line errors that
    ranks leave with `leave_error`, one is printed here, and the code is 2; any other failure is
    named, and the code is 1.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=str(uuid.uuid4()),
        max_restarts=0,
    )
    command = ["-m", module, *arguments, "--launched-by", str(os.getpid())]
    try:
        elastic_launch(config, sys.executable)(*command)
    except SignalException as signalled:
        print("stopped", file=sys.stderr)
        return 128 + signalled.sigval
    except ChildFailedError as failed:
        return _tell(failed, ranks)
    return 0


def leave_error(message: str) -> None:
    """In a rank that `start` started: hand the one-line error to it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        print(f"error: {message}", file=sys.stderr)
        return
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"message": message, "timestamp": str(int(time.time()))}, file)


def _tell(failed, ranks: int) -> int:
    for failure in failed.failures.values():
        if failure.exitcode == 2 and isinstance(failure.message, str):
            print(f"error: {failure.message}", file=sys.stderr)
            return 2
    rank, failure = failed.get_first_failure()
    code = failure.exitcode
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    print(
        f"error: rank {rank} of {ranks} {how} at {failure.timestamp_isoformat()}; what it said is "
        "above, and the other ranks were stopped",
        file=sys.stderr,
    )
    return 1
