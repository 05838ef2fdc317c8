"""Order of the passes on each rank of a pipeline, for every supported schedule.

The orders match ``torch.distributed.pipelining``: GPipe (Huang et al. 2019), 1F1B and its
interleaved form (Narayanan et al. 2021), looped breadth-first (Lamy-Poirier 2022), the zero-bubble
schedules ZB1P and ZB-V (Qi et al. 2023) and DualPipeV (DeepSeek-AI 2024). The last three delay
weight gradients into what would otherwise be bubbles.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from ..pipeline_parallel.schedules import PipelineSchedule

FORWARD, BACKWARD, INPUTS, WEIGHTS = "forward", "backward", "inputs", "weights"
"""Kinds of pass. Zero-bubble schedules split a backward pass into gradients of inputs and gradients
of weights."""

StagePass = tuple[str, int, int]
"""Kind, stage, micro-batch."""


def pass_orders(plan: PipelineSchedule, micro_batches: int) -> list[list[StagePass]]:
    """Return the passes of every rank in order.

    Raises ConfigError if the schedule does not support this number of micro-batches.
    """
    plan.check_microbatches(micro_batches)
    write = {"zbv_zero_bubble": _zero_bubble_v, "dualpipev": _dual_pipe_v}.get(plan.name)
    if write is None:
        write = _all_forward_first if plan.spec.all_forward_first else _alternating
    return [write(plan, rank, micro_batches) for rank in range(plan.ranks)]


def round_size(plan: PipelineSchedule, micro_batches: int) -> int:
    """Consecutive micro-batches on one stage before a rank switches to its next stage."""
    if not plan.name.startswith("interleaved"):
        return micro_batches
    return micro_batches // max(1, micro_batches // plan.ranks)


def warmup_passes(plan: PipelineSchedule, rank: int, micro_batches: int) -> int:
    """Forward passes of an alternating schedule before its first backward pass."""
    behind = plan.ranks - rank - 1
    far = 2 * behind if plan.name == "interleaved_1f1b" else behind
    first = (plan.stages_per_rank - 1) * round_size(plan, micro_batches) + far
    return min(first, micro_batches * plan.stages_per_rank)


def _all_forward_first(plan: PipelineSchedule, rank: int, count: int) -> list[StagePass]:
    stages = plan.stages_of(rank)
    back = range(count) if plan.name == "gpipe" else range(count)[::-1]
    return [
        *((FORWARD, stage, batch) for stage in stages for batch in range(count)),
        *((BACKWARD, stage, batch) for stage in reversed(stages) for batch in back),
    ]


def _alternating(plan: PipelineSchedule, rank: int, count: int) -> list[StagePass]:
    """1F1B; ZB1P computes weight gradients ``rank`` backward passes later."""
    stages = plan.stages_of(rank)
    step = round_size(plan, count)
    groups = [range(first, min(first + step, count)) for first in range(0, count, step)]
    there = [(stage, batch) for group in groups for stage in stages for batch in group]
    back = [(stage, batch) for group in groups for stage in reversed(stages) for batch in group]
    later = rank if plan.name == "interleaved_zero_bubble" else None
    first = warmup_passes(plan, rank, count)
    order: list[StagePass] = [(FORWARD, *each) for each in there[:first]]
    for turn, each in enumerate(back):
        if first + turn < len(there):
            order.append((FORWARD, *there[first + turn]))
        order.append((BACKWARD if later is None else INPUTS, *each))
        if later is not None and turn >= later:
            order.append((WEIGHTS, *back[turn - later]))
    if later:
        order += [(WEIGHTS, *each) for each in back[-later:]]
    return order


def _zero_bubble_v(plan: PipelineSchedule, rank: int, count: int) -> list[StagePass]:
    """ZB-V (Qi et al. 2023, section 6), written for a full pipeline and cut to ``count``."""
    writer, ranks = _order_writer(plan, rank), plan.ranks
    enough = max(2 * ranks - 1, count)
    writer.repeat(2 * (ranks - rank) - 1, (FORWARD, 0))
    writer.repeat(rank, (FORWARD, 1), (FORWARD, 0))
    writer.repeat(ranks - rank, (FORWARD, 1), (INPUTS, 1), (WEIGHTS, 1))
    done = writer.done
    while done[FORWARD, 1] < done[FORWARD, 0] or done[FORWARD, 0] < enough:
        if done[FORWARD, 0] < enough:
            writer.add(FORWARD, 0)
        writer.repeat(1, (INPUTS, 0), (WEIGHTS, 0), (FORWARD, 1), (INPUTS, 1), (WEIGHTS, 1))
    writer.repeat(rank, (INPUTS, 0), (INPUTS, 1))
    writer.repeat(ranks - rank, (INPUTS, 0), (WEIGHTS, 0))
    writer.repeat(done[INPUTS, 1] - done[WEIGHTS, 1], (WEIGHTS, 1))
    writer.repeat(done[INPUTS, 0] - done[WEIGHTS, 0], (WEIGHTS, 0))
    return [each for each in writer.order if each[2] < count]


def _dual_pipe_v(plan: PipelineSchedule, rank: int, count: int) -> list[StagePass]:
    """The eight steps of DualPipeV; the two passes of a pair run one after the other."""
    writer, ranks = _order_writer(plan, rank), plan.ranks
    behind = ranks - rank - 1
    writer.repeat(2 * behind, (FORWARD, 0))
    writer.repeat(rank + 1, (FORWARD, 0), (FORWARD, 1))
    for _ in range(behind):
        writer.add(INPUTS, 1)
        writer.add_delayed_weights()
        writer.add(FORWARD, 1)
    writer.repeat(
        count - 2 * ranks + rank + 1, (FORWARD, 0), (BACKWARD, 1), (FORWARD, 1), (BACKWARD, 0)
    )
    writer.repeat(behind, (BACKWARD, 1), (FORWARD, 1), (BACKWARD, 0))
    half, apart = (rank + 1) // 2, False
    for turn in range(rank + 1):
        apart = apart or (turn == half and rank % 2 == 1)
        writer.add(INPUTS if apart else BACKWARD, 1)
        apart = apart or (turn == half and rank % 2 == 0)
        writer.add(INPUTS if apart else BACKWARD, 0)
    for _ in range(behind):
        writer.add_delayed_weights()
        writer.add(INPUTS if apart else BACKWARD, 0)
    for _ in range(rank + 1):
        writer.add_delayed_weights()
    return writer.order


def _order_writer(plan: PipelineSchedule, rank: int) -> _OrderWriter:
    first, second = plan.stages_of(rank)
    return _OrderWriter(first, second)


@dataclass
class _OrderWriter:
    """Writes the passes of a rank with two stages; each kind takes the micro-batches in order."""

    first: int
    """Stage number of the rank's stage 0."""
    second: int
    """Stage number of the rank's stage 1."""
    order: list[StagePass] = field(default_factory=list)
    done: Counter = field(default_factory=Counter)
    delayed: deque[StagePass] = field(default_factory=deque)
    """Weight gradients that are not computed yet."""

    def add(self, kind: str, which: int) -> None:
        stage = self.second if which else self.first
        counted = INPUTS if kind == BACKWARD else kind
        batch = self.done[counted, which]
        self.order.append((kind, stage, batch))
        self.done[counted, which] += 1
        if kind == INPUTS:
            self.delayed.append((WEIGHTS, stage, batch))

    def repeat(self, times: int, *each: tuple[str, int]) -> None:
        for _ in range(times):
            for kind, which in each:
                self.add(kind, which)

    def add_delayed_weights(self) -> None:
        """Add the oldest delayed weight gradients, if any."""
        if self.delayed:
            self.order.append(self.delayed.popleft())
