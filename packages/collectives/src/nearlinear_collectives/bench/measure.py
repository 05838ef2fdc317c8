"""Time contenders in turn: a block of back-to-back calls of A, one of B, one of A again, ...

The time of a block is that of its slowest rank; what is reported are the median and the minimum
over blocks. What else the machine does while a size is measured meets all contenders alike.
"""

import math
import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .backends import Contender
from .patterns import Job

MAX_CALLS = 10_000


@dataclass(frozen=True)
class Blocks:
    """How long to measure one size of one contender."""

    number: int = 8
    seconds: float = 0.03  # of a block; at least two calls, however long they take


@dataclass(frozen=True)
class Sample:
    """What was measured of one contender for one job."""

    contender: Contender
    pattern: str
    job: Job
    calls: int  # in a block
    seconds: list[float]  # per call, one entry per block
    wrong: int  # elements, over all ranks and both checks

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def minimum(self) -> float:
        return min(self.seconds)

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes per second of the job's size, as nccl-tests' algbw."""
        return self.job.bytes / self.median

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second that each rank's link would carry at best, as nccl-tests' busbw."""
        return self.algorithm_bandwidth * self.job.bus_factor


def measure(name: str, pattern, contenders: list[Contender], blocks: Blocks) -> list[Sample]:
    """Samples of one job, in the contenders' order. Collective over the default group.

    Each contender's result is checked before and after it is timed, with new data.
    """
    wrong = [_check(pattern, contender, salt=i) for i, contender in enumerate(contenders)]
    pattern.rest()
    first = slowest([_block(pattern, contender, 2) for contender in contenders])
    calls = [min(MAX_CALLS, max(2, math.ceil(blocks.seconds / t))) for t in first]
    times: list[list[float]] = []
    for _ in range(blocks.number):
        times.append(
            [_block(pattern, contender, n) for contender, n in zip(contenders, calls, strict=True)]
        )
    seconds = slowest([t for row in times for t in row])
    for i, contender in enumerate(contenders):
        wrong[i] += _check(pattern, contender, salt=len(contenders) + i)
    totals = torch.tensor(wrong)
    dist.all_reduce(totals)
    return [
        Sample(contender, name, pattern.job, calls[i], seconds[i :: len(contenders)], int(total))
        for i, (contender, total) in enumerate(zip(contenders, totals, strict=True))
    ]


def _check(pattern, contender: Contender, salt: int) -> int:
    pattern.fill(salt)
    dist.barrier()
    return pattern.job.wrong(pattern.call(contender), salt)


def _block(pattern, contender: Contender, calls: int) -> float:
    """Seconds per call on this rank. One call that is not timed lines the ranks up."""
    dist.barrier()
    pattern.call(contender)
    start = time.perf_counter()
    for _ in range(calls):
        pattern.call(contender)
    return (time.perf_counter() - start) / calls


def slowest(seconds: list[float]) -> list[float]:
    """Each time's maximum over ranks. Collective over the default group."""
    times = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return times.tolist()
