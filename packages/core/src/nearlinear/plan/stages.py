"""What the ranks of a pipeline hold: which blocks, and which end of the model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..parallel.pipeline.schedules import Plan


@dataclass(frozen=True)
class Stages:
    """The stages of one pipeline, or the whole model as the only one."""

    plan: Plan
    blocks: tuple[float, ...]
    """of every stage; a part of a block where a published run does not say whose it is"""

    @cached_property
    def most_blocks(self) -> float:
        """Of the rank that has the most."""
        return max(self._by_rank(self.blocks))

    def most_parameters(self, block: float, ends: tuple[float, float]) -> float:
        """Of the rank that has the most: ``block`` each, and the model's two ``ends``."""
        held = [count * block for count in self.blocks]
        held[0] += ends[0]
        held[-1] += ends[1]
        return max(self._by_rank(held))

    def _by_rank(self, values) -> list[float]:
        ranks = range(self.plan.ranks)
        return [sum(values[stage] for stage in self.plan.stages_of(rank)) for rank in ranks]
