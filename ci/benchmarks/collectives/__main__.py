"""Command line of the collectives benchmark, and the processes that are its ranks.

Exit status: 0; 1 for wrong data or a failure; 2 for a wrong request. The ranks are those that
torchrun started, or processes started here: fresh interpreters that run the same command line and
meet at a TCP store on the loopback interface. The failure of one rank ends the others.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

from ci.benchmarks.collectives import options as command_line
from ci.benchmarks.collectives.options import MODULE, UsageError
from ci.benchmarks.collectives.record import usable_cores

GRACE_SECONDS = 3.0  # for the other ranks to notice a failure and to report it


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    first = os.environ.get("RANK", "0") == "0"
    try:
        options = command_line.parse(arguments)
        if options.spawned:
            _follow_parent(int(options.spawned[0]))
        elif not _is_rank():
            from ci.benchmarks.collectives import backends, session

            session.check_options(options, options.ranks, options.ranks)
            backends.compile_backends(backends.parse_backends(options.backends))
            return start_ranks(arguments, options.ranks)
    except UsageError as error:
        if first:
            print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return _run_rank(options, arguments, first)


def start_ranks(arguments: list[str], ranks: int) -> int:
    """Run this module as ``ranks`` processes on this machine, and return the exit status.

    Status 2 (a wrong request) takes precedence over 1, whichever rank ended first.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs the finally block below
    with tempfile.TemporaryDirectory(prefix="nearlinear-bench-") as folder:
        command = [sys.executable, "-m", MODULE, *arguments, "--spawned", str(os.getpid()), folder]
        children = [
            subprocess.Popen(
                command,
                env=_environment(rank, ranks),
                stdin=subprocess.DEVNULL,
                stdout=None if rank == 0 else subprocess.DEVNULL,
            )
            for rank in range(ranks)
        ]
        try:
            return _wait(children)
        finally:
            for child in children:  # kill all before waiting: survivors would log errors
                child.kill()
            for child in children:
                child.wait()


def _environment(rank: int, ranks: int) -> dict[str, str]:
    loopback = {}
    with contextlib.suppress(OSError):
        if any(name == "lo" for _, name in socket.if_nameindex()):
            loopback["GLOO_SOCKET_IFNAME"] = "lo"  # the machine's host name may not resolve
    return {
        "OMP_NUM_THREADS": str(max(1, usable_cores() // ranks)),
        **loopback,
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }


def _wait(children: list[subprocess.Popen]) -> int:
    """Wait for all ranks, or for a short time after the first failure; return the status."""
    failed_at = None
    while any(child.poll() is None for child in children):
        if failed_at is None and any(child.poll() for child in children):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > GRACE_SECONDS:
            break
        time.sleep(0.05)
    codes = [child.poll() for child in children]
    for rank, code in enumerate(codes):
        if code is not None and code < 0:
            print(f"error: rank {rank} was ended by signal {-code}", file=sys.stderr)
    if 2 in codes:
        return 2
    return 1 if any(code != 0 for code in codes) else 0


def _is_rank() -> bool:
    """Return True if a launcher such as torchrun made this process a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _local_ranks() -> int:
    """Return the number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))


def _follow_parent(parent: int) -> None:
    """End this rank when its parent process ends, and leave Ctrl-C to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def _run_rank(options: argparse.Namespace, arguments: list[str], first: bool) -> int:
    """Run one rank. A failed rank exits at once, because the others may be gone."""
    import torch.distributed as dist

    from ci.benchmarks.collectives import session

    try:
        session.check_options(options, int(os.environ["WORLD_SIZE"]), _local_ranks())
        init_control_group(Path(options.spawned[1]) if options.spawned else None, options.timeout)
        status = session.run(options, _without_spawned(arguments), _local_ranks())
        dist.barrier()
        dist.destroy_process_group()
        return status
    except UsageError as error:
        if first:
            print(f"error: {error}", file=sys.stderr, flush=True)
        status = 2
    except Exception as error:
        if not isinstance(error, RuntimeError):  # the class of a backend's own errors
            traceback.print_exc()
        notes = " ".join(["", *getattr(error, "__notes__", [])])
        print(f"\nerror: rank {os.environ['RANK']}{notes}: {error}", file=sys.stderr, flush=True)
        status = 1
    sys.stdout.flush()
    os._exit(status)


def init_control_group(folder: Path | None, timeout: float) -> None:
    """Create the default process group over gloo.

    Args:
        folder: Rendezvous folder of ranks started here; None under torchrun.
        timeout: Timeout in seconds.
    """
    import torch.distributed as dist

    limit = datetime.timedelta(seconds=timeout)
    if folder is None:
        dist.init_process_group("gloo", timeout=limit)
        return
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port = folder / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, ranks, True, limit, wait_for_workers=False)
        (folder / "port.new").write_text(str(store.port))
        (folder / "port.new").rename(port)
    else:
        deadline = time.monotonic() + timeout
        while not port.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank 0 did not start within {timeout:g} s")
            time.sleep(0.02)
        store = dist.TCPStore("127.0.0.1", int(port.read_text()), ranks, False, limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)


def _without_spawned(arguments: list[str]) -> list[str]:
    """Remove the internal option ``--spawned`` from a command line."""
    if "--spawned" not in arguments:
        return arguments
    at = arguments.index("--spawned")
    return arguments[:at] + arguments[at + 3 :]


if __name__ == "__main__":
    sys.exit(main())
