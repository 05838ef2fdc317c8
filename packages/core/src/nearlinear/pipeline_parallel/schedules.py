"""Pipeline schedules: names, and the assignment of stages to ranks.

The schedules are those of ``torch.distributed.pipelining``. SMP's two names are aliases: ``simple``
is GPipe (Huang et al. 2019), and ``interleaved`` is 1F1B (PipeDream, Narayanan et al. 2019). In
torch "interleaved" means several stages per rank (Narayanan et al. 2021). This module imports torch
only to build a schedule, so that the planner can use it without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
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
