"""Will it fit? An estimate made before anything runs."""

from . import machine
from .errors import UsageError
from .patterns import PATTERNS, Job
from .sizes import show

PROCESS = 400 * 2**20  # an interpreter with torch and a few groups, rounded up
INSIDE = 2  # times the size: what a backend may hold besides, such as gloo's copies


def need(jobs: list[tuple[str, Job]], local_ranks: int) -> tuple[int, Job | None]:
    """Bytes that the largest of (pattern, job) takes on this machine, and that job."""
    largest, which = 0, None
    for name, job in jobs:
        size = PATTERNS[name].memory(job) + INSIDE * job.bytes
        if size > largest:
            largest, which = size, job
    return local_ranks * (PROCESS + largest), which


def check(jobs: list[tuple[str, Job]], local_ranks: int) -> None:
    """UsageError when the machine's free memory is less than the estimate."""
    free = machine.memory_bytes()
    needed, job = need(jobs, local_ranks)
    if not free or needed <= free or job is None:
        return
    rest = free / local_ranks - PROCESS
    fits = max(0, int(job.bytes * rest / (needed / local_ranks - PROCESS)))
    advice = f"sizes up to {show(2 ** (fits.bit_length() - 1))} fit" if fits else "use fewer ranks"
    raise UsageError(
        f"{local_ranks} ranks with {job.operation} of {show(job.bytes)} need about "
        f"{needed / 2**30:.1f} GiB of memory and {free / 2**30:.1f} GiB are free: {advice} "
        "(--sizes), or --force to try"
    )
