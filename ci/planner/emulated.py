"""The planner against step times of the emulated cluster, by a machine that ``tune`` measured.

    sudo .venv/bin/python -m ci.planner.emulated                   all places: 40 minutes
    sudo .venv/bin/python -m ci.planner.emulated --quick           one place, its main layouts
    sudo .venv/bin/python -m ci.planner.emulated --json FILE       keep everything there
    python -m ci.planner.emulated --again FILE                     what the planner says now of that

Contestants of the race take their steps in turn; before, between and after them ``nearlinear tune
--machine`` measures the very cluster they stand on, and never sees a step. The planner then says
what each step takes, by those measurements alone. One such run at a time: they hold a lock. Ends
with 1 where a layout's error is beyond 15 %.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from ci.cluster import Cluster, RankFailed, status_of
from ci.planner.cases import PLACES, QUICK, Place, in_teams, predicted
from ci.race.teams import Team
from nearlinear import schema
from nearlinear.errors import ConfigError
from nearlinear.plan import hardware, machine
from nearlinear_collectives.bench import machine as machine_facts

MODULE = "ci.planner.emulated"
LOCK = Path(tempfile.gettempdir()) / "nearlinear-timed.lock"
AIM = 0.15
TUNINGS = 3  # before and between the steps
QUIET = 0.15  # cores that other programs may keep busy while something is timed
TRIES = 4  # until it is that quiet; then the quietest counts
PAUSE = 5.0  # seconds between tries


@dataclass(frozen=True)
class Row:
    """A layout at a place: what its steps took, and what the planner says."""

    place: str
    layout: str
    seconds: list[float]
    """of each timed step"""
    predicted: list[float]
    """by each tuning"""

    @property
    def measured(self) -> float:
        return statistics.median(self.seconds)

    @property
    def planned(self) -> float:
        return statistics.median(self.predicted)

    @property
    def error(self) -> float:
        return self.planned / self.measured - 1


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Hold the lock of timed runs; waits for whoever has it."""
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def tuned(cluster: Cluster, place: Place, folder: Path, rounds: int) -> hardware.Node:
    """The machine as ``nearlinear tune`` measures it on this cluster. Raises RankFailed."""
    path = folder / "emulated.toml"
    command = [sys.executable, "-m", "nearlinear.cli", "tune", "--machine", str(path)]
    ranks = cluster.start(
        [*command, "--rounds", str(rounds)],
        place.ranks,
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TORCH_CPP_LOG_LEVEL": "ERROR"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    if any(codes := cluster.wait(ranks, 600)):
        raise RankFailed(f"nearlinear tune ended with {codes}")
    return machine.read(path)


def at_place(place: Place, steps: int, rounds: int) -> tuple[list[Row], list[dict]]:
    """The rows of one place, and its tunings; prints each as it comes."""
    rows, tunings = [], []
    with Cluster(place.nodes, place.rates[0]) as cluster, tempfile.TemporaryDirectory() as folder:
        plans = {case.words(place): (case, case.plan(place)) for case in place.cases}
        teams = {}
        for together in in_teams(place):
            team = Team(cluster, together[0].plan(place), [case.contestant for case in together])
            team.await_ready()
            teams |= {case.words(place): team for case in together}
        for rate in place.rates:
            cluster.set_rate(rate)
            where = place.where(rate)
            nodes, seconds, busy = [], {words: [] for words in teams}, []
            for turn in range(1 + steps):
                if turn * (TUNINGS - 1) % max(1, steps) < TUNINGS - 1:
                    tune = functools.partial(tuned, cluster, place, Path(folder), rounds)
                    node, others = quietly(tune, list(teams.values()))
                    nodes.append(node)
                    log(f"{where}: tuned; others {others:.2f} cores")
                for words, team in teams.items():
                    step = functools.partial(team.turn, plans[words][0].contestant, turn)
                    if not turn:  # to warm up
                        step()
                        continue
                    took, others = quietly(step, [team])
                    log(f"{where}: {words}: {took['seconds']:.2f} s; others {others:.2f} cores")
                    seconds[words].append(took["seconds"])
                    busy.append(others)
            tunings += [
                {"place": where, "others": statistics.mean(busy), "node": asdict(node)}
                for node in nodes
            ]
            for words, (case, plan) in plans.items():
                answers = [predicted(case, plan, node) for node in nodes]
                rows.append(Row(where, words, seconds[words], answers))
                print(line(rows[-1]), flush=True)
        for team in {id(team): team for team in teams.values()}.values():
            team.end()
    return rows, tunings


def quietly(work: Callable, teams: list[Team]) -> tuple[object, float]:
    """What ``work`` gives, of the quietest of a few tries, and the cores that others had then.

    ``teams``: whose processor time is not others'.
    """
    tries = []
    while True:
        background, before = machine_facts.Background(), own_seconds(teams)
        found = work()
        tries.append((found, background.cores(own_seconds(teams) - before) or 0.0))
        if tries[-1][1] <= QUIET or len(tries) == TRIES:
            return min(tries, key=lambda each: each[1])
        time.sleep(PAUSE)


def own_seconds(teams: list[Team]) -> float:
    """Processor time of this program, of what it has started and ended, and of ``teams``."""
    ticks = 0
    for rank in (rank for team in teams for rank in team.ranks):
        fields = Path(f"/proc/{rank.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])  # in user mode and in the kernel
    return machine_facts.own_seconds() + ticks / os.sysconf("SC_CLK_TCK")


def log(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def line(row: Row) -> str:
    mark = "" if abs(row.error) <= AIM else "  beyond 15 %"
    spread = f"{min(row.seconds):.2f}-{max(row.seconds):.2f}"
    return (
        f"{row.place:15} {row.layout:28} {row.measured:8.2f} {spread:>13} {row.planned:9.2f} "
        f"{row.error:+7.1%}{mark}"
    )


HEAD = f"{'place':15} {'layout':28} {'measured':>8} {'min-max':>13} {'predicted':>9} {'error':>7}"


def summary(rows: list[Row]) -> str:
    errors = sorted(abs(row.error) for row in rows)
    within = sum(error <= AIM for error in errors)
    return (
        f"{len(rows)} layouts: median error {statistics.median(errors):.1%}, worst "
        f"{errors[-1]:.1%}, {within} within {AIM:.0%}"
    )


def again(path: Path) -> list[Row]:
    """What the planner says now of steps that were kept, by the tunings kept with them.

    Raises ConfigError.
    """
    kept = schema.read(path)
    if not kept.get("rows") or not kept.get("tunings"):
        raise ConfigError(f"{path}: holds no run; --json FILE keeps one")
    measured = {(row["place"], row["layout"]): row["seconds"] for row in kept["rows"]}
    tunings: dict[str, list[hardware.Node]] = {}
    for each in kept["tunings"]:
        node = schema.build(hardware.Node, each["node"], f"{path}: {each['place']}")
        tunings.setdefault(each["place"], []).append(node)
    return [
        Row(where, case.words(place), seconds, [predicted(case, plan, n) for n in tunings[where]])
        for place in PLACES
        for where in map(place.where, place.rates)
        for case, plan in ((case, case.plan(place)) for case in place.cases)
        if (seconds := measured.get((where, case.words(place))))
    ]


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    for name in ("steps", "rounds"):
        if getattr(options, name) < 1:
            print(f"error: --{name} {getattr(options, name)}: at least 1", file=sys.stderr)
            return 2
    if options.json and not options.json.parent.is_dir():
        print(f"error: {options.json}: there is no folder {options.json.parent}", file=sys.stderr)
        return 2
    return _again(options.again) if options.again else status_of(lambda: _run(options))


def _again(path: Path) -> int:
    try:
        rows = again(path)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(HEAD, *map(line, rows), sep="\n")
    return _summed(rows)


def _run(options) -> int:
    rows, tunings, loads = [], [], [os.getloadavg()]
    with alone():
        print(HEAD)
        for place in QUICK if options.quick else PLACES:
            found = at_place(place, options.steps, options.rounds)
            rows += found[0]
            tunings += found[1]
            loads.append(os.getloadavg())
            if options.json:  # after each, for it takes long
                keep(options.json, rows, tunings, loads)
    print(f"load average of a minute before it: {loads[0][0]:.2f}")
    return _summed(rows)


def _summed(rows: list[Row]) -> int:
    print(f"\n{summary(rows)}")
    return int(any(abs(row.error) > AIM for row in rows))


def keep(path: Path, rows: list[Row], tunings: list[dict], loads: list) -> None:
    kept = {
        "command": " ".join(["python", "-m", MODULE, *sys.argv[1:]]),
        "day": time.strftime("%Y-%m-%d"),
        "load": loads,
        "rows": [{**asdict(row), "error": row.error} for row in rows],
        "tunings": tunings,
    }
    path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="one place, its main layouts")
    add("--steps", type=int, default=4, metavar="K", help="timed, of each layout (4)")
    add("--rounds", type=int, default=3, metavar="N", help="of each tuning (3)")
    add("--again", type=Path, metavar="FILE", help="predict what was kept there; nothing is run")
    add("--json", type=Path, metavar="FILE", help="keep rows and tunings there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
