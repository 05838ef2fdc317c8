"""Checks of the installed software and of the node: compiler, engine, glue, memory, cores."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from .. import backend, build
from .. import engine_library as engine
from ..build import BuildError
from ..group import EngineGroup
from .finding import BROKEN, OFF, OK, SLOW, Finding

NATIVE = "all_gather, reduce_scatter, all_reduce, broadcast and barrier on CPU tensors"
SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def check_host() -> Iterator[Finding]:
    """Check the software, then the node; stop at the platform if it is not Linux."""
    if sys.platform != "linux":
        yield Finding(
            "platform",
            BROKEN,
            f"{sys.platform} does not have the system calls that the engine needs",
            "use Linux, in a container or a virtual machine; or the gloo backend",
        )
        return
    yield check_compiler()
    engine_finding = check_engine()
    yield engine_finding
    if engine_finding.state != BROKEN:
        yield check_glue()
    yield from check_torchcomms()
    yield check_shared_memory()
    yield check_huge_pages()
    yield check_pidfd()
    yield check_cores()
    yield check_vector_instructions()


# --- software ------------------------------------------------------------------------------------


def check_compiler() -> Finding:
    try:
        command = build.compiler()
    except BuildError as error:
        return Finding(
            "compiler",
            OFF,
            str(error).partition(":")[0],
            "only needed if no compiled library fits: " + str(error).partition(": ")[2],
        )
    return Finding("compiler", OK, command)


def check_engine() -> Finding:
    """Load the engine and run an all-reduce in a group of one rank."""
    try:
        path = build.engine_library()
        total = _reduce_on_one_rank()
    except (BuildError, ImportError, OSError) as error:
        return Finding(
            "engine",
            BROKEN,
            f"cannot be loaded: {_first_line(error)}",
            "install a C++ compiler, or a wheel that was built with one; "
            "python -m nearlinear_collectives.build prints the compiler's errors",
        )
    except RuntimeError as error:
        return Finding("engine", BROKEN, f"loads, but a group of one rank fails: {error}")
    if total != 2.0:
        return Finding(
            "engine", BROKEN, f"loads, but computes 1.0 * 2.0 = {total}", "please report this"
        )
    origin = "from the wheel" if path == build.SHIPPED else "compiled here"
    return Finding("engine", OK, f"{origin} ({path}); runs {NATIVE}")


def _reduce_on_one_rank() -> float:
    # HashStore is public, but missing from torch.distributed.__all__.
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    group = EngineGroup(store, 0, 1, timeout=timedelta(seconds=10), name="doctor")
    try:
        value = ctypes.c_float(1.0)
        group.run(
            engine.Call(
                kind=engine.ALL_REDUCE,
                dtype=engine.DTYPES.index("float32"),
                count=1,
                scale=2.0,
                output=ctypes.addressof(value),
                timeout_ms=engine.OWN_TIMEOUT,
            )
        )
        return value.value
    finally:
        group.close()


def check_glue() -> Finding:
    requested = os.environ.get("NEARLINEAR_COLLECTIVES_GLUE", "")
    slower = "calls go through Python, tens of microseconds slower each"
    if requested == "python":
        return Finding("glue", SLOW, f"NEARLINEAR_COLLECTIVES_GLUE=python: {slower}", "unset it")
    try:
        path = build.glue_library()
        backend.load_glue()
    except (BuildError, ImportError) as error:
        return Finding(
            "glue",
            SLOW,
            f"missing for torch {torch.__version__}: {_first_line(error)}. {slower}",
            "python -m nearlinear_collectives.build prints the details; a C++ compiler "
            "and Python's headers are needed once, also if the result is copied to other "
            "machines (NEARLINEAR_COLLECTIVES_CACHE names the folder)",
        )
    return Finding("glue", OK, f"compiled for torch {torch.__version__} ({path})")


def check_torchcomms() -> Iterator[Finding]:
    """Yield a finding only if torch bypasses the backend."""
    if backend.torchcomms_is_active():
        yield Finding(
            "torchcomms",
            BROKEN,
            "TORCH_DISTRIBUTED_USE_TORCHCOMMS is set and torchcomms is installed: torch bypasses "
            "every plugin, including this one",
            "unset TORCH_DISTRIBUTED_USE_TORCHCOMMS",
        )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(": ")


# --- the node ------------------------------------------------------------------------------------

# Script of a second process of this user, which opens this process's memory and offers its own.
NEIGHBOUR = """
import os, sys
theirs = os.open(f"/proc/{sys.argv[1]}/fd/{sys.argv[2]}", os.O_RDWR)
assert os.pread(theirs, 5, 0) == b"hello", "it does not hold the bytes that were written"
mine = os.memfd_create("nearlinear-doctor")
os.write(mine, b"world")
print(mine, flush=True)
sys.stdin.read()
"""


def check_shared_memory() -> Finding:
    """Check memfd_create, and /proc/<pid>/fd between two processes in both directions."""
    name = "shared memory"
    try:
        memory = os.memfd_create("nearlinear-doctor")
    except OSError as error:
        return Finding(
            name,
            BROKEN,
            f"memfd_create is refused: {error.strerror}",
            "allow it in the container's seccomp profile; it needs Linux 3.17 or newer",
        )
    try:
        os.write(memory, b"hello")
        refusal = _exchange_memory(memory)
    finally:
        os.close(memory)
    if refusal:
        return Finding(
            name,
            BROKEN,
            f"between two processes of this user: {refusal}",
            "run the ranks of a node as one user, with the same capabilities",
        )
    return Finding(
        name,
        OK,
        "two processes of this user can map each other's memory (memfd, /proc/<pid>/fd); "
        "the size of /dev/shm does not matter",
    )


def _exchange_memory(memory: int) -> str:
    """Open a second process's memory and let it open ``memory``; return the error, or ""."""
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", NEIGHBOUR, str(os.getpid()), str(memory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdin and child.stdout and child.stderr
    with child:
        answer = child.stdout.readline().strip()
        if not answer:
            return child.stderr.read().strip().rpartition("\n")[2] or "the second one ended"
        try:
            theirs = os.open(f"/proc/{child.pid}/fd/{answer}", os.O_RDWR)
        except OSError as error:
            return str(error)
        finally:
            child.stdin.close()
        with open(theirs, "rb") as file:
            found = os.pread(file.fileno(), 5, 0)
        return "" if found == b"world" else "it does not hold the bytes that were written"


def check_huge_pages() -> Finding:
    """Check that the engine's pool gets huge pages, by writing to it and asking the kernel."""
    name = "huge pages"
    try:
        setting = SHMEM_ENABLED.read_text().split("[")[1].partition("]")[0]
    except (OSError, IndexError):
        setting = "unknown"
    if huge_page_kilobytes(8 << 20):
        return Finding(name, OK, f"the pool is on 2 MiB pages ({SHMEM_ENABLED} is {setting})")
    return Finding(
        name,
        SLOW,
        f"shared memory is on 4 KiB pages ({SHMEM_ENABLED} is {setting}), which slows first "
        "touches and large copies",
        f"as root: echo advise > {SHMEM_ENABLED}; only memory that asks for it is affected",
    )


def huge_page_kilobytes(size: int) -> int:
    """Allocate ``size`` bytes from the engine's pool; return how many KiB are on huge pages."""
    try:
        library = engine.library()
    except (BuildError, ImportError):
        return 0
    memory = library.nlc_pool_allocate(size)
    if not memory:
        return 0
    try:
        ctypes.memset(memory, 1, size)
        return _mapped_huge_kilobytes(memory)
    finally:
        library.nlc_pool_free(memory)


def _mapped_huge_kilobytes(address: int) -> int:
    """Return the KiB on huge pages of the mapping that contains ``address``."""
    in_mapping = False
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            field, _, rest = line.partition(" ")
            if not field.endswith(":"):
                start, end = (int(part, 16) for part in field.split("-"))
                in_mapping = start <= address < end
            elif in_mapping and field == "ShmemPmdMapped:":
                return int(rest.split()[0])
    return 0


def check_pidfd() -> Finding:
    name = "death notices"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return Finding(
            name,
            SLOW,
            f"pidfd_open is refused ({error.strerror}): ranks poll /proc for each other instead",
            "allow it in the container's seccomp profile; it needs Linux 5.3 or newer",
        )
    return Finding(name, OK, "the kernel reports immediately when a rank of this node ends (pidfd)")


def check_cores() -> Finding:
    count, ranks = len(os.sched_getaffinity(0)), int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    message = f"{count} for this process"
    if ranks:
        message += f", {ranks} ranks on this node (LOCAL_WORLD_SIZE)"
    quota = cpu_quota()
    if quota and quota < count:
        return Finding(
            "cores",
            SLOW,
            f"{message}, but the container's quota is {quota:g}, and ranks that spin while they "
            "wait use it up",
            f"give the ranks dedicated cores (cpuset, taskset) or run at most "
            f"{max(1, int(quota))} ranks",
        )
    if ranks > count:
        return Finding(
            "cores",
            SLOW,
            f"{message}: ranks share cores, so waits sleep early and chunks are large",
            f"run at most {count} ranks on this node, or use more cores",
        )
    return Finding("cores", OK, f"{message}; more ranks than cores work too, but share them")


def cpu_quota() -> float | None:
    """Return the cores that this control group may use, or None without a limit."""
    try:
        quota, period = CPU_MAX.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):
        return None


def check_vector_instructions() -> Finding:
    """Report the vector instructions by which the engine selects its reduction loops."""
    name, machine = "vectors", platform.machine()
    if machine not in ("x86_64", "AMD64"):
        return Finding(name, OK, f"reductions use the compiler's default for {machine}")
    flags = set(
        Path("/proc/cpuinfo").read_text().partition("\nflags")[2].partition("\n")[0].split()
    )
    if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags:
        return Finding(name, OK, "reductions use AVX-512")
    if {"avx2", "f16c"} <= flags:
        return Finding(name, OK, "reductions use AVX2")
    return Finding(
        name,
        SLOW,
        "reductions use SSE2 only: this processor or virtual machine has no AVX2",
        "choose a machine type that passes the host's processor through",
    )
