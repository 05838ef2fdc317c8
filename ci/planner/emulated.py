"""The planner against step times of the emulated cluster, by a machine that ``tune`` measured.

    sudo .venv/bin/python -m ci.planner.emulated                   all places: half an hour
    sudo .venv/bin/python -m ci.planner.emulated --quick           one place, its main layouts
    sudo .venv/bin/python -m ci.planner.emulated --json FILE       keep everything there

Contestants of the race take their steps in turn; before, between and after them ``nearlinear tune
--machine`` measures the very cluster they stand on, and never sees a step. The planner then says
what each step takes, by those measurements alone. One such run at a time: they hold a lock.
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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ci.cluster import Cluster, RankFailed, status_of
from ci.race.contestants import ENTRIES
from ci.race.plan import Plan
from ci.race.teams import Team
from nearlinear.plan import hardware, machine, parameters, workload
from nearlinear.plan.step import step
from nearlinear.train import config as train_config
from nearlinear.train.config import TrainConfig
from nearlinear_collectives.bench import machine as machine_facts

MODULE = "ci.planner.emulated"
LOCK = Path(tempfile.gettempdir()) / "nearlinear-timed.lock"
AIM = 0.15
TUNINGS = 3  # before and between the steps
QUIET = 0.15  # cores that other programs may keep busy while something is timed
TRIES = 4  # until it is that quiet; then the quietest counts
PAUSE = 5.0  # seconds between tries


@dataclass(frozen=True)
class Case:
    """A contestant of the race, and what of its plan is changed."""

    contestant: str
    changes: dict = field(default_factory=dict)

    def plan(self, place: Place) -> Plan:
        known = {"nodes": place.nodes, "ranks_per_node": place.ranks, "rate": place.rates[0]}
        return Plan((self.contestant,), **(known | self.changes)).check()

    def words(self, place: Place) -> str:
        plan = self.plan(place)
        degree = "" if self.contestant == "compute" else f", shard {shard_degree(self, plan)}"
        return f"{self.contestant}{degree}, {plan.accumulation} x {plan.micro_batch}"


@dataclass(frozen=True)
class Place:
    """A cluster, the rates that its links are set to one after the other, and who runs there."""

    nodes: int
    ranks: int
    rates: tuple[str, ...]
    cases: tuple[Case, ...]


USUAL = (
    Case("compute"),
    Case("fsdp2"),
    Case("fsdp2_nl"),
    Case("hybrid"),
    Case("two_hop"),
    Case("overlapped"),
    Case("ours"),
    Case("ours", {"shard": 4}),
    Case("ours_nl"),
    Case("ours_nl", {"accumulation": 1}),
    Case("two_hop", {"accumulation": 1}),
)
PLACES = (
    Place(4, 1, ("1gbit",), USUAL),
    Place(4, 1, ("300mbit", "3gbit"), (Case("fsdp2"), Case("two_hop"), Case("ours_nl"))),
    Place(2, 2, ("1gbit",), (Case("fsdp2"), Case("overlapped"), Case("ours"), Case("ours_nl"))),
)
QUICK = (Place(4, 1, ("1gbit",), USUAL[:7]),)


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


def shard_degree(case: Case, plan: Plan) -> int:
    """Ranks that share a copy of the states."""
    entry = ENTRIES[case.contestant]
    return plan.world if entry.options.get("kind") == "full" else plan.shard


def config_of(case: Case, plan: Plan) -> TrainConfig:
    """The config by which the trainer would do what the contestant does."""
    options = dict(ENTRIES[case.contestant].options)
    kind = options.pop("kind", "")
    two_hop = options.pop("two_hop", kind != "hybrid")
    backend = options.pop("backend", "")
    if kind:  # FSDP2 by itself: nothing beside computation on the CPU, blocks freed at once
        options |= {
            "overlap_communication": False,
            "prefetch_depth": 0,
            "sdp_max_live_parameters": 0,
        }
    if backend:
        options["communication_backend"] = backend
    options.pop("free_blocks", None)
    alone = kind == "compute"
    return train_config.load(
        {
            "model": {
                "preset": "gpt2-tiny",
                "overrides": {
                    "n_embd": plan.width,
                    "n_layer": plan.layers,
                    "n_head": plan.heads,
                    "n_positions": plan.sequence,
                    "vocab_size": plan.vocabulary,
                },
            },
            "parallel": {
                "hybrid_shard_degree": 1 if alone else shard_degree(case, plan),
                **options,
            },
            "batch": {"micro_batch_size": plan.micro_batch, "accumulation": plan.accumulation},
            "train": {"two_hop": two_hop},
        },
        environment={},
    )


def predicted(case: Case, plan: Plan, node: hardware.Node) -> float:
    """Seconds of a step by the planner, on as many of the tuned nodes as it ran on."""
    options = ENTRIES[case.contestant].options
    alone = options.get("kind") == "compute"
    cluster = hardware.Cluster(node, 1, gpus=1) if alone else hardware.Cluster(node, plan.nodes)
    where = cluster.world, node.gpus
    work = workload.from_config(config_of(case, plan), *where, plan.vocabulary, node.gpu.is_cpu)
    if "kind" in options or options.get("free_blocks"):  # FSDP2's own order of gathering
        work = replace(work, stays_gathered=False)
    return step(work, cluster, parameters.on(node, work.backend)).seconds


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
            where = f"{place.nodes} x {place.ranks}, {rate}"
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
    for _ in range(TRIES):
        background, before = machine_facts.Background(), own_seconds(teams)
        found = work()
        tries.append((found, background.cores(own_seconds(teams) - before) or 0.0))
        if tries[-1][1] <= QUIET:
            break
        time.sleep(PAUSE)
    return min(tries, key=lambda each: each[1])


def own_seconds(teams: list[Team]) -> float:
    """Processor time of this program, of what it has started and ended, and of ``teams``."""
    ticks = 0
    for rank in (rank for team in teams for rank in team.ranks):
        fields = Path(f"/proc/{rank.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])  # in user mode and in the kernel
    return machine_facts.own_seconds() + ticks / os.sysconf("SC_CLK_TCK")


def in_teams(place: Place) -> list[list[Case]]:
    """Cases that can share processes: they differ in who trains alone."""
    found: dict[tuple, list[Case]] = {}
    for case in place.cases:
        entry = ENTRIES[case.contestant]
        key = entry.requires, entry.default_backend, *sorted(case.changes.items())
        found.setdefault(key, []).append(case)
    return list(found.values())


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


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    if options.json and not options.json.parent.is_dir():
        print(f"error: {options.json}: there is no folder {options.json.parent}", file=sys.stderr)
        return 2
    return status_of(lambda: _run(options))


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
    print(f"\n{summary(rows)}")
    print(f"load average of a minute before it: {loads[0][0]:.2f}")
    return 0


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
    add("--json", type=Path, metavar="FILE", help="keep rows and tunings there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
