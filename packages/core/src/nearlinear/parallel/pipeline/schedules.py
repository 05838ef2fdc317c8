"""The order of work in a pipeline: names of schedules, and which rank holds which stages.

The schedules are those of ``torch.distributed.pipelining``; SMP's two are among them. Its
``simple`` runs all forward passes and then all backward passes, which is GPipe (Huang et al.,
2019); its ``interleaved`` takes a backward pass whenever there is one to take, which is 1F1B
(PipeDream, Narayanan et al., 2019) and not what torch calls interleaved: several stages per rank
(Narayanan et al., 2021). Nothing here needs torch before a schedule is built.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import ConfigError


@dataclass(frozen=True)
class Schedule:
    """What a schedule is called by torch, and what it asks for."""

    kind: str
    stages_per_rank: int | None = 1
    """exactly so many; None: two or more"""
    all_at_once: bool = False
    """all forward passes before the first backward pass: everything is in flight"""
    v: bool = False
    """ranks hold stages there and back, so that the first and the last stage are neighbours"""
    apart: bool = False
    """gradients of weights are found later than those of inputs, in the parameters that forward and
    backward passes had: these stay gathered"""


SCHEDULES = {
    "gpipe": Schedule("ScheduleGPipe", all_at_once=True),
    "1f1b": Schedule("Schedule1F1B"),
    "interleaved_1f1b": Schedule("ScheduleInterleaved1F1B", None),
    "looped_bfs": Schedule("ScheduleLoopedBFS", None, all_at_once=True),
    "interleaved_zero_bubble": Schedule("ScheduleInterleavedZeroBubble", None, apart=True),
    "zbv_zero_bubble": Schedule("ScheduleZBVZeroBubble", 2, v=True, apart=True),
    "dualpipev": Schedule("ScheduleDualPipeV", 2, v=True, apart=True),
}
OF_SMP = {"simple": "gpipe", "interleaved": "1f1b"}


@dataclass(frozen=True)
class Plan:
    """One pipeline's schedule on ``ranks`` ranks, ``per_rank`` stages on each."""

    name: str
    ranks: int
    per_rank: int

    @property
    def schedule(self) -> Schedule:
        return SCHEDULES[self.name]

    @property
    def stages(self) -> int:
        return self.ranks * self.per_rank

    def rank_of(self, stage: int) -> int:
        """The pipeline coordinate of the rank that holds ``stage``."""
        turn, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self.schedule.v and turn % 2 else place

    def stages_of(self, rank: int) -> list[int]:
        return [stage for stage in range(self.stages) if self.rank_of(stage) == rank]

    def build(self, stages: list, micro_batches: int):
        """Torch's schedule of ``stages``, of which the last returns what is differentiated."""
        from torch.distributed import pipelining

        self.check(micro_batches)
        single = self.per_rank == 1 and self.schedule.stages_per_rank == 1
        return getattr(pipelining, self.schedule.kind)(
            stages[0] if single else stages,
            micro_batches,
            loss_fn=lambda output, target: output,
            scale_grads=False,
        )

    def in_flight(self, asked: int, micro_batches: int) -> int:
        """How many of ``micro_batches`` are under way at once, where ``asked`` are; 0: all."""
        most = asked or self.ranks + 2
        return most if self.schedule.all_at_once and most < micro_batches else 0

    def require(self) -> None:
        """Raise ConfigError where this PyTorch has no such schedule."""
        import torch
        from torch.distributed import pipelining

        if not hasattr(pipelining, self.schedule.kind):
            raise ConfigError(
                f"pipeline = {self.name!r}: PyTorch {torch.__version__} has no "
                f"{self.schedule.kind}; choose another schedule"
            )

    def check(self, micro_batches: int) -> None:
        """Raise ConfigError if the schedule cannot run so many micro-batches."""
        if self.name == "dualpipev" and micro_batches < self.stages:
            raise ConfigError(
                f"pipeline = 'dualpipev' needs at least as many microbatches as stages, "
                f"{self.stages}, and microbatches = {micro_batches}: raise it"
            )
        if self.name in ("interleaved_1f1b", "interleaved_zero_bubble"):
            rounds = max(1, micro_batches // self.ranks)
            if micro_batches % rounds:
                raise ConfigError(
                    f"pipeline = {self.name!r} runs micro-batches in rounds of about one per rank: "
                    f"microbatches = {micro_batches} are not {rounds} equal rounds; use a multiple "
                    f"of pipeline_parallel_degree = {self.ranks}"
                )


def plan_for(name: str, ranks: int, per_rank: int, micro_batches: int) -> Plan:
    """The plan of schedule ``name``; ``per_rank`` 0: as few stages as it needs. ConfigError."""
    name = OF_SMP.get(name, name)
    if name == "1f1b" and micro_batches < ranks:
        name = "gpipe"  # the same order, as no backward pass can begin before the last forward pass
    schedule = SCHEDULES[name]
    asked = per_rank or schedule.stages_per_rank or 2
    if asked != schedule.stages_per_rank and (schedule.stages_per_rank or asked < 2):
        needs = schedule.stages_per_rank or "2 or more"
        others = "; interleaved_1f1b and interleaved_zero_bubble take more" * (needs == 1)
        raise ConfigError(
            f"virtual_pipeline_degree = {per_rank}: pipeline = {name!r} has {needs} stages per "
            f"rank{others}"
        )
    return Plan(name, ranks, asked)
