"""Choose the layout of a job from measurements: pure functions.

Every shard degree that fits in memory is tried with every backend, and the pair with the least
estimated communication per optimizer step wins. Whether gathers go in two stages, how far they run
ahead and what stays gathered follow for each pair; `reasons` says why, in words.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..backends import IN_HOST_MEMORY
from ..config import Config
from ..errors import ConfigError
from . import estimate
from .estimate import Communication, Times, Work

LIVE_SHARE = 0.5  # for gathered parameters, of the memory left beside everything else
BUCKET_SHARE = 0.25  # for gradients on their way, of the memory left beside what must be
DEEPEST = 4  # blocks gathered ahead, at most
WAYS = ("off", "on", "auto")  # of equals the first

Measured = Mapping[tuple[int, str], Times]
"""Times by shard degree and backend."""


@dataclass(frozen=True)
class Job:
    """Where the run stands, and what it was told."""

    world: int
    """ranks"""
    memory: int
    """bytes a rank may use for training, the least of all ranks"""
    config: Config
    backend: str
    """what the config's communication_backend stands for on this device"""
    device: str = "cpu"
    """its type"""

    def on_lanes(self, degree: int) -> bool:
        """Whether communication goes on beside computation by `parallel.lane`."""
        return self.device == "cpu" and self.config.overlap_communication and degree > 1


@dataclass(frozen=True)
class Layout:
    """A shard degree over a backend, the settings that follow, and what they come to."""

    degree: int
    backend: str
    way: str
    """hierarchical_all_gather"""
    depth: int
    """prefetch_depth"""
    live: int
    """sdp_max_live_parameters"""
    bucket: int
    """sdp_reduce_bucket_size"""
    kept: int
    """blocks that stay gathered for a whole step"""
    memory: int
    """bytes a rank needs"""
    step: Communication
    """of one optimizer step"""


def divisors(world: int) -> list[int]:
    return [degree for degree in range(1, world + 1) if world % degree == 0]


def degrees_that_fit(work: Work, job: Job) -> list[int]:
    """The shard degrees that divide the ranks and leave each with enough memory.

    Raises ConfigError where there is none.
    """
    fitting = [d for d in divisors(job.world) if estimate.needed(work, d, 1) <= job.memory]
    if not fitting:
        raise ConfigError(
            f"the model does not fit: at hybrid_shard_degree = {job.world} a rank needs about "
            f"{estimate.needed(work, job.world, 1) / 2**30:.2f} GiB and has "
            f"{job.memory / 2**30:.2f}: start more ranks, or lower batch.micro_batch_size"
        )
    return fitting


def layouts(work: Work, job: Job, measured: Measured) -> list[Layout]:
    """The best layout of every degree and backend that was measured, degrees ascending."""
    return [
        layout(work, job, degree, backend, times)
        for (degree, backend), times in sorted(measured.items())
    ]


def layout(work: Work, job: Job, degree: int, backend: str, times: Times) -> Layout:
    """The settings with the least communication for one degree and backend."""
    found, memory = [], job.memory
    for way in WAYS if staged(times) else ("auto",):
        gather = estimate.block_gather(work, times, in_effect(way, backend))
        depth = prefetch_depth(work, memory, degree, gather)
        bucket = reduce_bucket(work, job, degree, depth)
        live = live_parameters(work, memory, degree, depth, bucket)
        found.append(with_settings(work, degree, backend, times, (way, depth, live, bucket)))
    return best(found)


def layout_asked_for(work: Work, job: Job, measured: Measured) -> Layout | None:
    """What the config asks for now; None where its degree does not fit."""
    asked = job.config
    degree = asked.hybrid_shard_degree or job.world
    times = measured.get((degree, job.backend))
    if times is None:
        return None
    live = asked.sdp_max_live_parameters
    bucket = asked.sdp_reduce_bucket_size if job.on_lanes(degree) else 0
    rest = asked.hierarchical_all_gather, asked.prefetch_depth, live, bucket
    return with_settings(work, degree, job.backend, times, rest)


def with_settings(work: Work, degree: int, backend: str, times: Times, rest: tuple) -> Layout:
    """The `Layout` of a degree and backend with ``rest``: way, depth, live, bucket."""
    way, depth, live, bucket = rest
    kept = estimate.kept_with(work, depth, live)
    gathered = estimate.held(work, depth, kept) * work.gathered_bytes
    memory = estimate.beside_gathered(work, degree, bucket) + gathered
    step = estimate.communication(work, times, kept, in_effect(way, backend))
    return Layout(degree, backend, way, depth, live, bucket, kept, memory, step)


def in_effect(way: str, backend: str) -> str:
    """What ``hierarchical_all_gather = way`` comes to: left alone, gathers of the collectives
    package stay in one stage, for inside they are made of two."""
    return "off" if (way, backend) == ("auto", IN_HOST_MEMORY) else way


def best(layouts: list[Layout]) -> Layout:
    """The one with the least communication; of equals the one that needs the least memory."""
    return min(layouts, key=lambda layout: (layout.step.total, layout.memory))


def can_hide(work: Work, job: Job, layout: Layout) -> float:
    """Seconds of a step's communication that can go on beside the blocks' computation, at most.

    None on the CPU where that is switched off, or where states are not sharded.
    """
    beside = job.device != "cpu" or job.on_lanes(layout.degree)
    return min(layout.step.total, work.compute) if beside else 0.0


def staged(times: Times) -> bool:
    """Whether gathers in two stages were measured."""
    return any(collective == estimate.GATHER_STAGED for collective, _ in times)


def prefetch_depth(work: Work, memory: int, degree: int, gather: float) -> int:
    """Blocks to gather ahead: as many as compute while one gather runs, if memory allows.

    ``gather``: seconds of one block's. At least 1, at most `DEEPEST`.
    """
    depth = math.ceil(gather / work.forward) if work.forward > 0 else 1
    depth = max(1, min(depth, DEEPEST, len(work.blocks) - 1))
    while depth > 1 and estimate.needed(work, degree, depth) > memory:
        depth -= 1
    return depth


def reduce_bucket(work: Work, job: Job, degree: int, depth: int) -> int:
    """What the config allows, or as many parameters as `BUCKET_SHARE` does if that is less.

    0 where reductions are not ours.
    """
    if not job.on_lanes(degree):
        return 0
    asked = job.config.sdp_reduce_bucket_size
    free = job.memory - estimate.needed(work, degree, depth)
    allowed = int(BUCKET_SHARE * max(0, free)) // estimate.REDUCED_BYTES
    return asked if min(asked, work.parameters) <= allowed else allowed


def live_parameters(work: Work, memory: int, degree: int, depth: int, bucket: int = 0) -> int:
    """The fewest live parameters that keep as many blocks gathered as `LIVE_SHARE` allows.

    0 where that is none.
    """
    free = memory - estimate.beside_gathered(work, degree, bucket)
    allowed = int(LIVE_SHARE * max(0, free)) // work.gathered_bytes
    kept = estimate.kept_with(work, depth, allowed)
    return estimate.held(work, depth, kept) if kept else 0
