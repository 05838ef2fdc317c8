"""One step of a pipeline: what its stages hold, and when each does what `orders` have it do.

A step fills the pipeline once, or several times where a schedule is given few micro-batches at
once. Stages are sharded by FSDP2: gathered at their first use, reduced once a schedule has ended.
Where a rank's stages are more than may stay gathered, they are gathered for every micro-batch and
once more: a stage is freed after each forward pass, and not after a backward pass.
"""

from dataclasses import dataclass
from functools import cached_property

from ..parallel.pipeline.schedules import Plan
from . import orders
from .orders import BACKWARD, FORWARD, INPUTS, WEIGHTS
from .passes import Passes, Piece
from .step import (
    BUBBLE,
    COMPUTE,
    CONTEXT,
    EXPERT,
    GATHER,
    JOIN,
    PIPELINE,
    SCATTER,
    TENSOR,
    UPDATE,
    Step,
)
from .streams import Task, Timeline
from .workload import Workload

LAID_OUT = 3  # micro-batches for each rank, where a pipeline finds a steady pace


def run(
    plan: Plan,
    order: list[list[orders.Work]],
    seconds: dict[str, list[float]],
    send: float = 0.0,
    beside: bool = True,
) -> Timeline:
    """The timeline of ``order``, with the ``seconds`` of every stage for each kind of work.

    ``send``: seconds for a stage's output to reach the next one's rank, which computes meanwhile
    where it goes on ``beside``. Raises AssertionError for orders that wait for each other.
    """
    timeline, done, at = Timeline(), {}, [0] * len(order)
    left = sum(len(each) for each in order)
    while left:
        moved = False
        for rank, each in enumerate(order):
            while at[rank] < len(each):
                kind, stage, batch = each[at[rank]]
                before = _before(kind, stage, batch, plan.stages)
                if before is not None and before not in done:
                    break
                waits = [done[before]] if before is not None else []
                if waits and send and plan.rank_of(before[1]) != rank:
                    lane = f"to {rank} {before[0]}" if beside else f"rank {rank}"
                    waits = [timeline.add(PIPELINE, send, waits, lane, before[0])]
                took = seconds[kind][stage]
                task = timeline.add(COMPUTE, took, waits, f"rank {rank}", f"{kind} {batch}")
                done[_what(kind), stage, batch] = task
                at[rank], left, moved = at[rank] + 1, left - 1, True
        if not moved:
            raise AssertionError("the orders wait for each other")
    return timeline


def _what(kind: str) -> str:
    """Gradients of inputs are what is waited for, with those of weights or without."""
    return BACKWARD if kind == INPUTS else kind


def _before(kind: str, stage: int, batch: int, stages: int):
    """What this work waits for of other stages, or of its own earlier work."""
    if kind == FORWARD:
        return (FORWARD, stage - 1, batch) if stage else None
    if kind == WEIGHTS:
        return (BACKWARD, stage, batch)
    return (FORWARD, stage, batch) if stage == stages - 1 else (BACKWARD, stage + 1, batch)


@dataclass(frozen=True)
class Pipeline:
    """The stages of ``work``, with their seconds."""

    work: Workload
    parts: Passes

    @property
    def plan(self) -> Plan:
        return self.parts.stages.plan

    @property
    def blocks(self) -> tuple[float, ...]:
        """Of every stage."""
        return self.parts.stages.blocks

    @property
    def largest(self) -> float:
        """Blocks of the rank that has the most."""
        return self.parts.stages.most_blocks

    @cached_property
    def seconds(self) -> dict[str, list[float]]:
        """Of every stage, for each kind of work; the last one has the head."""
        parts, (there, back) = self.parts, self.parts.head
        forward = [count * waiting(parts.forward) for count in self.blocks]
        again = waiting(parts.again) + waiting(parts.backward)
        backward = [count * again for count in self.blocks]
        weights = [count * parts.weights for count in self.blocks]
        forward[-1] += there
        backward[-1] += back
        weights[-1] += parts.head_weights
        if self._gathers_again:
            first = forward if self.plan.schedule.all_at_once else backward
            for stage, count in enumerate(self.blocks):
                first[stage] += self._gathering(count, first[stage])
        inputs = [whole - put_off for whole, put_off in zip(backward, weights, strict=True)]
        return {FORWARD: forward, BACKWARD: backward, INPUTS: inputs, WEIGHTS: weights}

    @property
    def _gathers_again(self) -> bool:
        return self.parts.sharded and self.work.resharded

    @cached_property
    def waited(self) -> float:
        """Seconds that the rank with the most blocks waits for gathers of one micro-batch."""
        if not self._gathers_again:
            return 0.0
        parts = self.parts
        each = [parts.forward] if self.plan.schedule.all_at_once else [parts.again, parts.backward]
        computing = self.largest * sum(waiting(pieces) for pieces in each)
        return self._gathering(self.largest, computing)

    def _gathering(self, count: float, computing: float) -> float:
        """Seconds that a stage of ``count`` blocks waits for its parameters in one pass."""
        each = self.parts.gather_block
        if not self.work.prefetch:
            return count * each
        return each + max(0.0, (count - 1) * (each - computing / max(count, 1)))

    @cached_property
    def first_gather(self) -> float:
        """What a schedule begins with: the first block and the end it belongs to."""
        if not self.parts.sharded:
            return 0.0
        return self.parts.gather_block + self.parts.gather(max(self.parts.ends))

    @cached_property
    def gathers(self) -> float:
        """Seconds of all gathers of a step, of the rank that has the most."""
        if not self.parts.sharded:
            return 0.0
        whole = self.largest * self.parts.gather_block + self.parts.gather(max(self.parts.ends))
        times = len(self.work.fillings)
        return whole * (times + (self.work.passes if self._gathers_again else 0))

    @cached_property
    def reduction(self) -> float:
        """Seconds of what ends a schedule: gradients go to the ranks that keep them."""
        if not self.parts.sharded:
            return 0.0
        return self.largest * self.parts.reduce_block + self.parts.reduce(max(self.parts.ends))

    @cached_property
    def join(self) -> float:
        """Seconds of what ends a step, the all-reduce over replicas."""
        return self.largest * self.parts.join_block + self.parts.join(max(self.parts.ends))

    def filling(self, count: int) -> tuple[Timeline, float]:
        """A schedule of ``count`` micro-batches: as much of it as is laid out, and all its seconds.

        Once a pipeline is full, as many micro-batches as it has ranks take as long as those before.
        """
        ranks = self.plan.ranks
        even = orders.round_of(self.plan, count) in (ranks, count)
        if count <= (LAID_OUT + 1) * ranks or not even:
            timeline = self._laid_out(count)
            return timeline, timeline.end
        laid = LAID_OUT * ranks + count % ranks
        timeline = self._laid_out(laid)
        more = timeline.end - self._laid_out(laid - ranks).end
        return timeline, timeline.end + more * (count - laid) / ranks

    def _laid_out(self, count: int) -> Timeline:
        order = orders.orders(self.plan, count)
        sending, work = self.parts.handing_on, self.work
        return run(self.plan, order, self.seconds, sending, work.overlapped_sends)


def pipelined(work: Workload, parts: Passes) -> Step:
    """A step of ``work``: see `step.step`."""
    line = Pipeline(work, parts)
    seconds = {count: line.filling(count)[1] for count in set(work.fillings)}
    timeline, last = line.filling(work.fillings[-1])
    before = sum(seconds[count] for count in work.fillings) - last
    before += (len(work.fillings) - 1) * (line.first_gather + line.reduction)
    left_out = last - timeline.end
    laid = sum(task.label.startswith(FORWARD) for task in timeline.tasks if task.lane == "rank 0")
    after = _reductions(timeline, line)
    timeline.add(UPDATE, parts.update, [after])
    total = timeline.end + left_out + before + line.first_gather + parts.tie
    return Step(total, timeline, laid // work.virtual, work, parts)


def waiting(pieces: list[Piece]) -> float:
    """Seconds of a block with everything that its stage waits for."""
    return sum(max(p.compute, p.context) + p.tensor + p.expert for p in pieces)


def _reductions(timeline: Timeline, line: Pipeline) -> Task:
    """Those at a step's end: beside all but the first block of the last backward pass, or after."""
    work, final = line.work, max(timeline.tasks, key=lambda task: task.end)
    room = final.seconds * (1 - 1 / max(line.largest, 1)) if work.overlapped_reduce else 0.0
    start, last = final.end - room, final
    for kind, seconds in ((SCATTER, line.reduction), (JOIN, line.join)):
        if seconds:
            last = timeline.place(Task(kind, start, start + seconds, "network"))
            start = last.end
    return max(final, last, key=lambda task: task.end)


def accounts(step: Step) -> tuple[dict[str, float], dict[str, float]]:
    """Where the slowest rank's time goes: see `Step.busy` and `Step.exposed`."""
    work, parts = step.work, step.parts
    line, times = Pipeline(work, parts), len(work.fillings)
    blocks = work.passes * line.largest
    pieces = [*parts.forward, *parts.again, *parts.backward]
    ends = {task.kind: task.end for task in step.timeline.tasks}
    computed = max(task.end for task in step.timeline.tasks if task.kind == COMPUTE)
    busy = {
        COMPUTE: blocks * sum(p.compute for p in pieces) + work.passes * sum(parts.head),
        TENSOR: blocks * sum(p.tensor for p in pieces),
        EXPERT: blocks * sum(p.expert for p in pieces),
        CONTEXT: blocks * sum(p.context for p in pieces),
        PIPELINE: work.passes * 2 * work.virtual * parts.handing_on + parts.tie,
        GATHER: line.gathers,
        SCATTER: times * line.reduction,
        JOIN: line.join,
        UPDATE: parts.update,
    }
    scattered = max(0.0, ends.get(SCATTER, 0.0) - computed)
    exposed = {
        TENSOR: busy[TENSOR],
        EXPERT: busy[EXPERT],
        PIPELINE: parts.tie if work.overlapped_sends else busy[PIPELINE],
        CONTEXT: blocks * sum(max(0.0, p.context - p.compute) for p in pieces),
        GATHER: times * line.first_gather + work.passes * line.waited,
        SCATTER: scattered + (times - 1) * line.reduction,
        JOIN: max(0.0, ends.get(JOIN, 0.0) - max(computed, ends.get(SCATTER, 0.0))),
        UPDATE: parts.update,
    }
    exposed[BUBBLE] = max(0.0, step.seconds - busy[COMPUTE] - sum(exposed.values()))
    return tuple({kind: value for kind, value in each.items() if value} for each in (busy, exposed))
