"""Command-line parsers of ``nearlinear fsx``: one verb per operation on a file system."""

from __future__ import annotations

import argparse
from typing import Any

EXAMPLES = """\
on AWS:
  nearlinear fsx create --subnet subnet-0123456789abcdef0 --security-group sg-0123456789abcdef0 \\
      --capacity 2400 --deployment PERSISTENT_2 --mb-per-tib 250
  nearlinear fsx link fs-0123456789abcdef0 s3://bucket/tokens /tokens
  nearlinear fsx describe fs-0123456789abcdef0     state, mount command, [job] input
  nearlinear fsx check run.toml                    can the job of this config reach its inputs?
  nearlinear fsx delete fs-0123456789abcdef0
on a machine that has mounted it:
  nearlinear fsx mount-check /fsx
  sudo nearlinear fsx hydrate /fsx/tokens --config run.toml
  nearlinear fsx throughput /fsx/tokens --config run.toml
"""
AWS, LOCAL = "commands_aws", "commands_local"


def add_commands(commands: Any) -> None:
    """Add ``fsx`` to the subparsers of ``nearlinear``."""
    fsx = commands.add_parser(
        "fsx",
        help="FSx for Lustre: create, link to S3, check, hydrate, measure",
        description="Manage file systems of FSx for Lustre, as inputs of jobs.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = fsx.add_subparsers(title="verbs", metavar="verb", required=True)
    for name, help_text, module, function, add_arguments in (
        ("create", "create a file system and wait until it is available", AWS, "create",
         _add_create),
        ("link", "link a folder of a file system to a folder of S3", AWS, "link", _add_link),
        ("describe", "print state, mount command and job input of a file system", AWS, "describe",
         _add_id),
        ("list", "list all Lustre file systems of the account", AWS, "list_all", None),
        ("delete", "delete a file system, with all data that is not in S3", AWS, "delete",
         _add_delete),
        ("check", "check that a job can reach its file systems", AWS, "check", _add_config),
        ("mount-check", "print mount, space and striping of a local folder", LOCAL, "mount_check",
         _add_folder),
        ("hydrate", "restore files from S3 before they are read", LOCAL, "hydrate", _add_hydrate),
        ("throughput", "measure the file system and the loader", LOCAL, "throughput",
         _add_throughput),
    ):  # fmt: skip
        verb = verbs.add_parser(
            name, help=help_text, description=f"{help_text[0].upper()}{help_text[1:]}."
        )
        if add_arguments:
            add_arguments(verb)
        if module == AWS and name != "check":
            verb.add_argument("--region", default="", help="AWS region; default: the environment's")
        verb.add_argument("--debug", action="store_true", default=argparse.SUPPRESS,
                          help="print tracebacks of errors")  # fmt: skip
        verb.set_defaults(run=_run, module=module, function=function)


def _add_create(verb: argparse.ArgumentParser) -> None:
    add = verb.add_argument
    add("--subnet", required=True, help="ID of its subnet")
    add("--security-group", action="append", default=[], dest="groups", metavar="ID",
        help="security group that allows TCP 988 and 1018-1023; repeatable")  # fmt: skip
    add("--deployment", default="SCRATCH_2", help="SCRATCH_2 or PERSISTENT_2 (SCRATCH_2)")
    add("--capacity", type=int, default=1200, metavar="GIB", help="1200, 2400, 4800, ... (1200)")
    add("--mb-per-tib", type=int, default=0, metavar="MB",
        help="throughput of PERSISTENT_2: 125, 250, 500 or 1000")  # fmt: skip
    add("--no-lz4", action="store_true", help="disable compression")
    add("--version", default="2.15", help="Lustre version (2.15)")
    add("--name", default="nearlinear", help="tag Name")
    _add_request_arguments(verb)


def _add_link(verb: argparse.ArgumentParser) -> None:
    _add_id(verb)
    verb.add_argument("s3", help="s3://bucket/prefix")
    verb.add_argument("directory", help="folder on the file system, as in /tokens")
    verb.add_argument("--export", action="store_true",
                      help="also write changes on the file system to S3")  # fmt: skip
    _add_request_arguments(verb)


def _add_request_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--no-wait", action="store_true", help="do not wait until it is available")
    _add_dry_run(verb)


def _add_dry_run(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--dry-run", action="store_true", help="print the request; change nothing")


def _add_id(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("id", help="ID of the file system")


def _add_delete(verb: argparse.ArgumentParser) -> None:
    _add_id(verb)
    verb.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    _add_dry_run(verb)


def _add_config(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("config", help="a .toml or .json file with a table [job]")
    _add_settings(verb)


def _add_settings(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--set", action="append", default=[], metavar="a.b=value", dest="settings",
                      help="change one key of the config; repeatable")  # fmt: skip


def _add_folder(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("folder", help="folder on the mounted file system")


def _add_hydrate(verb: argparse.ArgumentParser) -> None:
    _add_folder(verb)
    verb.add_argument("--config", default="", help="training config, which sets the read order")
    verb.add_argument("--at-once", type=int, default=1000, metavar="N",
                      help="number of files to restore at once (1000)")  # fmt: skip
    verb.add_argument("--dry-run", action="store_true", help="print the progress; restore nothing")
    _add_settings(verb)


def _add_throughput(verb: argparse.ArgumentParser) -> None:
    _add_folder(verb)
    verb.add_argument("--config", default="", help="training config, which sets the loader")
    verb.add_argument("--need", type=float, default=0.0, metavar="TOKENS/S",
                      help="demand of this machine; default: from the run's metrics")  # fmt: skip
    verb.add_argument("--seconds", type=float, default=5.0, help="time of each measurement (5)")
    _add_settings(verb)


def _run(options: argparse.Namespace, arguments: list[str]) -> int:
    import importlib

    module = importlib.import_module(f".{options.module}", __package__)
    return getattr(module, options.function)(options)
