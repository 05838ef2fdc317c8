"""Start the ranks of this machine through torchrun's API, the launcher a cluster uses."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from ..train.ending import Interrupted
from . import slurm

NOTICE = (
    120  # seconds between SIGTERM and the end: what SageMaker gives, and is asked for elsewhere
)
GRACE = NOTICE - 10  # of them for the ranks to save: torchrun needs some itself
SAVED = Interrupted.exit_code


@dataclass(frozen=True)
class Host:
    """The ranks that one machine of a job starts."""

    ranks: int
    """processes here"""
    hosts: int = 1
    """machines of the job, with as many ranks each"""
    number: int = 0
    """which of them this is"""
    meeting: str = ""
    """host:port on the first machine; a machine alone finds a free port itself"""


@dataclass(frozen=True)
class Ended:
    """How the ranks of a machine ended."""

    code: int
    """0 done, 2 a mistake to correct, 1 any other failure, 128 and more: stopped by a signal"""
    why: str = ""
    """of a failure, in one line"""


def joined() -> bool:
    """Whether this process is a rank that torchrun, SageMaker or Slurm has started already.

    Slurm names ranks its own way; its variables are translated into torchrun's here.
    """
    if "RANK" not in os.environ:
        os.environ.update(slurm.variables(os.environ))
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def start(module: str, arguments: list[str], ranks: int) -> int:
    """Run ``python -m module arguments --launched-by PID`` as ``ranks`` ranks; the exit code.

    A rank that ends with an error ends the others within seconds; the reason is printed here.
    """
    ended = run(Host(ranks), module, [*arguments, "--launched-by", str(os.getpid())])
    if ended.code >= 128:
        print(f"stopped: {ended.why}" if ended.why else "stopped", file=sys.stderr)
    elif ended.code == 2:
        print(f"error: {ended.why}", file=sys.stderr)
    elif ended.code:
        print(
            f"error: {ended.why}; what it said is above, and the other ranks were stopped",
            file=sys.stderr,
        )
    return ended.code


def run(host: Host, module: str, arguments: list[str]) -> Ended:
    """Run ``python -m module arguments`` as the ranks of ``host``, until all have ended."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(GRACE))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // host.ranks)))
    alone = host.hosts == 1
    config = LaunchConfig(
        min_nodes=host.hosts,
        max_nodes=host.hosts,
        nproc_per_node=host.ranks,
        rdzv_backend="c10d" if alone else "static",
        rdzv_endpoint="localhost:0" if alone else host.meeting,
        rdzv_configs={} if alone else {"rank": host.number},
        run_id=str(uuid.uuid4()) if alone else "nearlinear",
        max_restarts=0,
    )
    try:
        # -u: what ranks say is seen when they say it
        elastic_launch(config, sys.executable)("-u", "-m", module, *arguments)
    except SignalException as signalled:
        return Ended(128 + signalled.sigval)
    except ChildFailedError as failed:
        return _reason(failed.failures, host.hosts * host.ranks)
    return Ended(0)


def _reason(failures: Mapping, world: int) -> Ended:
    """Of the ranks that failed, the one that failed first, and what it left.

    They are told apart by how they ended, for times are whole seconds: a mistake comes before all
    else; then a rank that a signal killed, for those that missed it left words and it could not;
    then the other failures; last those that were told to stop because of one.
    """

    def place(rank: int) -> tuple:
        failure = failures[rank]
        kinds = (
            failure.exitcode in (2, SAVED) and bool(_left(failure)),
            failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM,
            failure.exitcode > 0,
            True,
        )
        return kinds.index(True), failure.timestamp, rank

    rank = min(failures, key=place)
    failure = failures[rank]
    code, said, when = failure.exitcode, _left(failure), failure.timestamp_isoformat()
    if code in (2, SAVED) and said:
        return Ended(code, said)
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    return Ended(1, f"rank {rank} of {world} {how} at {when}" + (f": {said}" if said else ""))


def _left(failure) -> str:
    """What a rank said with `leave_error`; empty where it did not."""
    data = failure.error_file_data
    return data["message"] if isinstance(data.get("message"), str) and "timestamp" in data else ""
