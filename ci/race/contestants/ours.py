"""This project, as its README says to use it."""

from __future__ import annotations

import nearlinear as nl

from .. import model
from ..plan import Plan


class Mics:
    def __init__(self, plan: Plan, two_hop: bool = True, free_blocks: bool = False, **config):
        """``free_blocks``: between forward and backward, all of them, as FSDP2 does."""
        nl.init({"hybrid_shard_degree": plan.shard, **config}, ranks_per_node=plan.ranks_per_node)
        self.runtime = nl.runtime.current()
        self.model = nl.shard(model.build(plan), reshard_after_forward=free_blocks or None)
        if free_blocks:
            self.model.set_reshard_after_forward(False, recurse=False)  # but not the root
        self.optimizer = model.optimizer(self.model.parameters(), plan)
        self.two_hop = two_hop

    def lanes(self) -> list:
        """What communicates beside computation, and keeps a record of it on demand."""
        lanes = self.runtime.lanes
        return [lanes.gathers, lanes.reductions] if lanes is not None else []

    def step(self, batches) -> float:
        total = 0.0
        for batch in nl.accumulate(self.model, batches, two_hop=self.two_hop):
            loss = self.model(**batch).loss
            loss.backward()
            total += loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total / len(batches)


def build(plan: Plan, **options) -> Mics:
    return Mics(plan, **options)
