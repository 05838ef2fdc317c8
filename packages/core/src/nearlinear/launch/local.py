"""Local launcher: start the ranks of one machine through torchrun's API."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import Interrupted
from . import slurm
from .spec import TERMINATION_NOTICE

SHUTDOWN_TIMEOUT = TERMINATION_NOTICE - 10
"""Seconds that torchrun grants the ranks after SIGTERM; it needs a few of the notice itself."""

_INTERRUPTED = Interrupted.exit_code


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


def is_launched_rank() -> bool:
    """Return True if torchrun, SageMaker or Slurm started this process as a rank.

    Translates the variables of a Slurm step to those of torchrun in ``os.environ``.
    """
    if "RANK" not in os.environ:
        os.environ.update(slurm.rank_variables(os.environ))
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def start_ranks(module: str, arguments: list[str], num_ranks: int) -> int:
    """Run ``python -m module arguments --launched-by PID`` as local ranks; return the exit code.

    A failing rank stops the others within seconds. The reason is printed to stderr.
    """
    arguments = [*arguments, "--launched-by", str(os.getpid())]
    status = run_ranks(LocalRanks(num_ranks), module, arguments)
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


def run_ranks(ranks: LocalRanks, module: str, arguments: list[str]) -> ExitStatus:
    """Run ``python -m module arguments`` as ``ranks`` and wait for all of them."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_TIMEOUT))
    threads = max(1, (os.cpu_count() or 1) // ranks.num_ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    single = ranks.num_hosts == 1
    config = LaunchConfig(
        min_nodes=ranks.num_hosts,
        max_nodes=ranks.num_hosts,
        nproc_per_node=ranks.num_ranks,
        rdzv_backend="c10d" if single else "static",
        rdzv_endpoint="localhost:0" if single else ranks.rendezvous,
        rdzv_configs={} if single else {"rank": ranks.host_index},
        run_id=str(uuid.uuid4()) if single else "nearlinear",
        max_restarts=0,
    )
    try:
        # -u: unbuffered, so that output appears immediately
        elastic_launch(config, sys.executable)("-u", "-m", module, *arguments)
    except SignalException as error:
        return ExitStatus(128 + error.sigval)
    except ChildFailedError as error:
        return first_failure(error.failures, ranks.num_hosts * ranks.num_ranks)
    return ExitStatus(0)


def first_failure(failures: Mapping[int, Any], world_size: int) -> ExitStatus:
    """Return the status of the rank that failed first.

    Timestamps have whole seconds only, so the kind of exit decides before the time. User errors
    come first. A rank killed by a signal comes next: it could not leave a message, and the ranks
    that lost it did. Other failures follow. Ranks that torchrun stopped with SIGTERM come last.
    """

    def order(rank: int) -> tuple:
        failure = failures[rank]
        kinds = (
            failure.exitcode in (2, _INTERRUPTED) and bool(_error_message(failure)),
            failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM,
            failure.exitcode > 0,
            True,
        )
        return kinds.index(True), failure.timestamp, rank

    rank = min(failures, key=order)
    failure = failures[rank]
    code, message = failure.exitcode, _error_message(failure)
    if code in (2, _INTERRUPTED) and message:
        return ExitStatus(code, message)
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    reason = f"rank {rank} of {world_size} {how} at {failure.timestamp_isoformat()}"
    return ExitStatus(1, f"{reason}: {message}" if message else reason)


def _error_message(failure: Any) -> str:
    """Return the message that a rank stored with `leave_error`, or an empty string."""
    data = failure.error_file_data
    return data["message"] if isinstance(data.get("message"), str) and "timestamp" in data else ""
