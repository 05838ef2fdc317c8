"""What is wrong with a job before it is sent: where, what, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import ConfigError


@dataclass(frozen=True)
class Fault:
    """One mistake in a request or a `JobSpec`."""

    where: str
    """path in the request, as in ResourceConfig.InstanceType"""
    what: str
    """what is wrong, in words"""
    fix: str
    """what to do"""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.fix}"


class FaultyJob(ConfigError):
    """A job that would be refused, or would fail; all its ``faults`` at once."""

    def __init__(self, faults: Iterable[Fault], subject: str = "the job"):
        self.faults = list(faults)
        count = f"{len(self.faults)} faults" if len(self.faults) > 1 else "a fault"
        lines = "".join(f"\n  {fault}" for fault in self.faults)
        super().__init__(f"{subject} has {count}; nothing was sent:{lines}")
