"""What is raced: the model, the cluster, the contestants. Travels to the ranks as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Plan:
    """One race. Sizes are of GPT-2; ``shard`` is the MiCS shard group, in ranks."""

    contestants: tuple[str, ...]
    nodes: int = 4
    ranks_per_node: int = 1
    shard: int = 2
    rate: str = "1gbit"
    layers: int = 8
    width: int = 384
    heads: int = 6
    vocabulary: int = 8192
    sequence: int = 128
    micro_batch: int = 3
    accumulation: int = 4
    steps: int = 5
    warm_up: int = 1
    learning_rate: float = 1e-3

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        read = json.loads(text)
        return cls(**{**read, "contestants": tuple(read["contestants"])})

    def check(self) -> Plan:
        """Itself. Raises ValueError for what cannot be raced."""
        for name in ("nodes", "ranks_per_node", "micro_batch", "accumulation", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name.replace('_', ' ')}: {getattr(self, name)}; at least 1")
        if self.shard < 1 or self.world % self.shard:
            raise ValueError(f"--shard {self.shard} does not divide {self.world} ranks")
        if self.shard % self.ranks_per_node and self.ranks_per_node % self.shard:
            raise ValueError(
                f"--shard {self.shard}: groups would hold different numbers of ranks on different "
                f"nodes of {self.ranks_per_node}"
            )
        return self

    @property
    def world(self) -> int:
        return self.nodes * self.ranks_per_node
