"""The ranks: those that torchrun started, or processes of this machine that are started here.

Each rank is a fresh interpreter that runs the same command line; they meet at a TCP store on the
loopback interface. A rank that fails ends the others.
"""

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
from pathlib import Path

from .machine import usable_cores

_GRACE = 3.0  # seconds for the other ranks to notice and to say what they saw


def joined() -> bool:
    """Whether a launcher has made this process a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def local_ranks() -> int:
    """Ranks that share this machine, in a process that is a rank."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))


def start(module: str, arguments: list[str], ranks: int) -> int:
    """Run ``python -m module arguments`` as ranks of this machine; the exit status.

    Status 2 (a wrong request) wins over 1, whichever rank ended first.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ranks are ended below
    with tempfile.TemporaryDirectory(prefix="nearlinear-bench-") as folder:
        command = [sys.executable, "-m", module, *arguments, "--spawned", str(os.getpid()), folder]
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
            for child in children:  # all before any is waited for: who outlives others complains
                child.kill()
            for child in children:
                child.wait()


def _environment(rank: int, ranks: int) -> dict[str, str]:
    loopback = {}
    with contextlib.suppress(OSError):
        if any(name == "lo" for _, name in socket.if_nameindex()):
            loopback["GLOO_SOCKET_IFNAME"] = "lo"  # a machine whose name does not resolve
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
    failed_at = None
    while any(child.poll() is None for child in children):
        if failed_at is None and any(child.poll() for child in children):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > _GRACE:
            break
        time.sleep(0.05)
    codes = [child.poll() for child in children]
    for rank, code in enumerate(codes):
        if code is not None and code < 0:
            print(f"error: rank {rank} was ended by signal {-code}", file=sys.stderr)
    if 2 in codes:
        return 2
    return 1 if any(code != 0 for code in codes) else 0


def obey(parent: int) -> None:
    """In a rank started here: end with the process that started it, and leave Ctrl-C to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def meet(folder: Path | None, timeout: float):
    """Make the default process group, over gloo. ``folder``: where ranks started here meet."""
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
