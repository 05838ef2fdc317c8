"""Pipeline schedules: names, assignment of stages to ranks, and order of the passes on each rank.

The schedules are those of ``torch.distributed.pipelining``: GPipe (Huang et al. 2019), 1F1B and its
interleaved form (Narayanan et al. 2021), looped breadth-first (Lamy-Poirier 2022), the zero-bubble
schedules ZB1P and ZB-V (Qi et al. 2023) and DualPipeV (DeepSeek-AI 2024). The last three delay
weight gradients into otherwise idle times. SMP's two names are aliases: ``simple`` is
GPipe, and ``interleaved`` is 1F1B (PipeDream, Narayanan et al. 2019), whereas in torch
"interleaved" means several stages per rank. This module imports torch only to build a schedule, so
that the planner can use it without torch.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigError


@dataclass(frozen=True)
class ScheduleSpec:
    """Properties of a schedule of ``torch.distributed.pipelining``."""

    torch_class: str
    """Class name in ``torch.distributed.pipelining``."""
    stages_per_rank: int | None = 1
    """Exact number of stages per rank; None: two or more."""
    all_forward_first: bool = False
    """True if all forward passes precede the first backward pass (all micro-batches in flight)."""
    v_shaped: bool = False
    """True if ranks hold stages in ascending, then descending order (first and last together)."""
    splits_backward: bool = False
    """True if weight gradients are computed apart from input gradients (zero bubble).

    Weight gradients use the parameters that the forward pass read, so these must stay gathered.
    """


SCHEDULES = {
    "gpipe": ScheduleSpec("ScheduleGPipe", all_forward_first=True),
    "1f1b": ScheduleSpec("Schedule1F1B"),
    "interleaved_1f1b": ScheduleSpec("ScheduleInterleaved1F1B", None),
    "looped_bfs": ScheduleSpec("ScheduleLoopedBFS", None, all_forward_first=True),
    "interleaved_zero_bubble": ScheduleSpec(
        "ScheduleInterleavedZeroBubble", None, splits_backward=True
    ),
    "zbv_zero_bubble": ScheduleSpec(
        "ScheduleZBVZeroBubble", 2, v_shaped=True, splits_backward=True
    ),
    "dualpipev": ScheduleSpec("ScheduleDualPipeV", 2, v_shaped=True, splits_backward=True),
}
SMP_SCHEDULES = {"simple": "gpipe", "interleaved": "1f1b"}
"""SMP's schedule names and their equivalents in `SCHEDULES`."""


@dataclass(frozen=True)
class PipelineSchedule:
    """A schedule on ``ranks`` pipeline ranks with ``stages_per_rank`` stages on each."""

    name: str
    """A key of `SCHEDULES`."""
    ranks: int
    stages_per_rank: int

    @property
    def spec(self) -> ScheduleSpec:
        return SCHEDULES[self.name]

    @property
    def stages(self) -> int:
        """Number of stages of the pipeline."""
        return self.ranks * self.stages_per_rank

    def rank_of(self, stage: int) -> int:
        """Return the pipeline coordinate of the rank that holds ``stage``."""
        turn, position = divmod(stage, self.ranks)
        return self.ranks - 1 - position if self.spec.v_shaped and turn % 2 else position

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages on the rank with pipeline coordinate ``rank``."""
        return [stage for stage in range(self.stages) if self.rank_of(stage) == rank]

    def build(self, stages: list[Any], micro_batches: int) -> Any:
        """Return torch's schedule of ``stages``. The last stage returns the loss."""
        from torch.distributed import pipelining

        self.check_microbatches(micro_batches)
        single = self.stages_per_rank == 1 and self.spec.stages_per_rank == 1
        return getattr(pipelining, self.spec.torch_class)(
            stages[0] if single else stages,
            micro_batches,
            loss_fn=lambda output, target: output,
            scale_grads=False,
        )

    def wave_size(self, active_microbatches: int, micro_batches: int) -> int:
        """Return the number of micro-batches to run per pass through the schedule; 0: all.

        Schedules that keep every micro-batch in flight are run in waves to bound their memory. The
        other schedules bound it themselves.

        Args:
            active_microbatches: The config key of that name; 0: two more than the ranks.
        """
        limit = active_microbatches or self.ranks + 2
        return limit if self.spec.all_forward_first and limit < micro_batches else 0

    def check_available(self) -> None:
        """Raise ConfigError if the installed PyTorch lacks the schedule."""
        import torch
        from torch.distributed import pipelining

        if not hasattr(pipelining, self.spec.torch_class):
            raise ConfigError(
                f"pipeline = {self.name!r}: PyTorch {torch.__version__} has no "
                f"{self.spec.torch_class}. Choose another schedule, or upgrade PyTorch."
            )

    def check_microbatches(self, micro_batches: int) -> None:
        """Raise ConfigError if the schedule cannot run ``micro_batches`` micro-batches."""
        if self.name == "dualpipev" and micro_batches < self.stages:
            raise ConfigError(
                f"pipeline = 'dualpipev' needs at least as many microbatches as stages "
                f"({self.stages}), but microbatches = {micro_batches}. Raise microbatches."
            )
        if self.name in ("interleaved_1f1b", "interleaved_zero_bubble"):
            rounds = max(1, micro_batches // self.ranks)
            if micro_batches % rounds:
                raise ConfigError(
                    f"pipeline = {self.name!r} runs micro-batches in rounds of about one per rank, "
                    f"and microbatches = {micro_batches} cannot be divided into {rounds} equal "
                    "rounds. Set microbatches to a multiple of pipeline_parallel_degree = "
                    f"{self.ranks}."
                )


def find_schedule(
    name: str, ranks: int, stages_per_rank: int, micro_batches: int
) -> PipelineSchedule:
    """Return the schedule for the config's ``pipeline`` and ``virtual_pipeline_degree``.

    Args:
        name: A key of `SCHEDULES` or `SMP_SCHEDULES`.
        stages_per_rank: 0: the fewest the schedule allows.

    Raises:
        ConfigError: The schedule does not support ``stages_per_rank``.
    """
    name = SMP_SCHEDULES.get(name, name)
    if name == "1f1b" and micro_batches < ranks:
        # 1F1B degenerates to GPipe: no backward pass can start before the last forward pass.
        name = "gpipe"
    required = SCHEDULES[name].stages_per_rank
    count = stages_per_rank or required or 2
    if count != required and (required or count < 2):
        others = "; interleaved_1f1b and interleaved_zero_bubble take more" * (required == 1)
        raise ConfigError(
            f"virtual_pipeline_degree = {stages_per_rank}: pipeline = {name!r} has "
            f"{required or '2 or more'} stages per rank{others}. Set virtual_pipeline_degree to "
            "match, or choose another schedule."
        )
    return PipelineSchedule(name, ranks, count)


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
