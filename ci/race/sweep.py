"""Races over numbers of nodes and link rates: how much of a step is computation, and where it ends.

Emulated nodes share this machine's cores, so a race of more nodes computes for longer. Efficiency
is therefore what computation alone takes, in the same race, over what the contestant takes: that
is weak-scaling efficiency on nodes that have cores of their own.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace

from ci.cluster import ClusterError, why_not
from nearlinear_collectives.bench import record

from . import figures, peers, table
from .__main__ import add_common, plan_of, report_astray
from .course import race
from .teams import TeamFailed

MODULE = "ci.race.sweep"
USUAL = ("compute", "zero3", "fsdp2_nl", "ours_nl")
EXAMPLES = f"""\
examples:
  python -m {MODULE} --nodes 1 2 4 8 --rates 1500mbit --json scaling.json --figures figures
  python -m {MODULE} --rates 300mbit 1gbit 3gbit --contestants compute fsdp2 ours"""


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    options = _parser().parse_args(argv)
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 2
    kept = record.header(MODULE, argv, "torch", "nearlinear-collectives", "deepspeed")
    kept["races"] = races = []
    try:
        base = plan_of(options, dict.fromkeys(["compute", *(options.contestants or USUAL)]))
        for nodes in options.nodes:
            for rate in options.rates:
                world = nodes * base.ranks_per_node
                shard = min(base.shard, world)
                if world % shard:
                    raise ValueError(f"--shard {shard} does not divide {world} ranks")
                plan = replace(base, nodes=nodes, rate=rate, shard=shard)
                print(f"# {table.describe(plan)}", flush=True)
                races.append({"plan": plan.__dict__, "results": race(plan)})
                print(f"\n{table.render(plan, races[-1]['results'])}\n", flush=True)
    except (ClusterError, peers.PeerMissing, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except TeamFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(render(races))
    if options.json:
        record.write(options.json, kept)
    if options.figures:
        options.figures.mkdir(parents=True, exist_ok=True)
        over = "nodes" if len(options.nodes) > 1 else "link rate, Gbit/s"
        path = options.figures / ("scaling.svg" if over == "nodes" else "rates.svg")
        figures.save(figures.efficiencies(points(races, over == "nodes"), over), path)
        print(f"figure: {path}")
    return max(report_astray(one["results"]) for one in races)


def efficiencies(turns: list[dict]) -> dict[str, float]:
    """Computation alone over the whole step, medians, of every contestant but the former."""
    medians = {name: statistics.median(of) for name, of in figures.seconds_of(turns).items()}
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
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}",
        description="Race on several clusters, and print each contestant's efficiency.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_common(parser)
    add = parser.add_argument
    add("--nodes", type=int, nargs="+", default=[4], metavar="N", help="(default: 4)")
    add("--rates", nargs="+", default=["1gbit"], metavar="RATE", help="(default: 1gbit)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
