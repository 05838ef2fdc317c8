"""Why a run ends before its time: which rank, on which host, at what."""

from __future__ import annotations

import dataclasses
import json
import signal
from dataclasses import dataclass
from typing import Literal

from ..errors import NearlinearError


class RankLost(NearlinearError):
    """Another rank has died, hangs or has failed, and this one would wait for it for ever."""

    everywhere = True

    def __init__(self, message: str, restart: bool = True, gone: int | None = None):
        super().__init__(message)
        self.gone = gone
        """the rank, if it is dead: what it has begun stays as it is"""
        # a rank that is lost may be there the next time; one that failed by its own fault is not
        self.exit_code = 128 + signal.SIGTERM if restart else 1


@dataclass(frozen=True)
class Alarm:
    """The first fault of a job: the same on every rank."""

    kind: Literal["silent", "hung", "left", "deadlock", "failed", "store"]
    rank: int | None
    """whose fault it is; None: nobody's more than the others'"""
    text: str
    """all of it in one line"""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Alarm:
        return cls(**json.loads(text))

    def error(self, more: str = "") -> RankLost:
        """What ranks raise that are well; ``more``: what has come of it."""
        gone = self.rank if self.kind == "silent" else None
        return RankLost("; ".join(filter(None, [self.text, more])), self.kind != "failed", gone)
