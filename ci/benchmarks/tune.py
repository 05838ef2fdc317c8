"""Regret of ``nearlinear tune``: its choice against a sweep of real steps, in several situations.

In every situation ``nearlinear tune --validate N`` predicts all settings, runs real steps of the N
best predictions with different degree, backend or memory, and of the config as written. Its regret
is the step time of its choice among the first three predictions, relative to the fastest of the
sweep.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ci.benchmarks.collectives import record as bench_record
from ci.benchmarks.compare.report import markdown
from ci.command_line import make_parser
from ci.emulation.cluster import Cluster, RankFailed, as_completed, exit_status
from nearlinear.planner.calibrate.settings import TOP

MODULE = "ci.benchmarks.tune"
EXAMPLES = f"""\
examples:
  python -m {MODULE} --json tune.json             all situations, 12 settings each
  python -m {MODULE} --json tune.json --only 0 3  the first and the fourth; continues the file"""


@dataclass(frozen=True)
class Situation:
    """A cluster, a model and a batch."""

    nodes: int
    ranks_per_node: int
    rate: str
    """Limit of each NIC per direction, in tc's notation."""
    width: int
    layers: int
    accumulation: int
    memory: float = 0.0
    """GiB per rank; 0 means the free memory."""

    def __str__(self) -> str:
        room = f", {self.memory:g} GiB" if self.memory else ""
        return (
            f"{self.nodes} x {self.ranks_per_node} at {self.rate}, {self.layers} blocks of "
            f"{self.width}, {self.accumulation} micro-batches{room}"
        )

    def as_config(self, folder: Path) -> dict:
        return {
            "model": {
                "preset": "gpt2-small",
                "overrides": {
                    "n_embd": self.width,
                    "n_layer": self.layers,
                    "n_head": self.width // 64,
                    "vocab_size": 4096,
                },
            },
            "data": {"sequence_length": 128},
            "batch": {"micro_batch_size": 2, "accumulation": self.accumulation},
            "run": {"folder": str(folder / "run")},
        }


SITUATIONS = (
    Situation(4, 1, "1gbit", 256, 6, 4),
    Situation(4, 1, "300mbit", 256, 6, 4),
    Situation(2, 2, "1gbit", 256, 6, 1),
    Situation(2, 2, "200mbit", 384, 4, 8),
    Situation(1, 4, "1gbit", 256, 6, 2),
    Situation(3, 1, "500mbit", 384, 4, 4),
    Situation(2, 1, "1gbit", 512, 4, 1),
    Situation(4, 1, "1gbit", 384, 6, 4, memory=0.2),
)


def run_situation(situation: Situation, settings: int) -> dict:
    """Return the numbers of ``nearlinear tune --json`` in ``situation``.

    Raises RankFailed with the output of the failed rank.
    """
    with tempfile.TemporaryDirectory() as name, Cluster(situation.nodes, situation.rate) as cluster:
        folder = Path(name)
        config, numbers = folder / "run.json", folder / "numbers.json"
        config.write_text(json.dumps(situation.as_config(folder)))
        command = [sys.executable, "-m", "nearlinear.cli", "tune", str(config)]
        command += ["--validate", str(settings), "--json", str(numbers)]
        command += ["--memory", str(situation.memory)] if situation.memory else []
        with (folder / "log").open("wb") as log:
            ranks = cluster.start(
                command,
                situation.ranks_per_node,
                env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            failed = [rank for rank in as_completed(ranks, None) if rank.returncode]
        if failed:
            raise RankFailed(f"{failed[0]} failed: {(folder / 'log').read_text()[-2000:]}")
        return json.loads(numbers.read_text())


def regret(finalists: list[dict], first: int) -> float:
    """Return the relative loss of the fastest of the ``first`` predictions against all."""
    seconds = [each["measured"] for each in finalists]
    return min(seconds[:first]) / min(seconds) - 1


def render(runs: list[dict]) -> str:
    """Return a Markdown table with a row per situation."""
    rows = [
        ["situation", "settings", "slowest", f"best of {TOP} predictions", "first prediction"],
        [":--", "--:", "--:", "--:", "--:"],
    ]
    for run in runs:
        finalists = run["finalists"]
        seconds = [each["measured"] for each in finalists]
        rows.append(
            [
                str(Situation(**run["situation"])),
                str(len(finalists)),
                f"{max(seconds) / min(seconds):.2f}x",
                f"{regret(finalists, TOP):.1%}",
                f"{regret(finalists, 1):.1%}",
            ]
        )
    tops = [regret(run["finalists"], TOP) for run in runs]
    return (
        f"{markdown(rows)}\n\nRegret of the best of {TOP} predictions: median "
        f"{statistics.median(tops):.1%}, largest {max(tops):.1%}."
    )


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    options = _parser().parse_args(argv)
    return exit_status(lambda: _run(options, argv))


def _run(options: argparse.Namespace, argv: list[str]) -> int:
    record = bench_record.header(MODULE, argv, "torch", "nearlinear-collectives")
    record["runs"] = json.loads(options.json.read_text())["runs"] if options.json.exists() else []
    wanted = range(len(SITUATIONS)) if options.only is None else options.only
    for situation in (SITUATIONS[number] for number in wanted):
        fields = dict(vars(situation))
        if any(run["situation"] == fields for run in record["runs"]):
            continue
        print(f"# {situation}", flush=True)
        found = run_situation(situation, options.settings)
        record["runs"].append({"situation": fields, "finalists": found["finalists"]})
        bench_record.write(options.json, record)
        for each in found["finalists"]:
            print(
                f"{each['measured'] * 1e3:8.1f} ms, predicted {each['seconds'] * 1e3:8.1f}: "
                f"{each['settings']}",
                flush=True,
            )
    if record["runs"]:
        print(render(record["runs"]))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(MODULE, __doc__, EXAMPLES)
    add = parser.add_argument
    add("--only", type=int, nargs="*", metavar="N", help="numbers of situations (default: all)")
    add("--settings", type=int, default=12, metavar="N", help="of each sweep (default: 12)")
    add("--json", type=Path, required=True, metavar="FILE", help="read and write all records")
    return parser


if __name__ == "__main__":
    sys.exit(main())
