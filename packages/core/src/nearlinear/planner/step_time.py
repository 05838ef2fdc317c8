"""Time of one optimizer step, laid out task by task on streams.

Without a pipeline, a step visits every block forward and backward. Parameters are gathered ahead of
the visit and gradients are reduced behind it. Each communicator has one stream: the all-gathers and
reduce-scatters of a shard group share a stream, as in FSDP2, and inter-node communication shares
the network. Micro-batches after the second are identical, so at most three are simulated.
"""

from .block_time import BlockTimes, ComputeSegment
from .cluster import Cluster
from .fitted_constants import FittedConstants
from .pipeline_time import pipeline_step_time
from .timeline import (
    ALL_GATHER,
    ALL_REDUCE,
    COMPUTE,
    CONTEXT,
    EXPERT,
    OFFLOAD,
    REDUCE_SCATTER,
    TENSOR,
    UPDATE,
    Seconds,
    StepTime,
    Task,
    Timeline,
)
from .workload import Workload

SIMULATED = 3  # micro-batches


def step_time(work: Workload, cluster: Cluster, constants: FittedConstants) -> StepTime:
    """Predict one optimizer step of ``work`` on ``cluster``."""
    return step_time_of(BlockTimes(work, cluster, constants))


def step_time_of(blocks: BlockTimes) -> StepTime:
    """Predict one optimizer step from its block times."""
    if blocks.work.mesh.pipeline > 1:
        return pipeline_step_time(blocks)
    return _sharded_step_time(blocks)


def least_seconds(blocks: BlockTimes) -> float:
    """Return a lower bound of a step's time: computation and communication that it waits for.

    Much faster than `step_time_of`, which also places what may overlap. In a pipeline, a stage of
    average size computes all micro-batches without waiting for others.
    """
    work = blocks.work
    parts = (blocks.forward, blocks.recompute, blocks.backward)
    block = sum(segment.seconds for segments in parts for segment in segments)
    micro_batch = work.shape.layers * block + sum(blocks.head)
    return work.micro_batches * micro_batch / work.mesh.pipeline


def _sharded_step_time(blocks: BlockTimes) -> StepTime:
    work, timeline = blocks.work, Timeline()
    simulated = min(work.micro_batches, SIMULATED)
    ends, marks = [], [0]
    last: Task | None = None
    for index in range(simulated):
        last = _add_micro_batch(
            timeline, blocks, last, final=index == simulated - 1, first=not index
        )
        ends.append(last.end)
        marks.append(len(timeline.tasks))
    timeline.add(UPDATE, blocks.optimizer_update, [last])
    # The last simulated micro-batch ends the step; those left out repeat the one before it.
    left_out = work.micro_batches - simulated
    more = left_out * (ends[1] - ends[0]) if simulated > 1 else 0.0
    repeated = slice(marks[1], marks[min(2, simulated)])

    def account(step: StepTime) -> tuple[Seconds, Seconds]:
        busy, exposed = _busy_and_exposed(step.timeline)
        if left_out <= 0:
            return busy, exposed
        one_busy, one_exposed = _busy_and_exposed(Timeline(step.timeline.tasks[repeated]))
        return _extended(busy, one_busy, left_out), _extended(exposed, one_exposed, left_out)

    return StepTime(timeline.end + more, lambda: timeline, simulated, work, blocks, account)


def _busy_and_exposed(timeline: Timeline) -> tuple[Seconds, Seconds]:
    return timeline.busy(), timeline.exposed(COMPUTE, (TENSOR, EXPERT))


def _extended(total: Seconds, one: Seconds, times: int) -> Seconds:
    return {kind: value + times * one.get(kind, 0.0) for kind, value in total.items()}


def _add_micro_batch(
    timeline: Timeline, blocks: BlockTimes, before: Task | None, final: bool, first: bool
) -> Task:
    """Add forward and backward of one micro-batch; return its last compute task."""
    work = blocks.work
    keeps_gathered = work.gathered_across_micro_batches and not first
    layers = work.shape.layers
    visits = [*range(layers), *reversed(range(layers))]
    stream = "network" if blocks.shard_group.nodes > 1 else "links"
    copies: dict[int, Task] = {}
    # compute tasks of the visits so far, preceded by the task before this micro-batch
    done: list[Task | None] = [before] * (work.prefetch + 1)
    gathered: list[Task | None] = [None] * len(visits)
    root = None
    if blocks.sharded and not keeps_gathered:
        root = timeline.add(ALL_GATHER, blocks.all_gather(blocks.root_parameters), [before], stream)

    def gather(visit: int) -> None:
        if visit >= len(visits) or not blocks.sharded:
            return
        resident = not work.reshard_after_forward or visits[visit] < work.resident_blocks
        available = (
            (visit == layers and work.keeps_last_block)
            or (visit >= layers and resident)
            or (keeps_gathered and (visit == 0 or resident))
        )
        if not available:
            after = [done[-1 - work.prefetch]] if work.prefetch else [done[-1]]
            label = f"block {visits[visit]}"
            forward = visit < layers
            seconds = blocks.block_all_gather if forward else blocks.block_backward_all_gather
            gathered[visit] = timeline.add(ALL_GATHER, seconds, after, stream, label)

    for visit in range(work.prefetch):
        gather(visit)
    last: Task | None = before
    for visit, block in enumerate(visits):
        gather(visit + work.prefetch)
        waits = [gathered[visit], root]
        if visit == layers:
            last = timeline.add(COMPUTE, sum(blocks.head), [last], label="head")
        if visit < layers:
            last = _add_segments(timeline, blocks.forward, [last, *waits], f"forward {block}")
            if blocks.offload_copy and work.synchronous_copies:
                last = timeline.add(OFFLOAD, blocks.offload_copy, [last])
            elif blocks.offload_copy:
                copies[block] = timeline.add(
                    OFFLOAD, blocks.offload_copy, [last], stream="copies out"
                )
        else:
            if blocks.offload_copy and work.synchronous_copies:
                last = timeline.add(OFFLOAD, blocks.offload_copy, [last, *waits])
            elif blocks.offload_copy and block < layers - 1:
                ahead = done[-1 - min(work.offload_horizon, visit - layers + 1)]
                waits.append(
                    timeline.add(OFFLOAD, blocks.offload_copy, [copies[block], ahead], "copies in")
                )
            last = _add_segments(timeline, blocks.recompute, [last, *waits], f"recompute {block}")
            last = _add_segments(timeline, blocks.backward, [last, *waits], f"backward {block}")
            seconds = blocks.block_reduce_scatter, blocks.block_all_reduce
            reduced = None
            if final or block >= work.reduced_once_blocks:
                reduced = _add_reduction(
                    timeline, blocks, seconds, last, stream, final, f"block {block}"
                )
            if reduced is not None and not work.overlapped_reduce:
                last = reduced
        done.append(last)
    root_seconds = (
        blocks.reduce_scatter(blocks.root_parameters),
        blocks.all_reduce(blocks.root_parameters),
    )
    reduced = None
    if final or not work.reduced_once_root:
        reduced = _add_reduction(timeline, blocks, root_seconds, last, stream, final, "root")
    return timeline.add(COMPUTE, 0.0, [last, reduced])


def _add_segments(
    timeline: Timeline, segments: list[ComputeSegment], after: list[Task | None], label: str
) -> Task | None:
    """Add compute segments one after the other, each with its communication."""
    last = None
    for segment in segments:
        waits = after if last is None else [last]
        overlapped = None
        if segment.overlapped_context:
            overlapped = timeline.add(CONTEXT, segment.overlapped_context, waits, label=label)
        last = timeline.add(COMPUTE, segment.compute, waits, label=label)
        if overlapped is not None and overlapped.end > last.end:
            last = timeline.add(COMPUTE, 0.0, [overlapped])
        for kind, seconds in (
            (CONTEXT, segment.exposed_context),
            (EXPERT, segment.expert),
            (TENSOR, segment.tensor),
        ):
            if seconds:
                last = timeline.add(kind, seconds, [last], label=label)
    return last if last is not None else after[0]


def _add_reduction(
    timeline: Timeline,
    blocks: BlockTimes,
    seconds: tuple[float, float],
    after: Task | None,
    stream: str,
    final: bool,
    label: str,
) -> Task | None:
    """Add the reduce-scatter of one unit and, once per step, the all-reduce over the replicas.

    ``seconds``: durations of the two collectives.
    """
    last = None
    if blocks.sharded:
        last = timeline.add(REDUCE_SCATTER, seconds[0], [after], stream, label)
    all_reduces = final or not blocks.work.two_hop
    if blocks.replica_group.ranks > 1 and all_reduces:
        where = "network" if blocks.replica_group.nodes > 1 else "links"
        last = timeline.add(ALL_REDUCE, seconds[1], [last or after], where, label)
    return last
