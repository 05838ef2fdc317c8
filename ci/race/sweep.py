"""Races over numbers of nodes and link rates: how much of a step is computation, and where it ends.

Emulated nodes share this machine's cores, so a race of more nodes computes for longer. Efficiency
is therefore what computation alone takes, in the same race, over what the contestant takes: that
is weak-scaling efficiency on nodes that have cores of their own.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from ci.cluster import status_of
from nearlinear_collectives.bench import record

from . import figures, table
from .__main__ import add_common, plan_of, prepare_outputs, report_astray
from .course import race
from .peers import PeerMissing
from .plan import Plan

MODULE = "ci.race.sweep"
USUAL = ("compute", "zero3", "fsdp2_nl", "ours_nl")
EXAMPLES = f"""\
examples:
  python -m {MODULE} --nodes 1 2 4 8 --rates 1500mbit --json scaling.json --figures figures
  python -m {MODULE} --rates 300mbit 1gbit 3gbit --contestants compute fsdp2 ours"""


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    options = _parser().parse_args(argv)
    return status_of(lambda: _sweep(options, argv), PeerMissing)


def _sweep(options, argv: list[str]) -> int:
    base = plan_of(options, dict.fromkeys(["compute", *(options.contestants or USUAL)]))
    plans = [on_cluster(base, n, rate) for n in options.node_counts for rate in options.rates]
    if options.figures and len(options.node_counts) > 1 and len(options.rates) > 1:
        raise ValueError("--figures draws over nodes or over link rates: name several of one only")
    prepare_outputs(options)
    kept = record.header(MODULE, argv, "torch", "nearlinear-collectives", "deepspeed")
    kept["races"] = races = []
    for plan in plans:
        print(f"# {table.describe(plan)}", flush=True)
        races.append({"plan": plan.__dict__, "results": race(plan)})
        print(f"\n{table.render(plan, races[-1]['results'])}\n", flush=True)
    print(render(races))
    if options.json:
        record.write(options.json, kept)
    if options.figures:
        over_nodes = len(options.node_counts) > 1
        path = options.figures / ("scaling.svg" if over_nodes else "rates.svg")
        label = "nodes" if over_nodes else "link rate, Gbit/s"
        figures.save(figures.efficiencies(points(races, over_nodes), label), path)
        print(f"figure: {path}")
    return max(report_astray(one["results"]) for one in races)


def on_cluster(base: Plan, nodes: int, rate: str) -> Plan:
    """``base`` there; shard groups are no larger than the cluster. Raises ValueError."""
    gigabits(rate)  # refused now, not when it is drawn
    shard = min(base.shard, nodes * base.ranks_per_node)
    return replace(base, nodes=nodes, rate=rate, shard=shard).check()


def efficiencies(turns: list[dict]) -> dict[str, float]:
    """Computation alone over the whole step, medians, of every contestant but the former."""
    medians = table.step_medians(turns)
    return {n: medians["compute"] / seconds for n, seconds in medians.items() if n != "compute"}


def points(races: list[dict], over_nodes: bool) -> dict[str, list[tuple[float, float]]]:
    """For each contestant, (nodes or Gbit/s, efficiency)."""
    found: dict[str, list[tuple[float, float]]] = {}
    for one in races:
        place = one["plan"]["nodes"] if over_nodes else gigabits(one["plan"]["rate"])
        for name, share in efficiencies(one["results"]).items():
            found.setdefault(name, []).append((place, share))
    return found


def gigabits(rate: str) -> float:
    """Of a rate as ``tc`` writes it: 200mbit, 1gbit, 1.5gbit."""
    for unit, size in (("gbit", 1.0), ("mbit", 1e-3), ("kbit", 1e-6)):
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * size
    raise ValueError(f"--rates {rate}: write it as 200mbit or 1gbit")


def render(races: list[dict]) -> str:
    """Markdown: efficiency, a row per race."""
    names = list(efficiencies(races[0]["results"]))
    rows = [["nodes", "link", *names], ["--:", "--:", *["--:"] * len(names)]]
    for one in races:
        shares = efficiencies(one["results"])
        plan = one["plan"]
        rows.append([str(plan["nodes"]), plan["rate"], *(f"{shares[n]:.0%}" for n in names)])
    return table.markdown(rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}",
        description="Race on several clusters, and print each contestant's efficiency.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_common(parser, " ".join(USUAL))
    add = parser.add_argument
    add("--nodes", type=int, nargs="+", default=[4], metavar="N", dest="node_counts",
        help="(default: 4)")  # fmt: skip
    add("--rates", nargs="+", default=["1gbit"], metavar="RATE", help="(default: 1gbit)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
