"""One step of a pipeline: which stage does what in which order, and when.

The orders are those of GPipe (Huang et al. 2019: all forward, then all backward), of 1F1B and of
its interleaved form with several stages per rank (Narayanan et al. 2021). Schedules that put off
the gradients of weights (zero bubble) are laid out as 1F1B: a bound from above.
"""

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

LAID_OUT = 4  # micro-batches for each rank, where a pipeline finds a steady pace


def orders(ranks: int, virtual: int, micro_batches: int, schedule: str) -> list[list[tuple]]:
    """For every rank its work in order: (forward or backward, stage, micro-batch).

    Stage ``s`` is on rank ``s % ranks``.
    """
    return [_order(rank, ranks, virtual, micro_batches, schedule) for rank in range(ranks)]


def _order(rank: int, ranks: int, virtual: int, count: int, schedule: str) -> list[tuple]:
    """Micro-batches go through a rank's stages in groups of as many as there are ranks."""
    groups = [range(first, min(first + ranks, count)) for first in range(0, count, ranks)]
    if virtual == 1:
        groups = [range(count)]
    forward = [
        ("forward", rank + chunk * ranks, batch)
        for group in groups
        for chunk in range(virtual)
        for batch in group
    ]
    backward = [
        ("backward", rank + chunk * ranks, batch)
        for group in groups
        for chunk in reversed(range(virtual))
        for batch in group
    ]
    if schedule == "simple":
        return forward + backward
    first = min(_ahead(rank, ranks, virtual), len(forward))
    order = forward[:first]
    for there, back in zip(forward[first:], backward, strict=False):
        order += [there, back]
    return order + backward[len(forward) - first :]


def _ahead(rank: int, ranks: int, virtual: int) -> int:
    """Forward passes that a rank does before its first backward pass, less one."""
    behind = ranks - rank - 1
    return behind if virtual == 1 else 2 * behind + (virtual - 1) * ranks


def run(
    order: list[list[tuple]],
    there: list[float],
    back: list[float],
    send: float = 0.0,
    beside: bool = True,
) -> Timeline:
    """The timeline of those orders, with seconds of every stage forward and backward.

    ``send``: seconds for a stage's output to reach the next one's rank, which computes meanwhile
    where it goes on ``beside``.
    """
    timeline, done, at = Timeline(), {}, [0] * len(order)
    left = sum(len(each) for each in order)
    while left:
        moved = False
        for rank, each in enumerate(order):
            while at[rank] < len(each):
                way, stage, batch = each[at[rank]]
                before = _before(way, stage, batch, len(there))
                if before is not None and before not in done:
                    break
                waits = [done[before]] if before is not None else []
                if waits and send and (before[1] % len(order)) != rank:
                    lane = f"to {rank} {way}" if beside else f"rank {rank}"
                    waits = [timeline.add(PIPELINE, send, waits, lane, way)]
                seconds = there[stage] if way == "forward" else back[stage]
                label = f"{way} {batch}"
                done[way, stage, batch] = timeline.add(
                    COMPUTE, seconds, waits, f"rank {rank}", label
                )
                at[rank], left, moved = at[rank] + 1, left - 1, True
        if not moved:
            raise AssertionError("the orders wait for each other")
    return timeline


def _before(way: str, stage: int, batch: int, stages: int):
    if way == "forward":
        return ("forward", stage - 1, batch) if stage else None
    if stage == stages - 1:
        return ("forward", stage, batch)
    return ("backward", stage + 1, batch)


def pipelined(work: Workload, parts: Passes) -> Step:
    """A step of ``work``: see `step.step`."""
    there, back = _stages(work, parts, work.mesh.pipeline * work.virtual)
    laid = work.passes
    if work.schedule == "1f1b":
        laid = min(laid, LAID_OUT * work.mesh.pipeline)
    order = orders(work.mesh.pipeline, work.virtual, laid, work.schedule)
    timeline = run(order, there, back, parts.handing_on, work.overlapped_sends)
    more = (work.passes - laid) * _steady(timeline, work, laid) if work.passes > laid else 0.0
    after = _reductions(timeline, parts, work)
    timeline.add(UPDATE, parts.update, [after])
    return Step(timeline.end + more + _first_gather(parts), timeline, laid, work, parts)


def _steady(timeline: Timeline, work: Workload, laid: int) -> float:
    """Seconds that a micro-batch more takes once the pipeline is full.

    Measured where the first rank has begun to do one backward for each forward and has not stopped,
    over as many micro-batches as there are ranks: waiting for what others send may repeat so.
    """
    ranks, each = work.mesh.pipeline, 2 * work.virtual
    ends = [task.end for task in timeline.tasks if task.lane == "rank 0" and task.kind == COMPUTE]
    last = len(ends) - 1 - _ahead(0, ranks, work.virtual)
    return (ends[last] - ends[last - each * ranks]) / ranks


def _stages(work: Workload, parts: Passes, stages: int) -> tuple[list[float], list[float]]:
    """Seconds of every stage forward and backward; the last one has the head."""
    blocks = work.shape.layers / stages
    there = [blocks * _waiting(parts.forward)] * stages
    back = [blocks * (_waiting(parts.again) + _waiting(parts.backward))] * stages
    there[-1] += parts.head[0]
    back[-1] += parts.head[1]
    return there, back


def _waiting(pieces: list[Piece]) -> float:
    """Seconds of a block with everything that its stage waits for."""
    return sum(max(p.compute, p.context) + p.tensor + p.expert for p in pieces)


def _held(parts: Passes) -> float:
    """Parameters of the larger of a pipeline's ends."""
    return parts.layers * parts.block + parts.root / 2


def _first_gather(parts: Passes) -> float:
    """A stage keeps its parameters gathered for a whole step; it waits for its first block."""
    return parts.gather(parts.block + parts.root / 2) if parts.sharded else 0.0


def _reductions(timeline: Timeline, parts: Passes, work: Workload) -> Task:
    """Those at a step's end: beside all but the first block of the last backward pass, or after."""
    final = max(timeline.tasks, key=lambda task: task.end)
    room = final.seconds * (1 - 1 / max(parts.layers, 1)) if work.overlapped_reduce else 0.0
    start, last = final.end - room, final
    for kind, seconds in (
        (SCATTER, parts.reduce(_held(parts)) if parts.sharded else 0.0),
        (JOIN, parts.join(_held(parts))),
    ):
        if seconds:
            last = timeline.place(Task(kind, start, start + seconds, "network"))
            start = last.end
    return max(final, last, key=lambda task: task.end)


def accounts(step: Step) -> tuple[dict[str, float], dict[str, float]]:
    """Where the slowest rank's time goes: see `Step.busy` and `Step.exposed`."""
    work, parts = step.work, step.parts
    blocks = work.passes * parts.layers
    pieces = [*parts.forward, *parts.again, *parts.backward]
    ends = {task.kind: task.end for task in step.timeline.tasks}
    computed = max(task.end for task in step.timeline.tasks if task.kind == COMPUTE)
    busy = {
        COMPUTE: blocks * sum(p.compute for p in pieces) + work.passes * sum(parts.head),
        TENSOR: blocks * sum(p.tensor for p in pieces),
        EXPERT: blocks * sum(p.expert for p in pieces),
        CONTEXT: blocks * sum(p.context for p in pieces),
        PIPELINE: work.passes * 2 * work.virtual * parts.handing_on,
        GATHER: parts.gather(_held(parts)) if parts.sharded else 0.0,
        SCATTER: parts.reduce(_held(parts)) if parts.sharded else 0.0,
        JOIN: parts.join(_held(parts)),
        UPDATE: parts.update,
    }
    exposed = {
        TENSOR: busy[TENSOR],
        EXPERT: busy[EXPERT],
        PIPELINE: 0.0 if work.overlapped_sends else busy[PIPELINE],
        CONTEXT: blocks * sum(max(0.0, p.context - p.compute) for p in pieces),
        GATHER: _first_gather(parts),
        SCATTER: max(0.0, ends.get(SCATTER, 0.0) - computed),
        JOIN: max(0.0, ends.get(JOIN, 0.0) - max(computed, ends.get(SCATTER, 0.0))),
        UPDATE: parts.update,
    }
    exposed[BUBBLE] = max(0.0, step.seconds - busy[COMPUTE] - sum(exposed.values()))
    return tuple({kind: value for kind, value in each.items() if value} for each in (busy, exposed))
