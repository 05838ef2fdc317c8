"""What the ranks of a pipeline do, one thing after what it waits for, and when.

The graph depends on a schedule and its micro-batches alone, so it is built once; `run` gives it the
seconds of every stage.
"""

from dataclasses import dataclass
from functools import lru_cache

from ..parallel.pipeline.schedules import Plan
from . import orders
from .orders import BACKWARD, FORWARD, INPUTS, WEIGHTS
from .step import COMPUTE, PIPELINE
from .streams import Task, Timeline

KINDS = (FORWARD, BACKWARD, INPUTS, WEIGHTS)


@dataclass(frozen=True)
class Flow:
    """What all ranks do, one thing after what it waits for: `run` gives it its times."""

    plan: Plan
    work: list[orders.Work]
    steps: list[tuple[int, int, int, int]]
    """of each: its rank; whose seconds it takes, stages by `KINDS`; the place in the list of what
    it waits for, -1 = nothing; over which way that comes from another rank, -1 = it does not"""


@lru_cache(maxsize=256)
def flow(plan: Plan, micro_batches: int) -> Flow:
    """Of the plan's orders. Raises AssertionError for orders that wait for each other."""
    order = orders.orders(plan, micro_batches)
    found, places, at = Flow(plan, [], []), {}, [0] * plan.ranks
    left = sum(map(len, order))
    while left:
        moved = False
        for rank, each in enumerate(order):
            while at[rank] < len(each):
                kind, stage, batch = each[at[rank]]
                before = _before(kind, stage, batch, plan.stages)
                if before is not None and before not in places:
                    break
                places[BACKWARD if kind == INPUTS else kind, stage, batch] = len(found.work)
                far = before is not None and plan.rank_of(before[1]) != rank
                way = 2 * rank + (before[0] == BACKWARD) if far else -1
                slot = KINDS.index(kind) * plan.stages + stage
                waits = -1 if before is None else places[before]
                found.work.append(each[at[rank]])
                found.steps.append((rank, slot, waits, way))
                at[rank], left, moved = at[rank] + 1, left - 1, True
        if not moved:
            raise AssertionError("the orders wait for each other")
    return found


def _before(kind: str, stage: int, batch: int, stages: int):
    """What this work waits for of other stages, or of its own earlier work."""
    if kind == FORWARD:
        return (FORWARD, stage - 1, batch) if stage else None
    if kind == WEIGHTS:
        return (BACKWARD, stage, batch)
    return (FORWARD, stage, batch) if stage == stages - 1 else (BACKWARD, stage + 1, batch)


def run(each: Flow, seconds: dict[str, list[float]], send: float = 0.0, beside: bool = True):
    """The end of all work and, by place, of each and of the message that it waits for.

    ``seconds`` of every stage, for each kind of work. ``send``: seconds for a stage's output to
    reach the next one's rank, which computes meanwhile where it goes on ``beside``.
    """
    free, ways = [0.0] * each.plan.ranks, [0.0] * (2 * each.plan.ranks)
    took = [value for kind in KINDS for value in seconds[kind]]
    ends, messages = [], []
    for rank, slot, before, way in each.steps:  # a million times in a fit: no calls
        start = free[rank]
        ready = ends[before] if before >= 0 else 0.0
        if way >= 0:
            earlier = ways[way] if beside else start
            ready = (earlier if earlier > ready else ready) + send
            ways[way] = ready
        end = (ready if ready > start else start) + took[slot]
        free[rank] = end
        ends.append(end)
        messages.append(ready)
    return max(free), ends, messages


def timeline_of(each: Flow, seconds: dict[str, list[float]], send=0.0, beside=True) -> Timeline:
    """`run`, task by task."""
    _, ends, messages = run(each, seconds, send, beside)
    timeline = Timeline()
    for (kind, stage, batch), (rank, _, _, way), end, there in zip(
        each.work, each.steps, ends, messages, strict=True
    ):
        lane = f"rank {rank}"
        if way >= 0 and send:
            what = BACKWARD if way % 2 else FORWARD
            over = f"to {rank} {what}" if beside else lane
            timeline.place(Task(PIPELINE, there - send, there, over, what))
        took = seconds[kind][stage]
        timeline.place(Task(COMPUTE, end - took, end, lane, f"{kind} {batch}"))
    return timeline
