"""What each rank of a pipeline does, in which order: the schedules that a config can name.

Orders are those of ``torch.distributed.pipelining``, which runs them: GPipe (Huang et al. 2019),
1F1B and its interleaved form (Narayanan et al. 2021), looped breadth first (Lamy-Poirier 2022), the
zero-bubble schedules ZB1P and ZB-V (Qi et al. 2023) and DualPipeV (DeepSeek-AI 2024). The last
three put off the gradients of weights, for which nobody waits, into what would be bubbles.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from ..parallel.pipeline.schedules import Plan

FORWARD, BACKWARD, INPUTS, WEIGHTS = "forward", "backward", "inputs", "weights"
"""Kinds of work; a backward pass is one for gradients of inputs, then one for those of weights."""

Work = tuple[str, int, int]
"""Kind, stage, micro-batch."""


def orders(plan: Plan, micro_batches: int) -> list[list[Work]]:
    """For every rank its work in order. Raises ConfigError for a number that cannot be."""
    plan.check(micro_batches)
    write = {"zbv_zero_bubble": _zero_bubble_v, "dualpipev": _dual_pipe_v}.get(plan.name)
    if write is None:
        write = _all_at_once if plan.schedule.all_at_once else _alternating
    return [write(plan, rank, micro_batches) for rank in range(plan.ranks)]


def round_of(plan: Plan, micro_batches: int) -> int:
    """Micro-batches that go through one of a rank's stages before its next one has them."""
    if not plan.name.startswith("interleaved"):
        return micro_batches
    return micro_batches // max(1, micro_batches // plan.ranks)


def ahead(plan: Plan, rank: int, micro_batches: int) -> int:
    """Forward passes of an alternating schedule before it alternates."""
    behind = plan.ranks - rank - 1
    far = 2 * behind if plan.name == "interleaved_1f1b" else behind
    first = (plan.per_rank - 1) * round_of(plan, micro_batches) + far
    return min(first, micro_batches * plan.per_rank)


def _all_at_once(plan: Plan, rank: int, count: int) -> list[Work]:
    stages = plan.stages_of(rank)
    back = range(count) if plan.name == "gpipe" else range(count)[::-1]
    return [
        *((FORWARD, stage, batch) for stage in stages for batch in range(count)),
        *((BACKWARD, stage, batch) for stage in reversed(stages) for batch in back),
    ]


def _alternating(plan: Plan, rank: int, count: int) -> list[Work]:
    """One forward, one backward, as 1F1B; ZB1P does weights ``rank`` backward passes later."""
    stages = plan.stages_of(rank)
    step = round_of(plan, count)
    groups = [range(first, min(first + step, count)) for first in range(0, count, step)]
    there = [(stage, batch) for group in groups for stage in stages for batch in group]
    back = [(stage, batch) for group in groups for stage in reversed(stages) for batch in group]
    later = rank if plan.name == "interleaved_zero_bubble" else None
    first = ahead(plan, rank, count)
    order: list[Work] = [(FORWARD, *each) for each in there[:first]]
    for turn, each in enumerate(back):
        if first + turn < len(there):
            order.append((FORWARD, *there[first + turn]))
        order.append((BACKWARD if later is None else INPUTS, *each))
        if later is not None and turn >= later:
            order.append((WEIGHTS, *back[turn - later]))
    if later:
        order += [(WEIGHTS, *each) for each in back[-later:]]
    return order


def _zero_bubble_v(plan: Plan, rank: int, count: int) -> list[Work]:
    """Qi et al. 2023, section 6; laid out for a full pipeline, then cut to ``count``."""
    do, ranks = _Rank(*plan.stages_of(rank)), plan.ranks
    enough = max(2 * ranks - 1, count)
    do.many(2 * (ranks - rank) - 1, (FORWARD, 0))
    do.many(rank, (FORWARD, 1), (FORWARD, 0))
    do.many(ranks - rank, (FORWARD, 1), (INPUTS, 1), (WEIGHTS, 1))
    while do.done[FORWARD, 1] < do.done[FORWARD, 0] or do.done[FORWARD, 0] < enough:
        if do.done[FORWARD, 0] < enough:
            do.one(FORWARD, 0)
        do.many(1, (INPUTS, 0), (WEIGHTS, 0), (FORWARD, 1), (INPUTS, 1), (WEIGHTS, 1))
    do.many(rank, (INPUTS, 0), (INPUTS, 1))
    do.many(ranks - rank, (INPUTS, 0), (WEIGHTS, 0))
    do.many(do.done[INPUTS, 1] - do.done[WEIGHTS, 1], (WEIGHTS, 1))
    do.many(do.done[INPUTS, 0] - do.done[WEIGHTS, 0], (WEIGHTS, 0))
    return [each for each in do.order if each[2] < count]


def _dual_pipe_v(plan: Plan, rank: int, count: int) -> list[Work]:
    """The eight steps of DeepSeek's schedule; the two passes that it pairs are done in turn."""
    do, ranks = _Rank(*plan.stages_of(rank)), plan.ranks
    behind = ranks - rank - 1
    do.many(2 * behind, (FORWARD, 0))
    do.many(rank + 1, (FORWARD, 0), (FORWARD, 1))
    for _ in range(behind):
        do.one(INPUTS, 1)
        do.put_off()
        do.one(FORWARD, 1)
    do.many(count - 2 * ranks + rank + 1, (FORWARD, 0), (BACKWARD, 1), (FORWARD, 1), (BACKWARD, 0))
    do.many(behind, (BACKWARD, 1), (FORWARD, 1), (BACKWARD, 0))
    half, apart = (rank + 1) // 2, False
    for turn in range(rank + 1):
        apart = apart or (turn == half and rank % 2 == 1)
        do.one(INPUTS if apart else BACKWARD, 1)
        apart = apart or (turn == half and rank % 2 == 0)
        do.one(INPUTS if apart else BACKWARD, 0)
    for _ in range(behind):
        do.put_off()
        do.one(INPUTS if apart else BACKWARD, 0)
    for _ in range(rank + 1):
        do.put_off()
    return do.order


@dataclass
class _Rank:
    """Writes the order of a rank with two stages; each kind of work takes micro-batches in turn."""

    first: int
    """its stage number 0"""
    second: int
    """its stage number 1"""
    order: list[Work] = field(default_factory=list)
    done: Counter = field(default_factory=Counter)
    waiting: deque[Work] = field(default_factory=deque)
    """gradients of weights that are put off"""

    def one(self, kind: str, which: int) -> None:
        stage = self.second if which else self.first
        counted = INPUTS if kind == BACKWARD else kind
        batch = self.done[counted, which]
        self.order.append((kind, stage, batch))
        self.done[counted, which] += 1
        if kind == INPUTS:
            self.waiting.append((WEIGHTS, stage, batch))

    def many(self, times: int, *each: tuple[str, int]) -> None:
        for _ in range(times):
            for kind, which in each:
                self.one(kind, which)

    def put_off(self) -> None:
        """Do the oldest of what was put off, if any."""
        if self.waiting:
            self.order.append(self.waiting.popleft())
