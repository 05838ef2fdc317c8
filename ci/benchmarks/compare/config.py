"""Configuration of a comparison: model, cluster, batch and systems."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class CompareConfig:
    """Configuration of a comparison, passed to the ranks as JSON."""

    systems: tuple[str, ...]
    nodes: int = 4
    ranks_per_node: int = 1
    shard: int = 2
    """Ranks of a MiCS shard group."""
    rate: str = "1gbit"
    """Limit of each NIC per direction, in tc's notation."""
    model: str = "gpt2"
    """Architecture: ``gpt2`` or ``llama``."""
    layers: int = 8
    width: int = 384
    heads: int = 6
    vocabulary: int = 8192
    sequence: int = 128
    micro_batch: int = 3
    accumulation: int = 4
    steps: int = 5
    """Timed steps of each system."""
    warm_up: int = 1
    """Untimed steps of each system."""
    learning_rate: float = 1e-3
    memory: bool = False
    """Measure the peak memory of each system in one more step."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> CompareConfig:
        return cls.from_fields(json.loads(text))

    @classmethod
    def from_fields(cls, fields: dict) -> CompareConfig:
        """Return the configuration of a record: ``fields`` of `asdict`, also as read from JSON."""
        return cls(**{**fields, "systems": tuple(fields["systems"])})

    @property
    def inner(self) -> int:
        """Width between the products of Llama's feed-forward layer: 8/3 of the width."""
        return round(self.width / 24) * 64

    def validate(self) -> CompareConfig:
        """Return this configuration. Raises ValueError if it cannot run."""
        for name in ("nodes", "ranks_per_node", "micro_batch", "accumulation", "steps"):
            if getattr(self, name) < 1:
                option = name.replace("_", " ")
                raise ValueError(f"{option}: {getattr(self, name)}; must be at least 1")
        if self.shard < 1 or self.world % self.shard:
            raise ValueError(f"--shard {self.shard} does not divide {self.world} ranks")
        if self.shard % self.ranks_per_node and self.ranks_per_node % self.shard:
            raise ValueError(
                f"--shard {self.shard}: shard groups would have different numbers of ranks on "
                f"different nodes of {self.ranks_per_node} ranks. Use a multiple or a divisor of "
                "--ranks."
            )
        return self

    @property
    def world(self) -> int:
        """World size."""
        return self.nodes * self.ranks_per_node
