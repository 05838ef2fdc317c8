"""Compare systems over numbers of nodes and link rates, and report their efficiency.

Emulated nodes share the cores of one machine, so that computation takes longer as nodes are added.
Efficiency is therefore the step time of the compute-only system on the same cluster divided by that
of the system. This equals the weak-scaling efficiency of nodes with cores of their own if the links
are slowed by as much as the computation is, see ``--scaled``.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict, replace

from ci.benchmarks.collectives import record as bench_record
from ci.command_line import make_parser
from ci.emulation.cluster import exit_status

from . import report
from .__main__ import add_common_options, build_config, prepare_outputs, report_deviations
from .config import CompareConfig
from .peers import PeerMissing
from .run import run_comparison

MODULE = "ci.benchmarks.compare.sweep"
DEFAULT_SYSTEMS = ("compute", "zero3", "fsdp2_nl", "ours_nl")
EXAMPLES = f"""\
examples:
  python -m {MODULE} --nodes 1 2 4 8 --rates 1500mbit --json scaling.json --figures figures
  python -m {MODULE} --nodes 1 2 4 8 --rates 1gbit --scaled --systems compute ddp_nl ours_nl_once
  python -m {MODULE} --rates 300mbit 1gbit 3gbit --systems compute fsdp2 ours"""


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    options = _parser().parse_args(argv)
    return exit_status(lambda: _sweep(options, argv), PeerMissing)


def _sweep(options, argv: list[str]) -> int:
    names = dict.fromkeys(["compute", *(options.systems or DEFAULT_SYSTEMS)])
    base = build_config(options, names)
    scale = shared_core_rate if options.scaled else lambda rate, ranks: rate
    configs = [
        on_cluster(base, nodes, scale(rate, nodes * base.ranks_per_node))
        for nodes in options.node_counts
        for rate in options.rates
    ]
    if options.figures and len(options.node_counts) > 1 and len(options.rates) > 1:
        raise ValueError(
            "--figures draws over nodes or over link rates. Give several values of only one of "
            "--nodes and --rates."
        )
    prepare_outputs(options)
    record = bench_record.header(MODULE, argv, "torch", "nearlinear-collectives", "deepspeed")
    record["runs"] = runs = []
    for config in configs:
        print(f"# {report.describe(config)}", flush=True)
        runs.append({"config": asdict(config), "results": run_comparison(config)})
        print(f"\n{report.render(config, runs[-1]['results'])}\n", flush=True)
    print(render(runs))
    if options.json:
        bench_record.write(options.json, record)
    if options.figures:
        over_nodes = len(options.node_counts) > 1
        path = options.figures / ("scaling.svg" if over_nodes else "rates.svg")
        label = "nodes" if over_nodes else "link rate, Gbit/s"
        report.save(report.plot_efficiency(points(runs, over_nodes), label), path)
        print(f"figure: {path}")
    return max(report_deviations(run["results"]) for run in runs)


def on_cluster(base: CompareConfig, nodes: int, rate: str) -> CompareConfig:
    """Return ``base`` on another cluster, with shard groups no larger than it."""
    gigabits(rate)  # reject an invalid rate before the first run
    shard = min(base.shard, nodes * base.ranks_per_node)
    return replace(base, nodes=nodes, rate=rate, shard=shard).validate()


def shared_core_rate(rate: str, ranks: int) -> str:
    """Return ``rate`` slowed as the computation of ``ranks`` that share this machine's cores is."""
    cores = os.cpu_count() or 1
    return f"{gigabits(rate) * 1e3 * min(1.0, cores / ranks):g}mbit"


def efficiencies(records: list[dict]) -> dict[str, float]:
    """Return the efficiency of every system except ``compute``, from median step times."""
    medians = report.step_medians(records)
    return {n: medians["compute"] / seconds for n, seconds in medians.items() if n != "compute"}


def points(runs: list[dict], over_nodes: bool) -> dict[str, list[tuple[float, float]]]:
    """Return (nodes or Gbit/s, efficiency) pairs of each system."""
    found: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        x = run["config"]["nodes"] if over_nodes else gigabits(run["config"]["rate"])
        for name, share in efficiencies(run["results"]).items():
            found.setdefault(name, []).append((x, share))
    return found


def gigabits(rate: str) -> float:
    """Return the Gbit/s of a rate in tc's notation: 200mbit, 1gbit, 1.5gbit."""
    for unit, size in (("gbit", 1.0), ("mbit", 1e-3), ("kbit", 1e-6)):
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * size
    raise ValueError(f"--rates {rate}: expected a rate such as 200mbit or 1gbit")


def render(runs: list[dict]) -> str:
    """Return a Markdown table of efficiencies, a row per comparison."""
    names = list(efficiencies(runs[0]["results"]))
    rows = [["nodes", "link", *names], ["--:", "--:", *["--:"] * len(names)]]
    for run in runs:
        shares = efficiencies(run["results"])
        config = run["config"]
        rows.append([str(config["nodes"]), config["rate"], *(f"{shares[n]:.0%}" for n in names)])
    return report.markdown(rows)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        MODULE, "Run comparisons on several clusters and print each system's efficiency.", EXAMPLES
    )
    add_common_options(parser, " ".join(DEFAULT_SYSTEMS))
    add = parser.add_argument
    add("--nodes", type=int, nargs="+", default=[4], metavar="N", dest="node_counts",
        help="(default: 4)")  # fmt: skip
    add("--rates", nargs="+", default=["1gbit"], metavar="RATE", help="(default: 1gbit)")
    add("--scaled", action="store_true", help="slow the links as sharing cores slows the ranks")
    return parser


if __name__ == "__main__":
    sys.exit(main())
