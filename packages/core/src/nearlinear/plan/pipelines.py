"""One step of a pipeline: what its stages hold, and how long they take over it in `flow`'s order.

A step fills the pipeline once, or several times where a schedule is given few micro-batches at
once. Stages are sharded by FSDP2: gathered at their first use, reduced once a schedule has ended.
Where a rank's stages are more than may stay gathered, they are gathered for every micro-batch and
once more: a stage is freed after each forward pass, and not after a backward pass.
"""

from dataclasses import dataclass
from functools import cached_property

from ..parallel.pipeline.schedules import Plan
from . import orders
from .flow import flow, run, timeline_of
from .orders import BACKWARD, FORWARD, INPUTS, WEIGHTS
from .passes import Passes, Piece
from .step import (
    BUBBLE,
    COMPUTE,
    CONTEXT,
    EXPERT,
    GATHER,
    JOIN,
    OFFLOAD,
    PIPELINE,
    SCATTER,
    TENSOR,
    UPDATE,
    Step,
)
from .streams import Task, Timeline
from .workload import Workload

LAID_OUT = 3  # micro-batches for each rank, where a pipeline finds a steady pace


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
        again, whole = waiting(parts.again), waiting(parts.backward)
        forward = self._of_stages(waiting(parts.forward), there)
        backward = self._of_stages(again + whole, back)
        # cut in two, a backward pass computes again for each half
        inputs = self._of_stages(again + whole - parts.weights, back - parts.head_weights)
        weights = self._of_stages(again + parts.weights, parts.head_weights)
        if self._gathers_again:
            early = [forward] if self.plan.schedule.all_at_once else [backward, inputs]
            for stage, count in enumerate(self.blocks):
                for first in early:
                    first[stage] += self._gathering(count, first[stage])
        inputs[0], weights[0] = 0.0, backward[0]  # nobody asks for gradients of tokens
        return {FORWARD: forward, BACKWARD: backward, INPUTS: inputs, WEIGHTS: weights}

    @property
    def copying(self) -> float:
        """Seconds that a block of one micro-batch waits for copies, not cut in two."""
        parts = self.parts
        there, back = waiting(parts.forward), waiting(parts.again) + waiting(parts.backward)
        if self.work.copies_in_line:
            return 2 * parts.copy
        return max(0.0, parts.copy - there) + max(0.0, parts.copy - back)

    def _of_stages(self, block: float, head: float) -> list[float]:
        """Seconds of a pass, ``block`` each, that copies go beside or between; and the head's."""
        copy = self.parts.copy
        each = block + copy if self.work.copies_in_line else max(block, copy)
        found = [count * each for count in self.blocks]
        found[-1] += head
        return found

    @cached_property
    def twice(self) -> float:
        """The share of backward passes that are cut in two."""
        done = flow(self.plan, self.laid_out(self.work.fillings[-1])).work
        passes = sum(kind == FORWARD for kind, _, _ in done)
        return sum(kind == WEIGHTS and stage > 0 for kind, stage, _ in done) / passes

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

    def laid_out(self, count: int) -> int:
        """Of ``count`` micro-batches of a schedule, those that are simulated.

        Once a pipeline is full, as many as it has ranks take as long as those before.
        """
        ranks = self.plan.ranks
        even = orders.round_of(self.plan, count) in (ranks, count)
        few = count <= (LAID_OUT + 1) * ranks or not even
        return count if few else LAID_OUT * ranks + count % ranks

    def filling(self, count: int) -> float:
        """Seconds of a schedule of ``count`` micro-batches."""
        laid, ranks = self.laid_out(count), self.plan.ranks
        end = self._end(laid)
        if laid == count:
            return end
        return end + (end - self._end(laid - ranks)) * (count - laid) / ranks

    def _end(self, count: int) -> float:
        return run(flow(self.plan, count), *self.sends)[0]

    @property
    def sends(self) -> tuple:
        """Everything that `run` asks for."""
        return self.seconds, self.parts.handing_on, self.work.overlapped_sends


def pipelined(work: Workload, parts: Passes) -> Step:
    """A step of ``work``: see `step.step`."""
    line = Pipeline(work, parts)
    took = {count: line.filling(count) for count in set(work.fillings)}
    between = (len(work.fillings) - 1) * line.reduction
    gathers = len(work.fillings) * line.first_gather
    hidden, after = _ending(line)
    running = sum(took[count] for count in work.fillings) + between + gathers
    seconds = running + max(0.0, after - hidden) + parts.tie + parts.update
    laid = line.laid_out(work.fillings[-1])
    return Step(seconds, lambda: _drawn(line, laid), laid, work, parts)


def _ending(line: Pipeline) -> tuple[float, float]:
    """Of the reductions that end a step: seconds beside the last backward pass, and in all.

    All but that of its first block can go beside it.
    """
    last = line.seconds[BACKWARD][0]
    room = last * (1 - 1 / max(line.blocks[0], 1)) if line.work.overlapped_reduce else 0.0
    return room, line.reduction + line.join


def _drawn(line: Pipeline, count: int) -> Timeline:
    """The last filling, ``count`` micro-batches of it, and what ends the step."""
    timeline = timeline_of(flow(line.plan, count), *line.sends)
    last = max(timeline.tasks, key=lambda task: task.end)
    start = last.end - _ending(line)[0]
    for kind, seconds in ((SCATTER, line.reduction), (JOIN, line.join)):
        if seconds:
            start = timeline.place(Task(kind, start, start + seconds, "network")).end
    start = max(start, last.end)
    timeline.place(Task(UPDATE, start, start + line.parts.update, UPDATE))
    return timeline


def waiting(pieces: list[Piece]) -> float:
    """Seconds of a block with everything that its stage waits for."""
    return sum(piece.seconds for piece in pieces)


def accounts(step: Step) -> tuple[dict[str, float], dict[str, float]]:
    """Where the slowest rank's time goes: see `Step.busy` and `Step.exposed`."""
    work, parts = step.work, step.parts
    line, times = Pipeline(work, parts), len(work.fillings)
    blocks = work.passes * line.largest
    pieces = [(1.0, piece) for piece in (*parts.forward, *parts.backward)]
    pieces += [(1.0 + line.twice, piece) for piece in parts.again]
    hidden, _ = _ending(line)
    busy = {
        COMPUTE: blocks * sum(n * p.compute for n, p in pieces) + work.passes * sum(parts.head),
        TENSOR: blocks * sum(n * p.tensor for n, p in pieces),
        EXPERT: blocks * sum(n * p.expert for n, p in pieces),
        CONTEXT: blocks * sum(n * (p.context + p.at_once) for n, p in pieces),
        OFFLOAD: blocks * (2 + line.twice) * parts.copy,
        PIPELINE: work.passes * 2 * work.virtual * parts.handing_on + parts.tie,
        GATHER: line.gathers,
        SCATTER: times * line.reduction,
        JOIN: line.join,
        UPDATE: parts.update,
    }
    exposed = {
        TENSOR: busy[TENSOR],
        EXPERT: busy[EXPERT],
        PIPELINE: parts.tie if work.overlapped_sends else busy[PIPELINE],
        CONTEXT: blocks * sum(n * (max(0.0, p.context - p.compute) + p.at_once) for n, p in pieces),
        OFFLOAD: blocks * line.copying,
        GATHER: times * line.first_gather + work.passes * line.waited,
        SCATTER: max(0.0, line.reduction - hidden) + (times - 1) * line.reduction,
        JOIN: max(0.0, line.join - max(0.0, hidden - line.reduction)),
        UPDATE: parts.update,
    }
    exposed[BUBBLE] = max(0.0, step.seconds - busy[COMPUTE] - sum(exposed.values()))
    return tuple({kind: value for kind, value in each.items() if value} for each in (busy, exposed))
