"""What a layout costs a rank in memory, and an optimizer step in communication: estimates.

Memory: model states as `memory.states` counts them, the units gathered at once, the gradients that
are on their way, and the activations of one micro-batch. Communication: every collective of a step,
at the time measured for its size alone, one after the other. What computation hides, and what it
slows, is left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ..memory.states import StateBytes
from ..parallel.kept import kept_blocks

REDUCED_BYTES = 4  # gradients are reduced in float32

GATHER, GATHER_STAGED = "all-gather", "all-gather, two stages"
REDUCE, REDUCE_STAGED = "reduce-scatter", "reduce-scatter, two stages"
JOIN = "all-reduce"

Times = Mapping[tuple[str, int], float]
"""Seconds by collective and size of the unit in parameters; for one degree and backend."""


@dataclass(frozen=True)
class Work:
    """What is trained: sizes in parameters, and what one micro-batch takes on the slowest rank."""

    root: int
    """parameters outside the blocks"""
    blocks: tuple[int, ...]
    """parameters of each block"""
    gathered_bytes: int
    """bytes of a gathered parameter: 2 for bfloat16, 4 for float32"""
    activations: int
    """bytes kept from forward to backward, at their peak"""
    forward: float
    """seconds of one block"""
    backward: float
    """seconds of one block"""
    accumulation: int = 1
    """micro-batches per optimizer step"""
    two_hop: bool = True
    """replicas meet once per step, not after every micro-batch"""
    states: StateBytes = StateBytes()
    """what each parameter takes beside its gathered copy"""

    @property
    def parameters(self) -> int:
        return self.root + sum(self.blocks)

    @property
    def compute(self) -> float:
        """Seconds the blocks compute in one optimizer step."""
        return self.accumulation * len(self.blocks) * (self.forward + self.backward)


def held(work: Work, depth: int, kept: int) -> int:
    """Parameters gathered at once at most: the root unit, the first ``kept`` blocks, which stay,
    the block that computes and ``depth`` ahead of it."""
    moving = (1 + depth) * max(work.blocks)
    return min(work.parameters, work.root + sum(work.blocks[:kept]) + moving)


def beside_gathered(work: Work, degree: int, bucket: int = 0) -> int:
    """Bytes a rank needs for everything but gathered parameters.

    ``bucket``: parameters whose gradients may be under way; the largest unit's always may.
    """
    largest = max(work.root, *work.blocks)
    reduced = max(largest, min(bucket, work.parameters))
    gradients = largest * work.gathered_bytes + reduced * REDUCED_BYTES  # as computed, as sent
    return work.states.on_rank(work.parameters, degree) + work.activations + gradients


def needed(work: Work, degree: int, depth: int) -> int:
    """Bytes a rank needs with as little gathered, and as little on its way, as possible."""
    return beside_gathered(work, degree) + held(work, depth, 0) * work.gathered_bytes


def gathers(work: Work, kept: int) -> dict[int, int]:
    """How often units of each size (parameters) are gathered in one optimizer step.

    ``kept`` blocks, the first ones, stay gathered throughout; of the others the last serves forward
    and backward with one gather, and the first stays from one micro-batch to the next.
    """
    last, counts = len(work.blocks) - 1, {work.root: 1}
    for place, size in enumerate(work.blocks):
        if place < kept or last == 0:
            times = 1
        elif place == last:
            times = work.accumulation
        elif place == 0:
            times = 1 + work.accumulation
        else:
            times = 2 * work.accumulation
        counts[size] = counts.get(size, 0) + times
    return counts


def kept_with(work: Work, depth: int, live: int) -> int:
    """Blocks that stay gathered where ``live`` parameters may."""
    return kept_blocks([work.root, *work.blocks], depth, live)


@dataclass(frozen=True)
class Communication:
    """Seconds of communication in one optimizer step, by part."""

    gathers: float
    reductions: float
    joins: float

    @property
    def total(self) -> float:
        return self.gathers + self.reductions + self.joins


def communication(work: Work, times: Times, kept: int, way: str) -> Communication:
    """One optimizer step's, with ``hierarchical_all_gather = way``.

    Two stages where they were measured and ``way`` asks for them; gathers under ``auto`` where that
    is faster. Collectives that were not measured, because one rank does them alone, take no time.
    """
    units = [work.root, *work.blocks]
    joined = 1 if work.two_hop else work.accumulation
    return Communication(
        sum(count * _gather(times, size, way) for size, count in gathers(work, kept).items()),
        work.accumulation * sum(_reduction(times, size, way) for size in units),
        joined * sum(times.get((JOIN, size), 0.0) for size in units),
    )


def block_gather(work: Work, times: Times, way: str) -> float:
    """Seconds of the slowest gather of a block."""
    return max(_gather(times, size, way) for size in set(work.blocks))


def _gather(times: Times, size: int, way: str) -> float:
    flat = times.get((GATHER, size), 0.0)
    staged = times.get((GATHER_STAGED, size), flat)
    return {"on": staged, "off": flat, "auto": min(flat, staged)}[way]


def _reduction(times: Times, size: int, way: str) -> float:
    flat = times.get((REDUCE, size), 0.0)
    return flat if way == "off" else times.get((REDUCE_STAGED, size), flat)
