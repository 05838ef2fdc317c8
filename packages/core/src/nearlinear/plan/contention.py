"""What collectives cost computation beyond their own time, where they were measured."""

import math
from dataclasses import dataclass, fields

from .groups import Group


@dataclass(frozen=True)
class Contention:
    """Of collectives between ranks that stand in one way: cores they take, ranks they wake."""

    backend: str
    ranks: int
    nodes: int
    sharing: int
    """groups of that kind over one node's adapters, all at once"""
    turn_share: float = 0.0
    """of computation that takes turns with collectives, that it takes longer: cores that do both go
    from one to the other rank by rank"""
    turn_seconds: float = 0.0
    """seconds more for each of those collectives, however small: ranks that have to be woken"""
    borrowed_share: float = 0.0
    """of a collective's time, that computation beside it loses: more than 1 where cores move the
    bytes of several ranks"""
    borrowed_seconds: float = 0.0
    """seconds more that computation loses to each of those collectives, however small"""

    def in_turn(self, computing: float, count: float) -> float:
        """Seconds that ``computing`` takes longer with ``count`` collectives between it."""
        return self.turn_share * computing + self.turn_seconds * count

    def beside(self, moving: float, count: float) -> float:
        """Seconds that computation loses to ``count`` collectives of ``moving`` seconds in all."""
        return self.borrowed_share * moving + self.borrowed_seconds * count


MEASURED = tuple(field.name for field in fields(Contention) if field.default == 0.0)


def nearest(rows: list, group: Group):
    """Of ``rows`` with ranks, nodes and sharing, the one that stands most like ``group``.

    One that is between nodes if it is, and inside a node if it is not; None where there is none.
    """
    names = "ranks", "nodes", "sharing"

    def distance(row) -> list[float]:
        return [abs(math.log(getattr(row, name) / getattr(group, name))) for name in names]

    like = [row for row in rows if (row.nodes > 1) == (group.nodes > 1)]
    return min(like, key=distance, default=None)
