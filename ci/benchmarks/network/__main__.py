"""Command line of the network benchmark.

The exit status is 0, 1 for wrong data or a failed rank, and 2 for an invalid request.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

from ci.benchmarks.collectives import backends
from ci.benchmarks.collectives import record as bench_record
from ci.benchmarks.collectives.options import parse_sizes
from ci.command_line import make_parser
from ci.emulation.cluster import Cluster, RankFailed, as_completed, exit_status

from . import report
from .config import OPERATIONS, NetworkConfig, parse_rate

ROOT = Path(__file__).resolve().parents[3]
MODULE = "ci.benchmarks.network"
GRACE = 3  # seconds for the other ranks to report errors after one has failed
EXAMPLES = f"""\
examples:
  python -m {MODULE}                       nearlinear and gloo, 1 to 8 ranks per node
  python -m {MODULE} --ranks 2 --sizes 64K:1M:4 --blocks 3      one minute
  python -m {MODULE} --ops reduce_scatter --ranks 4 --json reduce_scatter.json

{report.LEGEND}

Requires root: use sudo with the Python of your environment, as in sudo .venv/bin/python."""


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    options = _parser().parse_args(argv)
    return exit_status(lambda: _measure(options, argv))


def _measure(options, argv: list[str]) -> int:
    config = _config(options)
    background, before = bench_record.BackgroundLoad(), bench_record.own_cpu_seconds()
    record = bench_record.header(MODULE, argv, "torch", "nearlinear-collectives")
    print(bench_record.machine_line(record))
    record["settings"] = {
        "nodes": options.nodes,
        "rate_bits_per_second": config.rate,
        "blocks": config.blocks,
        "block_ms": options.block_ms,
    }
    record["results"] = results = run(config, options.nodes, options.ranks, options.rate)
    record["cores_used_by_others"] = background.cores(bench_record.own_cpu_seconds() - before)
    print(f"\n{report.LEGEND}\n\n{bench_record.background_line(record['cores_used_by_others'])}")
    if options.json:
        bench_record.write(options.json, record)
    if options.plot:
        report.save(record, options.plot)
    wrong = sum(entry["wrong"] for entry in results)
    if wrong:
        print(f"error: {wrong} wrong elements", file=sys.stderr)
    return 1 if wrong else 0


def run(config: NetworkConfig, nodes: int, ranks_per_node: list[int], rate: str) -> list[dict]:
    """Measure on an emulated cluster, print the tables row by row and return all records."""
    with Cluster(nodes, rate) as cluster:
        return [
            entry for count in ranks_per_node for entry in _measure_layout(config, cluster, count)
        ]


def _measure_layout(config: NetworkConfig, cluster: Cluster, count: int) -> list[dict]:
    """Measure all operations and sizes with ``count`` ranks on every node."""
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # hides the warning that DNS does not know the nodes
    ranks = cluster.start(
        [sys.executable, "-m", f"{MODULE}.rank", config.to_json()],
        count,
        env={**quiet, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=lambda rank: subprocess.DEVNULL if rank else subprocess.PIPE,
        text=True,
    )
    found: list[dict] = []
    reader = threading.Thread(target=_read_records, args=(ranks[0].stdout, cluster, config, found))
    reader.start()
    failed = next((rank for rank in as_completed(ranks) if rank.returncode), None)
    if failed:  # other ranks would wait for the failed one until their timeout
        list(as_completed([rank for rank in ranks if rank.returncode is None], GRACE))
        cluster.close()
    reader.join()
    if failed:
        raise RankFailed(f"{failed} ended with exit code {failed.returncode}")
    return found


def _read_records(
    lines: IO[str], cluster: Cluster, config: NetworkConfig, found: list[dict]
) -> None:
    """Read the records of rank 0 and print their rows."""
    operation = None
    for line in lines:
        if not line.startswith("[{"):  # gloo prints a message on stdout
            continue
        records = json.loads(line)
        found += records
        if records[0]["operation"] != operation:
            operation, count = records[0]["operation"], records[0]["ranks_per_node"]
            labels = [each["contender"] for each in records]
            print(report.table_head(operation, cluster.nodes, count, config.rate, labels))
        print(report.table_row(records), flush=True)


def _config(options) -> NetworkConfig:
    if min(options.ranks) < 1:
        raise ValueError("--ranks: must be at least 1")
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
        bench_record.check_plot_file(options.plot)
    plugins = ("nearlinear_collectives", *options.plugins)
    backends.import_plugins(plugins)
    backends.check_backends(backends.parse_backends(options.backends))
    return NetworkConfig(
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
    parser = make_parser(
        MODULE, "Measure the link utilization of collectives between emulated nodes.", EXAMPLES
    )
    add = parser.add_argument
    add("--nodes", type=int, default=4, metavar="N", help="(default: 4)")
    add("--ranks", type=int, nargs="+", default=[1, 2, 4, 8], metavar="M",
        help="per node (default: 1 2 4 8)")  # fmt: skip
    add("--rate", default="200mbit", help="of each NIC per direction (default: 200mbit)")
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
        help="timeout of a collective in seconds (default: 300)")  # fmt: skip
    add(
        "--json",
        type=Path,
        metavar="FILE",
        help="write all numbers with the command and the machine",
    )
    add("--plot", type=Path, metavar="FILE",
        help="write figures (.svg or .png), one per operation")  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
