"""The command line. Exit status 0; 1: wrong data or a rank that failed; 2: a wrong request."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

from ci.cluster import Cluster, RankFailed, in_order_of_end, status_of
from nearlinear_collectives.bench import backends, machine, plot, record
from nearlinear_collectives.bench.sizes import parse_sizes

from . import figure, table
from .plan import OPERATIONS, Plan, parse_rate

ROOT = Path(__file__).resolve().parents[3]
MODULE = "ci.benchmarks.network"
GRACE = 3  # seconds for the other ranks to say what they saw, once one has failed
EXAMPLES = f"""\
examples:
  python -m {MODULE}                       nearlinear beside gloo, 1 to 8 ranks per node
  python -m {MODULE} --ranks 2 --sizes 64K:1M:4 --blocks 3      a minute
  python -m {MODULE} --ops reduce_scatter --ranks 4 --json reduce_scatter.json

{table.LEGEND}

Needs root: with sudo, name the Python of your environment, as in sudo .venv/bin/python."""


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    options = _parser().parse_args(argv)
    return status_of(lambda: _measure(options, argv))


def _measure(options, argv: list[str]) -> int:
    plan = _plan(options)
    background, before = machine.Background(), machine.own_seconds()
    kept = record.header(MODULE, argv, "torch", "nearlinear-collectives")
    print(f"# {_machine_line(kept)}")
    kept["settings"] = {
        "nodes": options.nodes,
        "rate_bits_per_second": plan.rate,
        "blocks": plan.blocks,
        "block_ms": options.block_ms,
    }
    kept["results"] = results = run(plan, options.nodes, options.ranks, options.rate)
    kept["cores_used_by_others"] = background.cores(machine.own_seconds() - before)
    print(f"\n{table.LEGEND}\n\n{machine.background_line(kept['cores_used_by_others'])}")
    if options.json:
        record.write(options.json, kept)
    if options.plot:
        figure.save(kept, options.plot)
    wrong = sum(entry["wrong"] for entry in results)
    if wrong:
        print(f"error: {wrong} wrong elements", file=sys.stderr)
    return 1 if wrong else 0


def run(plan: Plan, nodes: int, ranks_per_node: list[int], rate: str) -> list[dict]:
    """Measure on an emulated cluster and print tables row by row; every record."""
    with Cluster(nodes, rate) as cluster:
        return [entry for count in ranks_per_node for entry in _job(plan, cluster, count)]


def _job(plan: Plan, cluster: Cluster, count: int) -> list[dict]:
    """One start of ``count`` ranks on every node: all operations and sizes."""
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # that no DNS names the nodes is no news
    ranks = cluster.start(
        [sys.executable, "-m", f"{MODULE}.rank", plan.to_json()],
        count,
        env={**quiet, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=lambda rank: subprocess.DEVNULL if rank else subprocess.PIPE,
        text=True,
    )
    found: list[dict] = []
    follower = threading.Thread(target=_follow, args=(ranks[0].stdout, cluster, plan, found))
    follower.start()
    failed = next((rank for rank in in_order_of_end(ranks) if rank.returncode), None)
    if failed:  # the others may wait for it much longer than for its words
        list(in_order_of_end([rank for rank in ranks if rank.returncode is None], GRACE))
        cluster.close()
    follower.join()
    if failed:
        raise RankFailed(f"{failed} ended with exit code {failed.returncode}")
    return found


def _follow(lines: IO[str], cluster: Cluster, plan: Plan, found: list[dict]) -> None:
    """Read rank 0's records as they come, and print their rows."""
    operation = None
    for line in lines:
        if not line.startswith("[{"):  # gloo greets on stdout
            continue
        records = json.loads(line)
        found += records
        if records[0]["operation"] != operation:
            operation, count = records[0]["operation"], records[0]["ranks_per_node"]
            labels = [record["contender"] for record in records]
            print(table.head(operation, cluster.nodes, count, plan.rate, labels))
        print(table.row(records), flush=True)


def _plan(options) -> Plan:
    if min(options.ranks) < 1:
        raise ValueError("--ranks: a node has at least one rank")
    sizes = parse_sizes(options.sizes)
    for size in sizes:
        for ranks in options.ranks:
            if size % (4 * ranks):
                raise ValueError(f"--sizes {size}: must be a multiple of 4 bytes x {ranks} ranks")
    for name, least in (("nodes", 2), ("blocks", 1), ("block_ms", 1), ("timeout", 1)):
        if getattr(options, name) < least:
            raise ValueError(f"--{name.replace('_', '-')}: must be at least {least}")
    for path in filter(None, (options.json, options.plot)):
        if not path.parent.is_dir():
            raise ValueError(f"{path}: there is no folder {path.parent}")
    if options.plot:
        plot.check(options.plot)
    plugins = ("nearlinear_collectives", *options.plugins)
    backends.import_plugins(plugins)
    backends.check_known(backends.parse(options.backends))
    return Plan(
        tuple(options.ops),
        tuple(sizes),
        tuple(options.backends),
        plugins,
        parse_rate(options.rate),
        options.blocks,
        options.block_ms / 1000,
        options.timeout,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}",
        description="Measure how much of their links collectives use between emulated nodes.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--nodes", type=int, default=4, metavar="N", help="(default: 4)")
    add("--ranks", type=int, nargs="+", default=[1, 2, 4, 8], metavar="M",
        help="per node (default: 1 2 4 8)")  # fmt: skip
    add("--rate", default="200mbit", help="of each NIC, each way (default: 200mbit)")
    add("--sizes", nargs="+", default=["16K:4M:4"], metavar="SIZE",
        help="bytes per node, such as 64K, or FIRST:LAST:FACTOR (default: 16K:4M:4)")  # fmt: skip
    add("--backends", nargs="+", default=["nearlinear", "gloo"], metavar="[LABEL=]NAME",
        help="(default: nearlinear gloo)")  # fmt: skip
    add("--import", nargs="+", default=[], dest="plugins", metavar="PACKAGE",
        help="packages that register backends when imported")  # fmt: skip
    add("--ops", nargs="+", choices=OPERATIONS, default=["all_gather"], metavar="OP",
        help=f"among {', '.join(OPERATIONS)} (default: all_gather)")  # fmt: skip
    add("--blocks", type=int, default=5, metavar="N", help="per size and backend (default: 5)")
    add("--block-ms", type=float, default=300, metavar="MS",
        help="length of a block, at least two calls (default: 300)")  # fmt: skip
    add("--timeout", type=float, default=300, metavar="S",
        help="seconds after which a collective has failed (default: 300)")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="all numbers, with the command and the machine")
    add("--plot", type=Path, metavar="FILE",
        help="link used over output size, .svg or .png; more operations beside it")  # fmt: skip
    return parser


def _machine_line(kept: dict) -> str:
    facts = kept["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in kept["versions"].items())
    return (
        f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB, {facts['system']}; "
        f"{versions}"
    )


if __name__ == "__main__":
    sys.exit(main())
