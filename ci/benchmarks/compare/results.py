"""Read comparisons from files (``python -m ci.benchmarks.compare --json FILE``).

A file holds one comparison, or a series of comparisons that differ in one setting (``runs``: nodes,
link rate). Within a comparison every system runs one step per round. A ratio of two systems is the
ratio of their medians, with the smallest and largest ratio within one round.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .config import CompareConfig
from .report import peaks_in_parameters

ROOT = Path(__file__).resolve().parents[3]
FOLDER = Path(__file__).resolve().parent / "results"


class Spread(NamedTuple):
    """A median and its extremes."""

    median: float
    low: float
    high: float

    def show(self, digits: int = 2) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


@dataclass(frozen=True)
class Comparison:
    """Results of one comparison."""

    name: str
    """Stem of the file."""
    origin: dict
    """Command, machine and library versions."""
    config: dict
    """Fields of `config.CompareConfig`."""
    records: list[dict]
    """Records of all steps, warm-up included."""

    @property
    def command(self) -> str:
        return self.origin["command"]

    @property
    def names(self) -> list[str]:
        """Systems with timed steps, in execution order."""
        return list(dict.fromkeys(record["system"] for record in self.records if record["timed"]))

    def seconds(self, system: str) -> Spread:
        """Return the seconds of an optimizer step. Raises KeyError for an unknown system."""
        times = list(self._seconds_by_step(system).values())
        return Spread(statistics.median(times), min(times), max(times))

    def sent_bytes(self, system: str) -> float:
        """Return the median of the bytes sent by the busiest NIC in a step."""
        return statistics.median(record["sent_bytes"] for record in self._timed(system))

    def speed_up(self, baseline: str, system: str) -> Spread:
        """Return the speed of ``system`` relative to ``baseline``.

        If a heat of a race measured one of them, their rounds differ, and the extremes are those of
        any two rounds.
        """
        slow, fast = self._seconds_by_step(baseline), self._seconds_by_step(system)
        median = statistics.median(slow.values()) / statistics.median(fast.values())
        if self._in_heat(baseline) or self._in_heat(system):
            low, high = min(slow.values()), max(slow.values())
            return Spread(median, low / max(fast.values()), high / min(fast.values()))
        if slow.keys() != fast.keys():
            raise ValueError(
                f"{self.name}: {baseline} and {system} were measured in different rounds"
            )
        ratios = [slow[step] / fast[step] for step in slow]
        return Spread(median, min(ratios), max(ratios))

    def efficiency(self, system: str, compute: str = "compute") -> Spread:
        """Return the computing share of a step of ``system``; 1 means no exposed communication.

        Emulated nodes share the cores of one machine, so that computation slows down as nodes are
        added. The compute-only system on the same cluster is affected equally.
        """
        return self.speed_up(compute, system)

    def peak(self, system: str) -> float:
        """Return the peak of allocated tensors, in sizes of the float32 parameters.

        Raises KeyError for a system whose memory was not measured.
        """
        return peaks_in_parameters(CompareConfig.from_fields(self.config), self.records)[system]

    def fastest(self, candidates: Iterable[str], within: float = math.inf) -> str | None:
        """Return the measured candidate with the smallest median, or None.

        ``within`` limits the peak of memory in sizes of the parameters.
        """
        measured = [name for name in candidates if name in self.names]
        if within < math.inf:
            measured = [name for name in measured if self.peak(name) <= within]
        return min(measured, key=lambda name: self.seconds(name).median, default=None)

    def _timed(self, system: str) -> list[dict]:
        found = [r for r in self.records if r["timed"] and r["system"] == system]
        if not found:
            raise KeyError(f"{self.name}: {system} was not measured")
        return found

    def _in_heat(self, system: str) -> bool:
        return any(record.get("heat") for record in self._timed(system))

    def _seconds_by_step(self, system: str) -> dict[int, float]:
        return {record["step"]: record["seconds"] for record in self._timed(system)}


def read_folder(folder: Path = FOLDER) -> dict[str, list[Comparison]]:
    """Return the comparisons of every file by file stem, files with a single comparison first.

    Raises:
        ValueError: If a file does not hold comparisons.
    """
    found = {path.stem: read_file(path) for path in sorted(Path(folder).glob("*.json"))}
    return dict(sorted(found.items(), key=lambda item: len(item[1]) > 1))


def read_file(path: Path) -> list[Comparison]:
    """Return the comparisons of one file."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        origin = {key: record[key] for key in ("command", "machine", "versions")}
        parts = record.get("runs", [record])
        return [Comparison(path.stem, origin, part["config"], part["results"]) for part in parts]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path.name} does not hold a comparison ({type(error).__name__}: {error}). "
            f"Write it with: {command_for(path.stem)}"
        ) from error


def command_for(stem: str) -> str:
    """Return the command that writes a result, such as ``4x1``: 4 nodes of 1 rank."""
    nodes, _, ranks = stem.partition("x")
    layout = f"--nodes {nodes} --ranks {ranks} " if nodes.isdigit() and ranks.isdigit() else ""
    path = FOLDER.relative_to(ROOT) / f"{stem}.json"
    return f"python -m ci.benchmarks.compare {layout}--json {path}"


def sweep_command(options: str, stem: str) -> str:
    """Return the command that writes a series."""
    path = FOLDER.relative_to(ROOT) / f"{stem}.json"
    return f"python -m ci.benchmarks.compare.sweep {options} --json {path}"
