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
ADVISE_EXAMPLES = """\
examples:
  nearlinear advise run.toml --cluster p4d.24xlarge:32           walk the checklist, and decide
  nearlinear advise run.toml --cluster p4d.24xlarge:32 --write advised.toml
  nearlinear advise run.toml --cluster here.toml:4               as tune --machine measured it
  nearlinear train advised.toml
"""


def add_commands(commands, load) -> list[argparse.ArgumentParser]:
    """Add them to the parsers of ``nearlinear``; ``load`` makes the config of their options."""
    return [_add_plan(commands, load), _add_advise(commands, load)]


def _add_plan(commands, load) -> argparse.ArgumentParser:
    plan = commands.add_parser(
        "plan",
        help="say what a config needs, how fast it goes and what it costs, without a cluster",
        description="Predict a training step on machines that are not here: time by stream, "
        "tokens per second, MFU, memory, days and cost, and what limits it. Nothing is allocated. "
        "Nodes: p3dn, p4d, p4de, p5, p5e, p5en, p6-b200 by their EC2 names, and a100-40gb, "
        "a100-80gb, h100, h200, b200; or the file that nearlinear tune --machine has written.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_asked(plan)
    plan.add_argument(
        "--why", action="store_true", help="explain each choice by the checklist, with numbers"
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
    plan.set_defaults(run=lambda options, arguments: _plan(options, load))
    return plan


def _add_asked(command: argparse.ArgumentParser) -> None:
    """What goes into every plan."""
    add = command.add_argument
    add("--cluster", default="", metavar="NODE:N", help="machines, and how many; or FILE.toml:N")
    add("--tokens", type=float, default=0.0, metavar="N", help="tokens to train on")
    add("--straggler", type=float, metavar="X",
        help="standard deviation of a rank's time over its mean; default: as fitted")  # fmt: skip
    add("--price-per-hour", type=float, metavar="X", help="of one machine, USD")
    add("--json", default="", metavar="FILE", help="write all numbers (.json)")


def _add_advise(commands, load) -> argparse.ArgumentParser:
    advise = commands.add_parser(
        "advise",
        help="walk the checklist of best practices, and say what to set",
        description="Walk the ordered checklist of best practices on a config and a cluster: "
        "larger GPUs, sharding, activation checkpointing, micro-batch, tensor and pipeline ranks, "
        "offloading. For each the planner says what another value would change of the step's time "
        "and of memory; what helps, or is needed to fit, is taken before the next is asked. Ends "
        "with the config to train. Nothing is allocated.",
        epilog=ADVISE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_asked(advise)
    advise.add_argument("--write", default="", metavar="FILE", help="write that config (.toml)")
    advise.set_defaults(run=lambda options, arguments: _advise(options, load))
    return advise


def _advise(options, load) -> int:
    from . import command

    asked = {each.name: getattr(options, each.name) for each in fields(command.Asked)}
    return command.advise_on(
        load(options), command.Asked(**asked), options.write, options.config or ""
    )


def _plan(options, load) -> int:
    from . import command

    asked = {each.name: getattr(options, each.name) for each in fields(command.Options)}
    return command.run(load(options), command.Options(**asked))
