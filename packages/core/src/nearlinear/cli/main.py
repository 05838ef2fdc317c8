"""Parse the command line and run one command.

Heavy modules are imported when a command runs, so that ``--help`` answers at once. A user error is
one line on stderr and exit code 2; ``--debug`` adds the traceback.
"""

import argparse
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import __version__
from ..checkpoint import cli as checkpoint_cli
from ..config.schema import did_you_mean
from ..errors import NearlinearError, RankFailure
from ..launch import cli as launch_cli
from ..planner import cli as plan_cli
from . import check, generate, new, train
from .watch import command as watch


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code.

    0: success. 1: a rank failed, a plan does not fit, or a launch was declined. 2: user error.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ["data"]:
        from data_prep.__main__ import main as prepare_data  # with a parser of its own

        return prepare_data(arguments[1:])
    options = build_parser().parse_args(arguments)
    rank = os.environ.get("RANK", "0")
    if options.launched_by:
        from ..distributed.process_exit import end_with_parent

        end_with_parent(options.launched_by)  # before the slow imports
    logging.basicConfig(
        level=logging.INFO if rank == "0" else logging.ERROR,
        format="%(message)s",
        stream=sys.stderr,
    )
    for name in ("torch", "botocore", "boto3"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        return options.run(options, arguments)
    except NearlinearError as error:
        if options.debug:
            raise
        from ..distributed.process_exit import leave_error

        by_peer = isinstance(error, RankFailure)
        if not (leave_error(str(error), by_peer=by_peer) and options.launched_by):
            prefix = f"[rank {rank}] " if "RANK" in os.environ else ""
            print(f"{prefix}{error.word}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except Exception as error:
        from ..distributed.process_exit import leave_error

        leave_error(f"{type(error).__name__}: {error}")
        raise
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


class _Parser(argparse.ArgumentParser):
    """Argument parser that suggests the nearest value for a misspelled command or choice."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            hint = did_you_mean(str(value), known) or f"choose from {', '.join(known)}"
            raise argparse.ArgumentError(action, f"unknown value {value!r}: {hint}")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of ``nearlinear`` with the subcommands of every package."""
    parser = _Parser(
        prog="nearlinear",
        description="Train models too big for one accelerator at near-linear scaling.",
    )
    parser.add_argument("--version", action="version", version=f"nearlinear {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="command", required=True)
    new.add_new(commands)
    commands.add_parser("data", help="turn text into token shards; verify, inspect, export them")
    train.add_train(commands)
    train.add_tune(commands)
    check.add_check(commands)
    for command in plan_cli.add_commands(commands, train.load_config):
        train.add_config_arguments(command)
    launch_cli.add_commands(commands)
    watch.add_commands(commands)
    generate.add_commands(commands)
    checkpoint_cli.add_commands(commands, _describe_model)
    environment = commands.add_parser("env", help="print versions and devices for a bug report")
    environment.set_defaults(run=_print_environment)
    for command in commands.choices.values():
        command.add_argument("--debug", action="store_true", help="show tracebacks of errors")
        command.add_argument("--launched-by", type=int, default=0, help=argparse.SUPPRESS)
    return parser


def _describe_model(path: Path, rows: Callable[[str], int]) -> tuple[dict[str, Any], Path | None]:
    """Return the config.json and tokenizer folder of the model that the config at ``path`` trains.

    Passed to `checkpoint.cli.add_commands`, which is below the training package.
    """
    from ..config import train as train_config
    from ..train.model import describe

    return describe(train_config.load(path), rows)


def _print_environment(options: argparse.Namespace, arguments: list[str]) -> int:
    from .. import environment

    print(environment.format_report())
    return 0
