"""What the node gives its ranks: shared memory, huge pages, word of a death, cores, vectors."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from nearlinear_collectives import engine_library as engine
from nearlinear_collectives.build import BuildError
from nearlinear_collectives.doctor.report import BROKEN, OK, SLOW, Finding

SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def findings() -> Iterator[Finding]:
    if sys.platform != "linux":
        return
    yield shared_memory()
    yield huge_pages()
    yield pidfd()
    yield cores()
    yield vectors()


# A second process of this user opens the first one's memory, and lends its own.
NEIGHBOUR = """
import os, sys
theirs = os.open(f"/proc/{sys.argv[1]}/fd/{sys.argv[2]}", os.O_RDWR)
assert os.pread(theirs, 5, 0) == b"hello", "it does not hold what was written"
mine = os.memfd_create("nearlinear-doctor")
os.write(mine, b"world")
print(mine, flush=True)
sys.stdin.read()
"""


def shared_memory() -> Finding:
    """memfd_create, and /proc/<pid>/fd between two processes in both directions."""
    name, remedy = (
        "shared memory",
        "ranks of a node must run as one user, with the same capabilities",
    )
    try:
        mine = os.memfd_create("nearlinear-doctor")
    except OSError as error:
        return Finding(
            name,
            BROKEN,
            f"memfd_create is refused: {error.strerror}",
            "allow it in the container's seccomp profile; Linux 3.17 or newer has it",
        )
    try:
        os.write(mine, b"hello")
        refusal = lend_and_borrow(mine)
    finally:
        os.close(mine)
    if refusal:
        return Finding(name, BROKEN, f"between two processes of this user: {refusal}", remedy)
    return Finding(
        name,
        OK,
        "two processes of this user can map each other's (memfd, /proc/<pid>/fd); "
        "the size of /dev/shm does not matter",
    )


def lend_and_borrow(mine: int) -> str:
    """Why two processes cannot open each other's memory; nothing if they can."""
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", NEIGHBOUR, str(os.getpid()), str(mine)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
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
        with open(theirs, "rb") as memory:
            return (
                ""
                if os.pread(memory.fileno(), 5, 0) == b"world"
                else "it does not hold what was written"
            )


def huge_pages() -> Finding:
    """Whether the engine's pool really gets them: some of it is written, and the kernel asked."""
    name = "huge pages"
    try:
        setting = SHMEM_ENABLED.read_text().split("[")[1].partition("]")[0]
    except (OSError, IndexError):
        setting = "unknown"
    huge = huge_kilobytes(8 << 20)
    if huge:
        return Finding(name, OK, f"the pool is on 2 MiB pages ({SHMEM_ENABLED} is {setting})")
    return Finding(
        name,
        SLOW,
        f"shared memory is on 4 KiB pages ({SHMEM_ENABLED} is {setting}): first "
        "touches and large copies take longer",
        f"as root: echo advise > {SHMEM_ENABLED}; only memory that asks for it is affected",
    )


def huge_kilobytes(size: int) -> int:
    """How much of ``size`` bytes from the engine's pool lies on huge pages."""
    try:
        library = engine.library()
    except (BuildError, ImportError):
        return 0
    memory = library.nlc_pool_allocate(size)
    if not memory:
        return 0
    try:
        ctypes.memset(memory, 1, size)
        return mapped_huge(memory)
    finally:
        library.nlc_pool_free(memory)


def mapped_huge(address: int) -> int:
    """Kilobytes on huge pages of the mapping that holds ``address``, from the kernel."""
    here = False
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            field, _, rest = line.partition(" ")
            if not field.endswith(":"):
                start, end = (int(part, 16) for part in field.split("-"))
                here = start <= address < end
            elif here and field == "ShmemPmdMapped:":
                return int(rest.split()[0])
    return 0


def pidfd() -> Finding:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return Finding(
            "word of deaths",
            SLOW,
            f"pidfd_open is refused ({error.strerror}): ranks look "
            "into /proc for each other instead",
            "allow it in the container's seccomp profile; Linux 5.3 or newer has it",
        )
    return Finding(
        "word of deaths", OK, "the kernel tells at once when a rank of this node ends (pidfd)"
    )


def cores() -> Finding:
    count, ranks = len(os.sched_getaffinity(0)), int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    says = f"{count} for this process"
    if ranks:
        says += f", {ranks} ranks on this node (LOCAL_WORLD_SIZE)"
    quota = cpu_quota()
    if quota and quota < count:
        return Finding(
            "cores",
            SLOW,
            f"{says}, but the container's quota is {quota:g}: ranks that spin "
            "while they wait spend it",
            f"give ranks cores of their own (cpuset, taskset) or "
            f"at most {max(1, int(quota))} ranks",
        )
    if ranks > count:
        return Finding(
            "cores",
            SLOW,
            f"{says}: they take turns, so waits sleep early and chunks are large",
            f"at most {count} ranks on this node, or more cores",
        )
    return Finding("cores", OK, f"{says}; more ranks than that work too, but take turns")


def cpu_quota() -> float | None:
    """Cores' worth of time this control group may use; ``None`` if that is not limited."""
    try:
        quota, period = CPU_MAX.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):
        return None


def vectors() -> Finding:
    """What the engine chooses its reduction loops by."""
    machine = platform.machine()
    if machine not in ("x86_64", "AMD64"):
        return Finding("vectors", OK, f"the compiler's own for {machine}")
    flags = set(
        Path("/proc/cpuinfo").read_text().partition("\nflags")[2].partition("\n")[0].split()
    )
    if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags:
        return Finding("vectors", OK, "reductions use AVX-512")
    if {"avx2", "f16c"} <= flags:
        return Finding("vectors", OK, "reductions use AVX2")
    return Finding(
        "vectors",
        SLOW,
        "reductions use SSE2 only: this processor, or virtual machine, has no AVX2",
        "choose a machine type that passes the host's processor through",
    )
