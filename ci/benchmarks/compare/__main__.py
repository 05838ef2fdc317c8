"""Command line of the comparison.

The exit status is 0, 1 if a rank failed or losses deviate, and 2 for an invalid request.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path

from ci.benchmarks.collectives import record as bench_record
from ci.command_line import make_parser
from ci.emulation.cluster import exit_status

from . import report
from .config import CompareConfig
from .peers import PeerMissing
from .run import run_comparison
from .systems import LADDERS, SYSTEMS

MODULE = "ci.benchmarks.compare"
# Complete systems. The others are rungs of a ladder.
DEFAULT_SYSTEMS = (
    *("compute", "zero3", "zero3_default", "zero3_nl", "mics", "fsdp1", "fsdp2", "fsdp2_nl"),
    *("ours", "ours_nl_lean", "ours_nl"),
)
# Every system with its settings of most retention, least memory, or both: step time and memory.
PARETO_SYSTEMS = (
    *("compute", "ddp", "ddp_nl", "zero1", "zero2", "zero3", "zero3_default"),
    *("fsdp2", "fsdp2_nl", "fsdp2_once", "fsdp2_once_nl", "hybrid_once", "hybrid_once_nl"),
    *("ours", "ours_once", "ours_nl", "ours_nl_once"),
    *("ours_nl_lean", "ours_nl_full", "ours_nl_whole"),
)
# The essential systems, in ten minutes on two cores.
QUICK_SYSTEMS = ("compute", "zero3", "mics", "fsdp2", "fsdp2_nl", "ours", "ours_nl")
QUICK_STEPS = 3
QUICK_FOLDER = Path("artifacts/race")
EXAMPLES = f"""\
examples:
  python -m {MODULE} --quick                ten minutes; figures in {QUICK_FOLDER}
  python -m {MODULE}                        4 nodes x 1 rank, 1 Gbit/s, default systems
  python -m {MODULE} --nodes 2 --ranks 2 --rate 1gbit --json compare.json
  python -m {MODULE} --systems fsdp2 ours ours_nl --steps 3
  python -m {MODULE} --ladder               the gain of each part
  python -m {MODULE} --pareto               step time beside peak memory
  python -m {MODULE}.sweep --nodes 1 2 4 8  weak scaling

systems (* default):
{chr(10).join(f"{' *'[n in DEFAULT_SYSTEMS]} {n:14} {s.title}" for n, s in SYSTEMS.items())}

Requires root: use sudo with the Python of your environment, as in sudo .venv/bin/python.
DeepSpeed's releases are installed under artifacts/peers on first use."""


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    options = build_parser().parse_args(argv)
    return exit_status(lambda: _compare(options, argv), PeerMissing)


def _compare(options, argv: list[str]) -> int:
    config = config_from_options(options)
    background, before = bench_record.BackgroundLoad(), bench_record.own_cpu_seconds()
    record = bench_record.header(MODULE, argv, "torch", "nearlinear-collectives", "deepspeed")
    print(f"# {report.describe(config)}")
    record["config"] = asdict(config)
    record["results"] = run_comparison(config, timelines=options.figures is not None)
    record["cores_used_by_others"] = background.cores(bench_record.own_cpu_seconds() - before)
    print(f"\n{report.render(config, record['results'])}")
    if parts := report.attribution(record["results"]):
        print(f"\n{parts}")
    print(f"\n{bench_record.background_line(record['cores_used_by_others'])}")
    if options.json:
        bench_record.write(options.json, record)
    if options.figures:
        step_times = report.plot_step_times(record["results"])
        report.save(step_times, options.figures / "step_times.svg")
        timelines = report.plot_timelines(record["results"])
        report.save(timelines, options.figures / "timelines.svg")
        print(f"figures: {options.figures}/step_times.svg, timelines.svg")
    return report_deviations(record["results"])


def report_deviations(records: list[dict]) -> int:
    """Print systems whose loss deviates on stderr and return the exit status."""
    wrong = report.deviating_systems(records)
    if wrong:
        print(f"error: losses differ from the other systems: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def config_from_options(options) -> CompareConfig:
    """Return the configuration of a command line. Raises ValueError if it is invalid."""
    names = options.systems or (
        PARETO_SYSTEMS if options.pareto else QUICK_SYSTEMS if options.quick else DEFAULT_SYSTEMS
    )
    if options.quick:
        options.steps = QUICK_STEPS if options.steps is None else options.steps
        options.figures = options.figures or QUICK_FOLDER
        options.json = options.json or options.figures / "quick.json"
    if options.ladder:
        orders = LADDERS if options.ladder == "both" else [options.ladder]
        names = ["compute", *(name for order in orders for name in LADDERS[order])]
    config = replace(build_config(options, names), memory=options.pareto).validate()
    prepare_outputs(options)
    return config


def prepare_outputs(options) -> None:
    """Create the figure folder and check the JSON path. Raises ValueError if it is invalid."""
    if options.figures:
        options.figures.mkdir(parents=True, exist_ok=True)
    if options.json and not options.json.parent.is_dir():
        raise ValueError(f"{options.json}: there is no folder {options.json.parent}")


def build_config(options, names) -> CompareConfig:
    """Return the configuration for ``names``. Raises ValueError for an unknown system."""
    unknown = [name for name in names if name not in SYSTEMS]
    if unknown:
        raise ValueError(
            f"--systems: unknown {', '.join(unknown)}. Choose from {', '.join(SYSTEMS)}."
        )
    known = {field.name for field in fields(CompareConfig)} - {"systems"}
    chosen = {name: v for name, v in vars(options).items() if name in known and v is not None}
    return CompareConfig(**chosen, systems=tuple(dict.fromkeys(names)))


def add_common_options(parser: argparse.ArgumentParser, default: str) -> None:
    """Add the options of every command; ``default`` describes the default systems."""
    add = parser.add_argument
    add("--systems", "--contestants", nargs="+", metavar="NAME", help=f"(default: {default})")
    add("--ranks", type=int, default=1, metavar="M", dest="ranks_per_node",
        help="per node (default: 1)")  # fmt: skip
    add("--shard", type=int, default=2, metavar="S", help="ranks that share a copy (default: 2)")
    add("--micro-batch", type=int, default=3, metavar="B", help="sequences (default: 3)")
    add("--accumulation", type=int, default=4, metavar="A", help="micro-batches (default: 4)")
    add("--steps", type=int, metavar="K",
        help=f"timed steps of each system (default: {CompareConfig.steps})")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write the record of every step")
    add("--figures", type=Path, metavar="FOLDER", help="write figures as SVG")


def build_parser() -> argparse.ArgumentParser:
    parser = make_parser(
        MODULE, "Train one model with several libraries in turn, on an emulated cluster.", EXAMPLES
    )
    add_common_options(parser, "marked below")
    add = parser.add_argument
    add("--nodes", type=int, default=4, metavar="N", help="(default: 4)")
    add("--rate", default="1gbit", help="of each NIC per direction (default: 1gbit)")
    add("--quick", action="store_true",
        help=f"only {', '.join(QUICK_SYSTEMS)}, {QUICK_STEPS} steps each")  # fmt: skip
    add("--pareto", action="store_true",
        help="every library at several settings: step time beside peak memory")  # fmt: skip
    add("--ladder", nargs="?", choices=[*LADDERS, "both"], const="both", metavar="ORDER",
        help=f"add the parts one by one: {', '.join(map(repr, LADDERS))}, or both")  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
