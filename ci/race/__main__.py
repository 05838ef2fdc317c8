"""The command line. Exit status 0; 1: a rank failed or losses differ; 2: a wrong request."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from ci.cluster import status_of
from nearlinear_collectives.bench import machine, record

from . import figures, table
from .contestants import ENTRIES, LADDERS
from .course import race
from .peers import PeerMissing
from .plan import Plan

MODULE = "ci.race"
# All that train as they are meant to be used; the others are rungs of a ladder.
USUAL = (
    *("compute", "zero3", "zero3_default", "zero3_nl", "mics", "fsdp1", "fsdp2", "fsdp2_nl"),
    *("ours", "ours_nl_lean", "ours_nl"),
)
# What a race is about, in ten minutes on two cores.
QUICK = ("compute", "zero3", "mics", "fsdp2", "fsdp2_nl", "ours", "ours_nl")
QUICK_STEPS = 3
QUICK_FOLDER = Path("artifacts/race")
EXAMPLES = f"""\
examples:
  python -m {MODULE} --quick                              ten minutes; figures in {QUICK_FOLDER}
  python -m {MODULE}                                      4 nodes x 1 rank, 1 Gbit/s, the usual
  python -m {MODULE} --nodes 2 --ranks 2 --rate 1gbit --json race.json
  python -m {MODULE} --contestants fsdp2 ours ours_nl --steps 3
  python -m {MODULE} --ladder                             which part gains how much
  python -m {MODULE}.sweep --nodes 1 2 4 8                weak scaling

contestants (* the usual):
{chr(10).join(f"{' *'[n in USUAL]} {n:14} {entry.title}" for n, entry in ENTRIES.items())}

Needs root: with sudo, name the Python of your environment, as in sudo .venv/bin/python. DeepSpeed's
releases are installed by the first race that needs them, under artifacts/peers."""


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    options = _parser().parse_args(argv)
    return status_of(lambda: _race(options, argv), PeerMissing)


def _race(options, argv: list[str]) -> int:
    plan = _plan(options)
    background, before = machine.Background(), machine.own_seconds()
    kept = record.header(MODULE, argv, "torch", "nearlinear-collectives", "deepspeed")
    print(f"# {table.describe(plan)}")
    kept["plan"] = plan.__dict__
    kept["results"] = turns = race(plan, timelines=options.figures is not None)
    kept["cores_used_by_others"] = background.cores(machine.own_seconds() - before)
    print(f"\n{table.render(plan, turns)}")
    if parts := table.attribution(turns):
        print(f"\n{parts}")
    print(f"\n{machine.background_line(kept['cores_used_by_others'])}")
    if options.json:
        record.write(options.json, kept)
    if options.figures:
        figures.save(figures.step_times(turns), options.figures / "step_times.svg")
        figures.save(figures.timelines(turns), options.figures / "timelines.svg")
        print(f"figures: {options.figures}/step_times.svg, timelines.svg")
    return report_astray(turns)


def report_astray(turns: list[dict]) -> int:
    wrong = table.astray(turns)
    if wrong:
        print(f"error: losses that differ from the others': {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def _plan(options) -> Plan:
    names = options.contestants or (QUICK if options.quick else USUAL)
    if options.quick:
        options.steps = QUICK_STEPS if options.steps is None else options.steps
        options.figures = options.figures or QUICK_FOLDER
        options.json = options.json or options.figures / "quick.json"
    if options.ladder:
        orders = LADDERS if options.ladder == "both" else [options.ladder]
        names = ["compute", *(name for order in orders for name in LADDERS[order])]
    plan = plan_of(options, names).check()
    prepare_outputs(options)
    return plan


def prepare_outputs(options) -> None:
    """Before anybody races: is there a place for what is to be kept? Raises ValueError."""
    if options.figures:
        options.figures.mkdir(parents=True, exist_ok=True)
    if options.json and not options.json.parent.is_dir():
        raise ValueError(f"{options.json}: there is no folder {options.json.parent}")


def plan_of(options, names) -> Plan:
    """The plan that the command line names. Raises ValueError."""
    unknown = [name for name in names if name not in ENTRIES]
    if unknown:
        raise ValueError(f"no contestants {', '.join(unknown)}: there are {', '.join(ENTRIES)}")
    known = {field.name for field in fields(Plan)} - {"contestants"}
    chosen = {name: v for name, v in vars(options).items() if name in known and v is not None}
    return Plan(**chosen, contestants=tuple(dict.fromkeys(names)))


def add_common(parser: argparse.ArgumentParser, usual: str) -> None:
    """Options of every command that races; ``usual``: in words, who races if nobody is named."""
    add = parser.add_argument
    add("--contestants", nargs="+", metavar="NAME", help=f"(default: {usual})")
    add("--ranks", type=int, default=1, metavar="M", dest="ranks_per_node",
        help="per node (default: 1)")  # fmt: skip
    add("--shard", type=int, default=2, metavar="S", help="ranks that share a copy (default: 2)")
    add("--micro-batch", type=int, default=3, metavar="B", help="sequences (default: 3)")
    add("--accumulation", type=int, default=4, metavar="A", help="micro-batches (default: 4)")
    add("--steps", type=int, metavar="K", help=f"timed, of each (default: {Plan.steps})")
    add("--json", type=Path, metavar="FILE", help="keep every turn there")
    add("--figures", type=Path, metavar="FOLDER", help="draw what was seen there, as SVG")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}",
        description="Train the same model by several libraries in turn, on an emulated cluster.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_common(parser, "the usual, see below")
    add = parser.add_argument
    add("--nodes", type=int, default=4, metavar="N", help="(default: 4)")
    add("--rate", default="1gbit", help="of each NIC, each way (default: 1gbit)")
    add("--quick", action="store_true", help=f"only {', '.join(QUICK)}, {QUICK_STEPS} steps each")
    add("--ladder", nargs="?", choices=[*LADDERS, "both"], const="both", metavar="ORDER",
        help=f"add the parts one by one: {', '.join(map(repr, LADDERS))}, or both")  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
