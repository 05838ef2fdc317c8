"""Compare the planner's step times with measured steps on an emulated cluster.

    sudo .venv/bin/python -m ci.planner_validation.step_time               all clusters, 40 minutes
    sudo .venv/bin/python -m ci.planner_validation.step_time --quick       one cluster, main layouts
    sudo .venv/bin/python -m ci.planner_validation.step_time --json FILE   save all measurements
    python -m ci.planner_validation.step_time --again FILE                 predict a saved run again

Systems run their steps in turn. Before, between and after the steps ``nearlinear tune --machine``
measures the same cluster without observing a step. The planner predicts every step from these
measurements alone. A lock prevents concurrent runs. The exit status is 1 if a layout's error
exceeds 15 %.
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

from ci.benchmarks.collectives import record as bench_record
from ci.benchmarks.compare.run import WorkerGroup
from ci.command_line import make_parser
from ci.emulation.cluster import Cluster, RankFailed, exit_status
from ci.planner_validation.cases import (
    QUICK_SETUPS,
    SETUPS,
    ClusterSetup,
    group_cases,
    predict_step,
)
from nearlinear.config.parallel import schema
from nearlinear.errors import ConfigError
from nearlinear.planner.api import read_measured_node
from nearlinear.planner.cluster import Node

MODULE = "ci.planner_validation.step_time"
LOCK = Path(tempfile.gettempdir()) / "nearlinear-timed.lock"
TARGET_ERROR = 0.15
TUNINGS = 3  # measurements of the machine, before and between the steps
MAX_OTHER_LOAD = 0.15  # cores used by other programs during a measurement
MAX_TRIES = 4  # after which the measurement with the lowest load counts
PAUSE = 5.0  # seconds between tries


@dataclass(frozen=True)
class PredictionRow:
    """Measured and predicted steps of one layout on one cluster."""

    place: str
    """Label of the cluster."""
    layout: str
    seconds: list[float]
    """Seconds of each timed step."""
    predicted: list[float]
    """Predicted seconds from each measurement of the machine."""

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
def exclusive_run() -> Iterator[None]:
    """Hold the lock of timed runs."""
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def measure_machine(cluster: Cluster, setup: ClusterSetup, folder: Path, rounds: int) -> Node:
    """Measure the machine with ``nearlinear tune``. Raises RankFailed."""
    path = folder / "emulated.toml"
    command = [sys.executable, "-m", "nearlinear.cli", "tune", "--machine", str(path)]
    ranks = cluster.start(
        [*command, "--rounds", str(rounds)],
        setup.ranks,
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TORCH_CPP_LOG_LEVEL": "ERROR"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    if any(codes := cluster.wait(ranks, 600)):
        raise RankFailed(f"nearlinear tune ended with {codes}")
    return read_measured_node(path)


def measure_setup(
    setup: ClusterSetup, steps: int, rounds: int
) -> tuple[list[PredictionRow], list[dict]]:
    """Return the rows of one cluster and the measurements of its machine; print each row."""
    rows, tunings = [], []
    with Cluster(setup.nodes, setup.rates[0]) as cluster, tempfile.TemporaryDirectory() as folder:
        configs = {case.label(setup): (case, case.config(setup)) for case in setup.cases}
        workers = {}
        for together in group_cases(setup):
            systems = [case.system for case in together]
            group = WorkerGroup(cluster, together[0].config(setup), systems)
            group.wait_until_ready()
            workers |= {case.label(setup): group for case in together}
        for rate in setup.rates:
            cluster.set_rate(rate)
            where = setup.label(rate)
            nodes, seconds, busy = [], {layout: [] for layout in workers}, []
            for step in range(1 + steps):
                if step * (TUNINGS - 1) % max(1, steps) < TUNINGS - 1:
                    tune = functools.partial(measure_machine, cluster, setup, Path(folder), rounds)
                    node, others = run_quietly(tune, list(workers.values()))
                    nodes.append(node)
                    log(f"{where}: machine measured; other programs used {others:.2f} cores")
                for layout, group in workers.items():
                    run = functools.partial(group.run_step, configs[layout][0].system, step)
                    if not step:  # warm-up
                        run()
                        continue
                    record, others = run_quietly(run, [group])
                    took = record["seconds"]
                    log(f"{where}: {layout}: {took:.2f} s; other programs used {others:.2f} cores")
                    seconds[layout].append(took)
                    busy.append(others)
            tunings += [
                {"place": where, "others": statistics.mean(busy), "node": asdict(node)}
                for node in nodes
            ]
            for layout, (case, config) in configs.items():
                predictions = [predict_step(case, config, node) for node in nodes]
                rows.append(PredictionRow(where, layout, seconds[layout], predictions))
                print(format_row(rows[-1]), flush=True)
        for group in {id(group): group for group in workers.values()}.values():
            group.shut_down()
    return rows, tunings


def run_quietly(work: Callable, workers: list[WorkerGroup]) -> tuple[object, float]:
    """PublishedRun ``work`` until other programs are quiet, at most `MAX_TRIES` times.

    Args:
        work: Function to measure.
        workers: Processes whose CPU time does not count as other load.

    Returns:
        The result of the try with the lowest other load, and that load in cores.
    """
    tries = []
    while True:
        background, before = bench_record.BackgroundLoad(), own_seconds(workers)
        result = work()
        tries.append((result, background.cores(own_seconds(workers) - before) or 0.0))
        if tries[-1][1] <= MAX_OTHER_LOAD or len(tries) == MAX_TRIES:
            return min(tries, key=lambda each: each[1])
        time.sleep(PAUSE)


def own_seconds(workers: list[WorkerGroup]) -> float:
    """Return the CPU seconds of this process, its finished children and ``workers``."""
    ticks = 0
    for rank in (rank for group in workers for rank in group.ranks):
        fields = Path(f"/proc/{rank.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])  # user and kernel mode
    return bench_record.own_cpu_seconds() + ticks / os.sysconf("SC_CLK_TCK")


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def format_row(row: PredictionRow) -> str:
    mark = "" if abs(row.error) <= TARGET_ERROR else "  above 15 %"
    spread = f"{min(row.seconds):.2f}-{max(row.seconds):.2f}"
    return (
        f"{row.place:15} {row.layout:28} {row.measured:8.2f} {spread:>13} {row.planned:9.2f} "
        f"{row.error:+7.1%}{mark}"
    )


HEAD = f"{'cluster':15} {'layout':28} {'measured':>8} {'min-max':>13} {'predicted':>9} {'error':>7}"


def summary(rows: list[PredictionRow]) -> str:
    errors = sorted(abs(row.error) for row in rows)
    within = sum(error <= TARGET_ERROR for error in errors)
    return (
        f"{len(rows)} layouts: median error {statistics.median(errors):.1%}, worst "
        f"{errors[-1]:.1%}, {within} within {TARGET_ERROR:.0%}"
    )


def predict_again(path: Path) -> list[PredictionRow]:
    """Predict the steps of a saved run from its machine measurements. Raises ConfigError."""
    saved = schema.read(path)
    if not saved.get("rows") or not saved.get("tunings"):
        raise ConfigError(f"{path} does not hold a run. Save one with --json FILE.")
    measured = {(row["place"], row["layout"]): row["seconds"] for row in saved["rows"]}
    tunings: dict[str, list[Node]] = {}
    for each in saved["tunings"]:
        node = schema.build(Node, each["node"], f"{path}: {each['place']}")
        tunings.setdefault(each["place"], []).append(node)
    return [
        PredictionRow(
            where, layout, seconds, [predict_step(case, config, n) for n in tunings[where]]
        )
        for setup in SETUPS
        for where in map(setup.label, setup.rates)
        for case in setup.cases
        for layout, config in [(case.label(setup), case.config(setup))]
        if (seconds := measured.get((where, layout)))
    ]


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    for name in ("steps", "rounds"):
        if getattr(options, name) < 1:
            print(f"error: --{name} {getattr(options, name)}: must be at least 1", file=sys.stderr)
            return 2
    if options.json and not options.json.parent.is_dir():
        print(f"error: {options.json}: there is no folder {options.json.parent}", file=sys.stderr)
        return 2
    if options.again:
        return _predict_again(options.again)
    return exit_status(lambda: _run(options))


def _predict_again(path: Path) -> int:
    try:
        rows = predict_again(path)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(HEAD, *map(format_row, rows), sep="\n")
    return _print_summary(rows)


def _run(options) -> int:
    rows, tunings, loads = [], [], [os.getloadavg()]
    with exclusive_run():
        print(HEAD)
        for setup in QUICK_SETUPS if options.quick else SETUPS:
            found = measure_setup(setup, options.steps, options.rounds)
            rows += found[0]
            tunings += found[1]
            loads.append(os.getloadavg())
            if options.json:  # after each cluster, because a run takes long
                save(options.json, rows, tunings, loads)
    print(f"load average of the minute before the run: {loads[0][0]:.2f}")
    return _print_summary(rows)


def _print_summary(rows: list[PredictionRow]) -> int:
    print(f"\n{summary(rows)}")
    return int(any(abs(row.error) > TARGET_ERROR for row in rows))


def save(path: Path, rows: list[PredictionRow], tunings: list[dict], loads: list) -> None:
    saved = {
        "command": " ".join(["python", "-m", MODULE, *sys.argv[1:]]),
        "day": time.strftime("%Y-%m-%d"),
        "load": loads,
        "rows": [{**asdict(row), "error": row.error} for row in rows],
        "tunings": tunings,
    }
    path.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(MODULE, __doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="one cluster, main layouts")
    add("--steps", type=int, default=4, metavar="K", help="timed steps of each layout (default: 4)")
    add(
        "--rounds",
        type=int,
        default=3,
        metavar="N",
        help="rounds of each machine measurement (default: 3)",
    )
    add(
        "--again",
        type=Path,
        metavar="FILE",
        help="predict the steps of a saved run; nothing is run",
    )
    add("--json", type=Path, metavar="FILE", help="save rows and machine measurements")
    return parser


if __name__ == "__main__":
    sys.exit(main())
