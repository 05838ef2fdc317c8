"""Races that were kept as files (``python -m ci.race --json FILE``): times, speed-ups, efficiency.

A file holds one race, or a series of races that differ in one setting (``races``: nodes, link
rate). In a race everybody steps in turn, and a ratio compares the turns of the same round: it is
the ratio of the medians, with the smallest and largest ratio that any round gave.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "ci" / "race" / "results"


class Spread(NamedTuple):
    """A median and the extremes around it."""

    median: float
    low: float
    high: float

    def show(self, digits: int = 2) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


@dataclass(frozen=True)
class Race:
    """One race: which command made it and where, its plan, and every turn, warm-up too."""

    name: str
    origin: dict
    plan: dict
    turns: list[dict]

    @property
    def command(self) -> str:
        return self.origin["command"]

    @property
    def names(self) -> list[str]:
        """Contestants that have timed turns, in the order they race in."""
        return list(dict.fromkeys(turn["contestant"] for turn in self.turns if turn["timed"]))

    def seconds(self, contestant: str) -> Spread:
        """Of an optimizer step; KeyError for one that did not race."""
        times = list(self._rounds(contestant).values())
        return Spread(statistics.median(times), min(times), max(times))

    def sent_bytes(self, contestant: str) -> float:
        """By the busiest NIC in a step, median."""
        return statistics.median(turn["sent_bytes"] for turn in self._timed(contestant))

    def speed_up(self, baseline: str, contestant: str) -> Spread:
        """How many times as fast as ``baseline`` is ``contestant``."""
        slow, fast = self._rounds(baseline), self._rounds(contestant)
        if slow.keys() != fast.keys():
            raise ValueError(f"{self.name}: {baseline} and {contestant} took different rounds")
        ratios = [slow[step] / fast[step] for step in slow]
        median = statistics.median(slow.values()) / statistics.median(fast.values())
        return Spread(median, min(ratios), max(ratios))

    def efficiency(self, contestant: str, compute: str = "compute") -> Spread:
        """The share of a step that ``contestant`` computes: 1 where nothing waits for the network.

        The emulated nodes share one machine's cores, so a step's computation takes the longer the
        more nodes there are. What computes alone, on as many nodes, pays for that as well.
        """
        return self.speed_up(compute, contestant)

    def fastest(self, candidates: Iterable[str]) -> str | None:
        """The one with the smallest median among those that raced; None if none did."""
        raced = [name for name in candidates if name in self.names]
        return min(raced, key=lambda name: self.seconds(name).median, default=None)

    def _timed(self, contestant: str) -> list[dict]:
        found = [t for t in self.turns if t["timed"] and t["contestant"] == contestant]
        if not found:
            raise KeyError(f"{self.name}: {contestant} did not race")
        return found

    def _rounds(self, contestant: str) -> dict[int, float]:
        return {turn["step"]: turn["seconds"] for turn in self._timed(contestant)}


def read(folder: Path = FOLDER) -> dict[str, list[Race]]:
    """Every file's races by the file's name without suffix; single races come first.

    Raises ValueError for a file that is not a kept race.
    """
    found = {path.stem: races_of(path) for path in sorted(Path(folder).glob("*.json"))}
    return dict(sorted(found.items(), key=lambda item: len(item[1]) > 1))


def races_of(path: Path) -> list[Race]:
    """The races of one file, one or several."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        origin = {key: record[key] for key in ("command", "machine", "versions")}
        parts = record.get("races", [record])
        return [Race(path.stem, origin, part["plan"], part["results"]) for part in parts]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path.name} is not a kept race ({type(error).__name__}: {error}); "
            f"write it with: {command_for(path.stem)}"
        ) from error


def command_for(stem: str) -> str:
    """What writes a result of that name, such as ``4x1``: 4 nodes of 1 rank."""
    nodes, _, ranks = stem.partition("x")
    layout = f"--nodes {nodes} --ranks {ranks} " if nodes.isdigit() and ranks.isdigit() else ""
    return f"python -m ci.race {layout}--json {FOLDER.relative_to(ROOT) / stem}.json"


def sweep_for(options: str, stem: str) -> str:
    """What writes a series of that name."""
    return f"python -m ci.race.sweep {options} --json {FOLDER.relative_to(ROOT) / stem}.json"
