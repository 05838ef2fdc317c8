"""Places in which the ranks of the lab run: this machine, emulated nodes, a memory cgroup.

Faults of the network and of /dev/shm need emulated nodes, see `ci.emulation.cluster`, and those of
memory a cgroup. Ranks are forked from one server, and enter their place before they do anything.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from ci.emulation.cluster import Cluster, processors, unavailable_reason
from nearlinear.distributed.process_exit import memory_cgroup

_NAMESPACES = {"net": 0x40000000, "uts": 0x04000000, "ipc": 0x08000000, "mnt": 0x00020000}
"""Kinds of namespaces that make up a node, with their flags (linux/sched.h)."""
_ports = itertools.count(29600)


@dataclass(frozen=True)
class Place:
    """Surroundings of two ranks.

    A rank holds no other reference to its place: this object travels to it by pickle.
    """

    name: str
    holds_store: bool = False
    """True if the lab holds the job's store, as launchers do; otherwise rank 0 does."""
    nodes: tuple[int, ...] = ()
    """Process that holds the node of each rank; empty for this machine."""
    address: str = "127.0.0.1"
    """Address of rank 0."""
    cgroup: str = ""
    """Folder of a cgroup that limits the ranks' memory, or empty."""
    backend: str = "auto"
    """The setting ``communication_backend``."""

    def enter(self, rank: int) -> None:
        """Move the calling process, which has one thread, into this place."""
        if self.cgroup:
            Path(self.cgroup, "cgroup.procs").write_text(str(os.getpid()))
        if not self.nodes:
            return
        processors.join(self.nodes[rank])
        libc = ctypes.CDLL(None, use_errno=True)
        folder = os.getcwd()
        for kind, flag in _NAMESPACES.items():
            with open(f"/proc/{self.nodes[rank]}/ns/{kind}", "rb") as file:
                if libc.setns(file.fileno(), flag):
                    raise OSError(ctypes.get_errno(), f"cannot enter the {kind} namespace")
        os.chdir(folder)  # entering a mount namespace changes it

    def variables(self, rank: int) -> dict[str, str]:
        """Return the environment variables of ``rank`` that differ from those of one machine."""
        if len(set(self.nodes)) < 2:
            return {}
        return {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank),
                "GLOO_SOCKET_IFNAME": "eth0"}  # fmt: skip

    def port(self) -> int | None:
        """Return a port for the store on a node, which others do not use; None elsewhere."""
        return next(_ports) if self.nodes else None


HERE = Place("rank 0")
LAUNCHER = Place("launcher", holds_store=True)


@dataclass
class Places:
    """The open places of one lab, by name, and the cluster of those that have one."""

    opened: dict[str, Place]
    cluster: Cluster | None = None


@contextlib.contextmanager
def open_places(names: set[str]) -> Iterator[tuple[Places, dict[str, str]]]:
    """Open the places ``names``; also return the reason for each one that cannot be opened."""
    places, missing = Places({"launcher": LAUNCHER, "rank 0": HERE}), {}
    with contextlib.ExitStack() as stack:
        for name in sorted(names - places.opened.keys()):
            if reason := _OPENERS[name].unavailable():
                missing[name] = reason
            else:
                stack.enter_context(_OPENERS[name].open(places))
        yield places, missing


@contextlib.contextmanager
def _nodes(places: Places) -> Iterator[None]:
    """Open two nodes with one rank each; rank 0 holds the store, as under Slurm."""
    with Cluster(2) as cluster:
        places.cluster = cluster
        holders = cluster.holder(0), cluster.holder(1)
        places.opened["nodes"] = Place("nodes", nodes=holders, address=cluster.address(0))
        yield


@contextlib.contextmanager
def _full_shm(places: Places) -> Iterator[None]:
    """Open one node with both ranks and a full /dev/shm, and nearlinear-collectives on it."""
    with Cluster(1) as cluster:
        holder = cluster.holder(0)
        fill_shm(holder)
        places.opened["shm"] = Place("shm", nodes=(holder, holder), backend="nearlinear")
        yield


def fill_shm(holder: int) -> None:
    """Fill /dev/shm of the node that process ``holder`` holds, to the last byte."""
    fill = "mount -o remount,size=1m /dev/shm; cat /dev/zero > /dev/shm/ballast"
    command = ["nsenter", f"--target={holder}", "--mount", "sh", "-c", fill]
    done = subprocess.run(command, capture_output=True, text=True)
    if "No space left" not in done.stderr:
        raise RuntimeError(f"/dev/shm is not full: {done.stderr}")


@contextlib.contextmanager
def _cgroup(places: Places) -> Iterator[None]:
    """Open a cgroup for the memory of both ranks."""
    parent, _ = memory_cgroup()
    assert parent is not None
    folder = parent / f"nearlinear-faults-{os.getpid()}"
    folder.mkdir()
    try:
        places.opened["cgroup"] = Place("cgroup", holds_store=True, cgroup=str(folder))
        yield
    finally:
        folder.rmdir()


def limit_memory(cgroup: str, more: int | None) -> None:
    """Let the processes of ``cgroup`` have ``more`` bytes beyond their own; None: no limit."""
    folder = Path(cgroup)
    current, limit = folder / "memory.current", folder / "memory.max"
    unlimited = "max"
    if not limit.exists():
        current, limit = folder / "memory.usage_in_bytes", folder / "memory.limit_in_bytes"
        unlimited = "-1"
    limit.write_text(unlimited if more is None else str(int(current.read_text()) + more))


def _no_cgroup() -> str:
    """Return the reason why no cgroup can be made here, or an empty string."""
    parent, _ = memory_cgroup()
    if parent is None:
        return "this process has no memory cgroup"
    folder = parent / f"nearlinear-trial-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        return f"a cgroup cannot be made: {error.strerror}"
    try:
        limits = ("memory.max", "memory.limit_in_bytes")
        if not any((folder / name).exists() for name in limits):
            return f"the memory controller is not delegated to children of {parent}"
    finally:
        folder.rmdir()
    return ""


def _no_engine() -> str:
    """Return the reason why the ranks of a node cannot use nearlinear-collectives, or ""."""
    if reason := unavailable_reason():
        return reason
    try:
        from nearlinear_collectives.engine_library import library

        library()
    except (ImportError, OSError, RuntimeError) as error:
        return f"nearlinear-collectives is not available: {error}"
    return ""


@dataclass(frozen=True)
class _Opener:
    open: Callable[[Places], AbstractContextManager[None]]
    unavailable: Callable[[], str | None]


_OPENERS = {
    "nodes": _Opener(_nodes, unavailable_reason),
    "shm": _Opener(_full_shm, _no_engine),
    "cgroup": _Opener(_cgroup, _no_cgroup),
}
