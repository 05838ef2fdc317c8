"""The command ``plan``: what a config comes to on machines that nobody has rented yet."""

import argparse
from dataclasses import fields

EXAMPLES = """\
examples:
  nearlinear plan run.toml --cluster p4d.24xlarge:32             time, rates, memory, what binds
  nearlinear plan run.toml --cluster p5.48xlarge:16 --tokens 300e9    days and cost of 300 billion
  nearlinear plan run.toml --cluster p4d.24xlarge:32 --why       which knob, by the checklist
  nearlinear plan run.toml --cluster p4d.24xlarge:32 --search    the fastest layouts that fit
  nearlinear plan run.toml --cluster p4d.24xlarge:2 --scale      on to 16,384 GPUs, simulated
  nearlinear plan run.toml --cluster p4d.24xlarge:32 --dry-run   memory, by running a step for real
  nearlinear plan run.toml --cluster h100:4 --figure step.png --json step.json
  nearlinear plan --validate --figure validation.png             how far off it is, and where
"""


def add_commands(commands, load) -> argparse.ArgumentParser:
    """Add it to the parsers of ``nearlinear``; ``load`` makes the config of its options."""
    plan = commands.add_parser(
        "plan",
        help="say what a config needs, how fast it goes and what it costs, without a cluster",
        description="Predict a training step on machines that are not here: time by stream, "
        "tokens per second, MFU, memory, days and cost, and what limits it. Nothing is allocated. "
        "Nodes: p3dn, p4d, p4de, p5, p5e, p5en, p6-b200 by their EC2 names, and a100-40gb, "
        "a100-80gb, h100, h200, b200.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan.add_argument("--cluster", default="", metavar="NODE:N", help="machines, and how many")
    plan.add_argument("--tokens", type=float, default=0.0, metavar="N", help="tokens to train on")
    plan.add_argument(
        "--straggler",
        type=float,
        metavar="X",
        help="standard deviation of a rank's time over its mean; default: as fitted",
    )
    plan.add_argument("--price-per-hour", type=float, metavar="X", help="of one machine, USD")
    plan.add_argument(
        "--why", action="store_true", help="walk the checklist of best practices, with numbers"
    )
    plan.add_argument("--search", action="store_true", help="rank layouts of the same batch")
    plan.add_argument("--scale", action="store_true", help="speed up to 16,384 GPUs, simulated")
    plan.add_argument(
        "--dry-run",
        action="store_true",
        help="run a step of the real code without memory, and say what it needs (a minute)",
    )
    plan.add_argument("--validate", action="store_true", help="errors against published runs")
    plan.add_argument("--figure", default="", metavar="FILE", help="draw it (.png)")
    plan.add_argument("--json", default="", metavar="FILE", help="write all numbers (.json)")
    plan.set_defaults(run=lambda options, arguments: _plan(options, load))
    return plan


def _plan(options, load) -> int:
    from . import command

    asked = {each.name: getattr(options, each.name) for each in fields(command.Options)}
    return command.run(load(options), command.Options(**asked))
