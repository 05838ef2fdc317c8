"""Cost of elastic replicas without a failure and without a replica, and the copy to one that joins.

Every node of an emulated cluster is a replica. Runs with and without ``elastic.replicas`` alternate
on the same ranks, model and data; the losses of all must be equal within float32's rounding. Then
a replica is killed, and started again some steps later: the steps in between, and the copy to it.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from ci.command_line import make_parser
from ci.emulation.cluster import Cluster, exit_status
from ci.faults.__main__ import prepare_data
from ci.faults.elastic import LAYOUTS, Job, run_config
from ci.faults.kinds import train as train_plainly
from ci.faults.places import Place
from ci.faults.ranks import RankProcesses

MODULE = "ci.benchmarks.elastic"
EXAMPLES = f"""\
examples:
  python -m {MODULE} --layout 4x1 --backend nearlinear
  python -m {MODULE} --layout 2x2 --rounds 5 --rate 200mbit"""
TOLERANCE = 1e-3
"""Relative difference of losses: sums in another order, over the steps of a run."""


def config_of(options, data: str, folder: Path, number: int) -> dict[str, Any]:
    """Return the config of one run, in a folder of its own."""
    parallel = {"communication_backend": options.backend}
    base = run_config(data, folder / str(number), parallel, options.steps)
    (folder / str(number)).mkdir(exist_ok=True)
    return {
        **base,
        "model": {"preset": "gpt2-tiny", "overrides": {"n_layer": 8, "n_embd": 384, "n_head": 6}},
        "data": {"path": data, "sequence_length": 128},
        "train": {**base["train"], "eval_sequences": 0, "divergence_every": 0},
        "checkpoint": {"folder": ""},
        "run": {**base["run"], "folder": str(folder / str(number) / "undisturbed")},
    }  # fmt: skip


def start_plainly(
    config: dict[str, Any], layout: str, cluster: Cluster, folder: Path, fresh: bool = False
) -> RankProcesses:
    """Start all ranks of ``layout`` as one job without ``elastic``, with a log in ``folder``."""
    replicas, ranks = LAYOUTS[layout]
    holders = tuple(cluster.holder(rank // ranks) for rank in range(replicas * ranks))
    place = Place("nodes", nodes=holders, address=cluster.address(0))
    plain = {key: value for key, value in config.items() if key != "elastic"}
    plain["parallel"] = {**config["parallel"], "hybrid_shard_degree": ranks}
    return RankProcesses(replicas * ranks, plain, folder / "log", train_plainly, place, fresh)


def run_once(options, config: dict[str, Any], cluster: Cluster, elastic: bool) -> list[dict]:
    """Train; return the rows of the metrics."""
    folder = Path(config["run"]["folder"]).parent
    if elastic:
        job = Job(config, options.layout, cluster, folder / "log")
        running = list(job.running.values())
    else:
        running = [start_plainly(config, options.layout, cluster, folder)]
    for each in running:
        each.wait_for_all(1800)
        each.join()
    rows = [json.loads(line) for line in (folder / "undisturbed" / "metrics.jsonl").open()]
    if len(rows) < options.steps:
        raise SystemExit((folder / "log").read_text()[-3000:])
    return rows


def step_seconds(rows: list[dict]) -> list[float]:
    """Return the seconds of the steps after the first two."""
    return [b["time"] - a["time"] for a, b in zip(rows[2:], rows[3:], strict=False)]


def measure_loss(options, config: dict[str, Any], cluster: Cluster) -> str:
    """Kill a replica, and start it again some steps later; report these steps and the copy."""
    folder = Path(config["run"]["folder"]).parent
    config = {**config, "train": {**config["train"], "stop_after": 0}}
    job = Job(config, options.layout, cluster, folder / "log")
    job.wait_until(lambda row: row["step"] >= options.steps, 600)
    job.end(job.replicas - 1)
    job.wait_until(lambda row: row["replicas"] < job.replicas, 300)
    lost = job.last()["step"]
    job.wait_until(lambda row: row["step"] >= lost + options.steps, 600)
    job.start(job.replicas - 1)
    job.wait_until(lambda row: row["replicas"] == job.replicas, 300)
    rows = job.rows()
    for replica in list(job.running):
        job.end(replica)
    full = statistics.median(step_seconds([row for row in rows if row["step"] < lost]))
    without = statistics.median(
        step_seconds([row for row in rows if lost <= row["step"] < lost + options.steps])
    )
    found = re.findall(r"copied ([\d.]+) MiB per rank in ([\d.]+) s", (folder / "log").read_text())
    size, seconds = map(float, found[-1])
    ranks = LAYOUTS[options.layout][1]
    return (
        f"without a replica a step takes {without / full:.2f} times as long; copy to the node that "
        f"joins: {size * ranks:.0f} MiB in {seconds:.2f} s, "
        f"{size * ranks * 2**20 * 8 / seconds / 1e9:.2f} Gbit/s on a link of {options.rate}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(MODULE, __doc__, EXAMPLES)
    add = parser.add_argument
    add("--layout", default="4x1", choices=LAYOUTS, help="replicas x ranks (default: 4x1)")
    add("--backend", default="gloo", help="gloo (default) or nearlinear")
    add("--rate", default="1gbit", help="limit of each link (default: 1gbit)")
    add("--cores", type=float, help="processors of each node, such as 0.5 (default: shared)")
    add("--steps", type=int, default=12, help="steps of a run (default: 12)")
    add("--rounds", type=int, default=3, help="runs of each kind (default: 3)")
    options = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return exit_status(lambda: _measure(options))


def _measure(options) -> int:
    seconds: dict[bool, list[float]] = {False: [], True: []}
    losses = []
    with tempfile.TemporaryDirectory(prefix="elastic-") as name:
        folder = Path(name)
        data = prepare_data(folder / "tokens")
        with Cluster(LAYOUTS[options.layout][0], options.rate, options.cores) as cluster:
            for number in range(2 * options.rounds):
                elastic = bool(number % 2)
                config = config_of(options, data, folder, number)
                rows = run_once(options, config, cluster, elastic)
                losses.append([row["loss"] for row in rows])
                seconds[elastic] += step_seconds(rows)
                median = statistics.median(step_seconds(rows))
                print(f"{'elastic' if elastic else 'off':8} {median:.3f} s per step", flush=True)
            loss = measure_loss(options, config_of(options, data, folder, 99), cluster)
    different = max(abs(a - b) / a for row in losses for a, b in zip(losses[0], row, strict=True))
    off, on = statistics.median(seconds[False]), statistics.median(seconds[True])
    print(
        f"{options.layout}, {options.backend}, {options.rate}: {off:.3f} s per step, elastic "
        f"{on:.3f} s ({on / off - 1:+.1%}); losses differ by at most {different:.1e}\n{loss}"
    )
    return int(different > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
