"""The command line. Exit status 0; 1: a rank failed or losses differ; 2: a wrong request."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from ci.cluster import Cluster, ClusterError, why_not
from nearlinear_collectives.bench import machine, record

from . import peers, table
from .contestants import ENTRIES
from .plan import Plan
from .teams import Team, TeamFailed, teams_of

MODULE = "ci.race"
EXAMPLES = f"""\
examples:
  python -m {MODULE}                                      4 nodes x 1 rank, 1 Gbit/s, everybody
  python -m {MODULE} --nodes 2 --ranks 2 --rate 1gbit --json race.json
  python -m {MODULE} --contestants fsdp2 ours ours_nl --steps 3

contestants:
{chr(10).join(f"  {name:14} {entry.title}" for name, entry in ENTRIES.items())}

Needs root: with sudo, name the Python of your environment, as in sudo .venv/bin/python."""


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    options = _parser().parse_args(argv)
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 2
    try:
        plan = _plan(options)
        background, before = machine.Background(), machine.own_seconds()
        kept = record.header(MODULE, argv, "torch", "nearlinear-collectives")
        print(f"# {table.describe(plan)}")
        kept["plan"] = plan.__dict__
        kept["results"] = race(plan)
        kept["cores_used_by_others"] = background.cores(machine.own_seconds() - before)
    except (ClusterError, peers.PeerMissing, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except TeamFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"\n{table.render(kept['results'])}")
    print(f"\n{machine.background_line(kept['cores_used_by_others'])}")
    if options.json:
        record.write(options.json, kept)
    wrong = table.astray(kept["results"])
    if wrong:
        print(f"error: losses that differ from the others': {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def race(plan: Plan) -> list[dict]:
    """All turns of all contestants, a step of each in turn; every turn's record, warm-up too."""
    turns = []
    with Cluster(plan.nodes, plan.rate) as cluster:
        teams = [Team(cluster, plan, names) for names in teams_of(plan.contestants)]
        for team in teams:
            team.await_ready()
        team_of = {name: team for team in teams for name in team.names}
        for step in range(plan.warm_up + plan.steps):
            for name in plan.contestants:
                turn = team_of[name].turn(name, step)
                turns.append({**turn, "timed": step >= plan.warm_up})
                print(table.line(turns[-1]), flush=True)
        for team in teams:
            team.end()
    return turns


def _plan(options) -> Plan:
    unknown = [name for name in options.contestants if name not in ENTRIES]
    if unknown:
        raise ValueError(f"no contestants {', '.join(unknown)}: there are {', '.join(ENTRIES)}")
    chosen = {f.name: getattr(options, f.name) for f in fields(Plan) if hasattr(options, f.name)}
    plan = Plan(**{**chosen, "contestants": tuple(dict.fromkeys(options.contestants))})
    if plan.world % plan.shard:
        raise ValueError(f"--shard {plan.shard} does not divide {plan.world} ranks")
    if options.json and not options.json.parent.is_dir():
        raise ValueError(f"{options.json}: there is no folder {options.json.parent}")
    return plan


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}",
        description="Train the same model by several libraries in turn, on an emulated cluster.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--contestants", nargs="+", default=list(ENTRIES), metavar="NAME", help="(default: all)")
    add("--nodes", type=int, default=4, metavar="N", help="(default: 4)")
    add("--ranks", type=int, default=1, metavar="M", dest="ranks_per_node",
        help="per node (default: 1)")  # fmt: skip
    add("--shard", type=int, default=2, metavar="S", help="ranks that share a copy (default: 2)")
    add("--rate", default="1gbit", help="of each NIC, each way (default: 1gbit)")
    add("--micro-batch", type=int, default=3, metavar="B", help="sequences (default: 3)")
    add("--accumulation", type=int, default=4, metavar="A", help="micro-batches (default: 4)")
    add("--steps", type=int, default=5, metavar="K", help="timed, of each (default: 5)")
    add("--json", type=Path, metavar="FILE", help="keep every turn there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
