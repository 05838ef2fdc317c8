"""What a rank is doing, and how it tells the others."""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass


class Operation:
    """What this rank is doing now, changed by its own thread and read by its watchdog's."""

    def __init__(self):
        self.text, self.inside, self.patience = "the beginning", "", 1.0
        self.count = self.place = 0
        self.since = time.monotonic()

    def begin(self, text: str, patience: float = 1.0) -> None:
        """The next one; all ranks have the same ones in the same order."""
        self.text, self.inside, self.patience = text, "", patience
        self.count += 1
        self.place, self.since = 0, time.monotonic()

    def reach(self, inside: str) -> None:
        """Somewhere inside of it."""
        self.inside = inside
        self.place += 1
        self.since = time.monotonic()


@dataclass(frozen=True)
class Beat:
    """One word of a rank to the others."""

    number: int
    """grows with every beat: that it does is what shows that the rank is alive"""
    host: str
    pid: int
    house: str
    """ranks of one house see each other's processes by ``pid``"""
    doing: str
    count: int
    """operations begun"""
    place: int
    """and places reached inside of the last one"""
    still: float
    """seconds since then"""
    patience: float
    """how many times the usual seconds the operation may take"""
    waits: bool
    """whether it is inside of a collective"""
    at: str
    """the line of code"""
    left: bool = False
    """whether it has left the run, and beats no more"""
    missed: bool = False
    """whether a collective failed here, as when another rank is gone"""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Beat:
        return cls(**json.loads(text))

    def __str__(self) -> str:
        return f"{self.doing} ({self.at})" if self.at else self.doing
