"""Time of one optimizer step of a pipeline: the task graph of a schedule, simulated.

A step runs the schedule once, or several times if few micro-batches may be active at once. Stages
are sharded by FSDP2: gathered at first use, reduced when the schedule has ended. If a rank's stages
exceed the limit of live parameters, they are gathered for every micro-batch and once more, because
a stage is freed after each forward pass and not after a backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from ..pipeline_parallel.schedules import (
    BACKWARD,
    FORWARD,
    INPUTS,
    WEIGHTS,
    PipelineSchedule,
    StagePass,
    pass_orders,
    round_size,
)
from .block_time import BlockTimes, ComputeSegment
from .timeline import (
    ALL_GATHER,
    ALL_REDUCE,
    BUBBLE,
    COMPUTE,
    CONTEXT,
    EXPERT,
    OFFLOAD,
    PIPELINE,
    REDUCE_SCATTER,
    TENSOR,
    UPDATE,
    Seconds,
    StepTime,
    Task,
    Timeline,
)
from .workload import Workload

KINDS = (FORWARD, BACKWARD, INPUTS, WEIGHTS)
SIMULATED = 3  # micro-batches per rank after which a pipeline has reached its steady state


class GraphTask(NamedTuple):
    """Pass of a task graph."""

    rank: int
    duration: int
    """Index of its duration: stages by `KINDS`."""
    dependency: int
    """Index of the task it waits for, or -1."""
    link: int
    """Index of the link that brings its input from another rank, or -1."""


@dataclass(frozen=True)
class TaskGraph:
    """Passes of all ranks in an order that respects dependencies; `simulate` adds times."""

    plan: PipelineSchedule
    passes: list[StagePass]
    tasks: list[GraphTask]


@lru_cache(maxsize=256)
def task_graph(plan: PipelineSchedule, micro_batches: int) -> TaskGraph:
    """Build the task graph of a schedule. Raises AssertionError if its orders deadlock."""
    order = pass_orders(plan, micro_batches)
    graph, places, at = TaskGraph(plan, [], []), {}, [0] * plan.ranks
    left = sum(map(len, order))
    while left:
        moved = False
        for rank, each in enumerate(order):
            while at[rank] < len(each):
                kind, stage, batch = each[at[rank]]
                before = _dependency(kind, stage, batch, plan.stages)
                if before is not None and before not in places:
                    break
                places[BACKWARD if kind == INPUTS else kind, stage, batch] = len(graph.passes)
                remote = before is not None and plan.rank_of(before[1]) != rank
                link = -1
                if before is not None and remote:
                    link = 2 * rank + (before[0] == BACKWARD)
                duration = KINDS.index(kind) * plan.stages + stage
                dependency = -1 if before is None else places[before]
                graph.passes.append(each[at[rank]])
                graph.tasks.append(GraphTask(rank, duration, dependency, link))
                at[rank], left, moved = at[rank] + 1, left - 1, True
        if not moved:
            raise AssertionError("the orders of the pipeline ranks deadlock")
    return graph


def _dependency(kind: str, stage: int, batch: int, stages: int) -> StagePass | None:
    """Return the pass that must end before this one, or None."""
    if kind == FORWARD:
        return (FORWARD, stage - 1, batch) if stage else None
    if kind == WEIGHTS:
        return (BACKWARD, stage, batch)
    return (FORWARD, stage, batch) if stage == stages - 1 else (BACKWARD, stage + 1, batch)


def simulate(
    graph: TaskGraph, seconds: dict[str, list[float]], send: float = 0.0, overlapped: bool = True
) -> tuple[float, list[float], list[float]]:
    """Return the makespan, the end of every task and the arrival of its input.

    Args:
        graph: The task graph.
        seconds: Duration of each kind of pass, by stage.
        send: Seconds to send a stage's output to the next stage.
        overlapped: Whether the receiving rank computes during a send.
    """
    free, links = [0.0] * graph.plan.ranks, [0.0] * (2 * graph.plan.ranks)
    durations = [value for kind in KINDS for value in seconds[kind]]
    ends, arrivals = [], []
    # runs a million times in a fit: no calls in this loop
    for rank, duration, dependency, link in graph.tasks:
        start = free[rank]
        ready = ends[dependency] if dependency >= 0 else 0.0
        if link >= 0:
            earlier = links[link] if overlapped else start
            ready = (earlier if earlier > ready else ready) + send
            links[link] = ready
        end = (ready if ready > start else start) + durations[duration]
        free[rank] = end
        ends.append(end)
        arrivals.append(ready)
    return max(free), ends, arrivals


def simulated_timeline(
    graph: TaskGraph, seconds: dict[str, list[float]], send: float = 0.0, overlapped: bool = True
) -> Timeline:
    """Return the tasks of `simulate` as a timeline."""
    _, ends, arrivals = simulate(graph, seconds, send, overlapped)
    timeline = Timeline()
    for (kind, stage, batch), task, end, arrival in zip(
        graph.passes, graph.tasks, ends, arrivals, strict=True
    ):
        stream = f"rank {task.rank}"
        if task.link >= 0 and send:
            direction = BACKWARD if task.link % 2 else FORWARD
            over = f"to {task.rank} {direction}" if overlapped else stream
            timeline.place(Task(PIPELINE, arrival - send, arrival, over, direction))
        duration = seconds[kind][stage]
        timeline.place(Task(COMPUTE, end - duration, end, stream, f"{kind} {batch}"))
    return timeline


@dataclass(frozen=True)
class PipelineTimes:
    """Durations of the stages of a pipeline, in seconds."""

    work: Workload
    blocks: BlockTimes

    @property
    def plan(self) -> PipelineSchedule:
        return self.blocks.stages.plan

    @property
    def stage_blocks(self) -> tuple[float, ...]:
        """Blocks of every stage."""
        return self.blocks.stages.blocks

    @property
    def most_blocks(self) -> float:
        """Blocks of the rank with the most."""
        return self.blocks.stages.most_blocks

    @cached_property
    def seconds(self) -> dict[str, list[float]]:
        """Duration of each kind of pass, by stage; the last stage has the head."""
        blocks, (head_forward, head_backward) = self.blocks, self.blocks.head
        recompute, whole = total_seconds(blocks.recompute), total_seconds(blocks.backward)
        forward = self._by_stage(total_seconds(blocks.forward), head_forward)
        backward = self._by_stage(recompute + whole, head_backward)
        # each half of a split backward pass recomputes activations
        inputs = self._by_stage(
            recompute + whole - blocks.weight_gradients,
            head_backward - blocks.head_weight_gradients,
        )
        weights = self._by_stage(recompute + blocks.weight_gradients, blocks.head_weight_gradients)
        if self._regathers:
            early = [forward] if self.plan.spec.all_forward_first else [backward, inputs]
            for stage, count in enumerate(self.stage_blocks):
                for first in early:
                    first[stage] += self._gather_wait(count, first[stage])
        inputs[0], weights[0] = 0.0, backward[0]  # tokens have no gradients
        return {FORWARD: forward, BACKWARD: backward, INPUTS: inputs, WEIGHTS: weights}

    @property
    def exposed_copies(self) -> float:
        """Exposed offload copies of a block and micro-batch, in an unsplit backward pass."""
        blocks = self.blocks
        forward = total_seconds(blocks.forward)
        backward = total_seconds(blocks.recompute) + total_seconds(blocks.backward)
        if self.work.synchronous_copies:
            return 2 * blocks.offload_copy
        copy = blocks.offload_copy
        return max(0.0, copy - forward) + max(0.0, copy - backward)

    def _by_stage(self, block: float, head: float) -> list[float]:
        """Duration of a pass by stage, including copies that overlap it or delay it."""
        copy = self.blocks.offload_copy
        each = block + copy if self.work.synchronous_copies else max(block, copy)
        found = [count * each for count in self.stage_blocks]
        found[-1] += head
        return found

    @cached_property
    def split_share(self) -> float:
        """Share of backward passes that are split into inputs and weights."""
        done = task_graph(self.plan, self.simulated(self.work.runs[-1])).passes
        forward = sum(kind == FORWARD for kind, _, _ in done)
        return sum(kind == WEIGHTS and stage > 0 for kind, stage, _ in done) / forward

    @property
    def _regathers(self) -> bool:
        return self.blocks.sharded and self.work.reshard_after_forward

    @cached_property
    def gather_wait(self) -> float:
        """Exposed all-gathers of a micro-batch on the rank with the most blocks."""
        if not self._regathers:
            return 0.0
        blocks = self.blocks
        each = [blocks.forward]
        if not self.plan.spec.all_forward_first:
            each = [blocks.recompute, blocks.backward]
        computing = self.most_blocks * sum(total_seconds(segments) for segments in each)
        return self._gather_wait(self.most_blocks, computing)

    def _gather_wait(self, count: float, computing: float) -> float:
        """Exposed all-gathers of a stage of ``count`` blocks in one pass."""
        each = self.blocks.block_all_gather
        if not self.work.prefetch:
            return count * each
        return each + max(0.0, (count - 1) * (each - computing / max(count, 1)))

    @cached_property
    def first_all_gather(self) -> float:
        """All-gather at the start of a schedule: the first block and one end of the model."""
        if not self.blocks.sharded:
            return 0.0
        return self.blocks.block_all_gather + self.blocks.all_gather(
            max(self.blocks.end_parameters)
        )

    @cached_property
    def all_gathers(self) -> float:
        """All all-gathers of a step on the rank with the most blocks."""
        if not self.blocks.sharded:
            return 0.0
        whole = self.most_blocks * self.blocks.block_all_gather
        whole += self.blocks.all_gather(max(self.blocks.end_parameters))
        times = len(self.work.runs)
        return whole * (times + (self.work.micro_batches if self._regathers else 0))

    @cached_property
    def reduce_scatter(self) -> float:
        """Reduce-scatter of all gradients at the end of a schedule."""
        if not self.blocks.sharded:
            return 0.0
        return self.most_blocks * self.blocks.block_reduce_scatter + self.blocks.reduce_scatter(
            max(self.blocks.end_parameters)
        )

    @cached_property
    def all_reduce(self) -> float:
        """All-reduce over the replicas at the end of a step."""
        return self.most_blocks * self.blocks.block_all_reduce + self.blocks.all_reduce(
            max(self.blocks.end_parameters)
        )

    def simulated(self, count: int) -> int:
        """Number of simulated micro-batches for a schedule of ``count``.

        In the steady state, every round of as many micro-batches as ranks takes the same time.
        """
        ranks = self.plan.ranks
        even = round_size(self.plan, count) in (ranks, count)
        few = count <= (SIMULATED + 1) * ranks or not even
        return count if few else SIMULATED * ranks + count % ranks

    def run_seconds(self, count: int) -> float:
        """Duration of a schedule of ``count`` micro-batches."""
        simulated, ranks = self.simulated(count), self.plan.ranks
        end = self._makespan(simulated)
        if simulated == count:
            return end
        return end + (end - self._makespan(simulated - ranks)) * (count - simulated) / ranks

    def _makespan(self, count: int) -> float:
        return simulate(task_graph(self.plan, count), *self.simulation_inputs)[0]

    @property
    def simulation_inputs(self) -> tuple[dict[str, list[float]], float, bool]:
        """Arguments of `simulate` after the task graph."""
        return self.seconds, self.blocks.stage_send, self.work.overlapped_sends

    @property
    def final_reduction(self) -> tuple[float, float]:
        """Reductions at the end of a step: overlappable seconds, and total seconds.

        All but the reduction of the first block can overlap the last backward pass.
        """
        last = self.seconds[BACKWARD][0]
        room = 0.0
        if self.work.overlapped_reduce:
            room = last * (1 - 1 / max(self.stage_blocks[0], 1))
        if self.work.reduced_by_stage:  # a round of each of the rank's other stages follows
            room += (self.work.virtual_stages - 1) * self.plan.ranks * last
        return room, self.reduce_scatter + self.all_reduce


def total_seconds(segments: list[ComputeSegment]) -> float:
    """Seconds of a block with all exposed communication of its stage."""
    return sum(segment.seconds for segment in segments)


def pipeline_step_time(blocks: BlockTimes) -> StepTime:
    """Predict one optimizer step of a pipeline."""
    work = blocks.work
    times = PipelineTimes(work, blocks)
    by_count = {count: times.run_seconds(count) for count in set(work.runs)}
    between = (len(work.runs) - 1) * times.reduce_scatter
    gathers = len(work.runs) * times.first_all_gather
    hidden, after = times.final_reduction
    running = sum(by_count[count] for count in work.runs) + between + gathers
    seconds = running + max(0.0, after - hidden)
    seconds += blocks.tied_all_reduce + blocks.optimizer_update
    simulated = times.simulated(work.runs[-1])
    return StepTime(seconds, lambda: _timeline(times, simulated), simulated, work, blocks, _account)


def _timeline(times: PipelineTimes, count: int) -> Timeline:
    """Timeline of ``count`` micro-batches of the last run, and the end of the step."""
    timeline = simulated_timeline(task_graph(times.plan, count), *times.simulation_inputs)
    last = max(timeline.tasks, key=lambda task: task.end)
    start = last.end - times.final_reduction[0]
    for kind, seconds in ((REDUCE_SCATTER, times.reduce_scatter), (ALL_REDUCE, times.all_reduce)):
        if seconds:
            start = timeline.place(Task(kind, start, start + seconds, "network")).end
    start = max(start, last.end)
    timeline.place(Task(UPDATE, start, start + times.blocks.optimizer_update, UPDATE))
    return timeline


def _account(step: StepTime) -> tuple[Seconds, Seconds]:
    """Break down the slowest rank's time: see `StepTime.busy` and `StepTime.exposed`."""
    work, blocks = step.work, step.blocks
    times, runs = PipelineTimes(work, blocks), len(work.runs)
    passes = work.micro_batches * times.most_blocks
    segments = [(1.0, segment) for segment in (*blocks.forward, *blocks.backward)]
    segments += [(1.0 + times.split_share, segment) for segment in blocks.recompute]
    hidden, _ = times.final_reduction
    compute = passes * sum(n * s.compute for n, s in segments)
    exposed_context = sum(
        n * (max(0.0, s.overlapped_context - s.compute) + s.exposed_context) for n, s in segments
    )
    busy = {
        COMPUTE: compute + work.micro_batches * sum(blocks.head),
        TENSOR: passes * sum(n * s.tensor for n, s in segments),
        EXPERT: passes * sum(n * s.expert for n, s in segments),
        CONTEXT: passes * sum(n * (s.overlapped_context + s.exposed_context) for n, s in segments),
        OFFLOAD: passes * (2 + times.split_share) * blocks.offload_copy,
        PIPELINE: work.micro_batches * 2 * work.virtual_stages * blocks.stage_send
        + blocks.tied_all_reduce,
        ALL_GATHER: times.all_gathers,
        REDUCE_SCATTER: runs * times.reduce_scatter,
        ALL_REDUCE: times.all_reduce,
        UPDATE: blocks.optimizer_update,
    }
    exposed = {
        TENSOR: busy[TENSOR],
        EXPERT: busy[EXPERT],
        PIPELINE: blocks.tied_all_reduce if work.overlapped_sends else busy[PIPELINE],
        CONTEXT: passes * exposed_context,
        OFFLOAD: passes * times.exposed_copies,
        ALL_GATHER: runs * times.first_all_gather + work.micro_batches * times.gather_wait,
        REDUCE_SCATTER: max(0.0, times.reduce_scatter - hidden) + (runs - 1) * times.reduce_scatter,
        ALL_REDUCE: max(0.0, times.all_reduce - max(0.0, hidden - times.reduce_scatter)),
        UPDATE: blocks.optimizer_update,
    }
    exposed[BUBBLE] = max(0.0, step.seconds - busy[COMPUTE] - sum(exposed.values()))
    return _nonzero(busy), _nonzero(exposed)


def _nonzero(seconds: Seconds) -> Seconds:
    return {kind: value for kind, value in seconds.items() if value}
