"""``nearlinear fsx``: one verb for each thing that is done with a file system."""

import argparse

EXAMPLES = """\
on AWS:
  nearlinear fsx create --subnet subnet-0123456789abcdef0 --security-group sg-0123456789abcdef0 \\
      --capacity 2400 --deployment PERSISTENT_2 --mb-per-tib 250
  nearlinear fsx link fs-0123456789abcdef0 s3://bucket/tokens /tokens
  nearlinear fsx describe fs-0123456789abcdef0     state, mount command, [job] input
  nearlinear fsx check run.toml                    can the job of this config reach its inputs?
  nearlinear fsx delete fs-0123456789abcdef0
where it is mounted:
  nearlinear fsx mount-check /fsx
  sudo nearlinear fsx hydrate /fsx/tokens --config run.toml
  nearlinear fsx throughput /fsx/tokens --config run.toml
"""
RAW = argparse.RawDescriptionHelpFormatter


def add_commands(commands) -> None:
    """Add ``fsx`` to the parsers of ``nearlinear``."""
    fsx = commands.add_parser(
        "fsx",
        help="FSx for Lustre: create, link to S3, check, hydrate, measure",
        description="File systems of FSx for Lustre, as inputs of jobs.",
        epilog=EXAMPLES,
        formatter_class=RAW,
    )
    verbs = fsx.add_subparsers(title="verbs", metavar="verb", required=True)
    for name, words, room, add in (
        ("create", "make a file system, and wait until it is there", "afar", _add_create),
        ("link", "let a folder of it show a folder of S3", "afar", _add_link),
        ("describe", "say how one stands, how to mount it, and a job's input", "afar", _add_id),
        ("list", "name all Lustre file systems of the account", "afar", _add_nothing),
        ("delete", "delete one, with what is not in S3", "afar", _add_delete),
        ("check", "say whether a job reaches its file systems", "afar", _add_config),
        ("mount-check", "say what a folder of this machine is on", "here", _add_folder),
        ("hydrate", "bring files from S3 before they are read", "here", _add_hydrate),
        ("throughput", "measure the file system and the loader", "here", _add_throughput),
    ):
        verb = verbs.add_parser(name, help=words, description=f"{words.capitalize()}.")
        add(verb)
        if room == "afar" and name != "check":
            verb.add_argument("--region", default="", help="of AWS; default: the environment's")
        verb.add_argument("--debug", action="store_true", default=argparse.SUPPRESS,
                          help="show tracebacks of errors")  # fmt: skip
        verb.set_defaults(run=_run, room=room, verb=name.replace("-", "_"))


def _add_create(verb) -> None:
    add = verb.add_argument
    add("--subnet", required=True, help="the one it is in")
    add("--security-group", action="append", default=[], dest="groups", metavar="ID",
        help="that lets TCP 988 and 1018-1023 through; may be repeated")  # fmt: skip
    add("--deployment", default="SCRATCH_2", help="SCRATCH_2 or PERSISTENT_2 (SCRATCH_2)")
    add("--capacity", type=int, default=1200, metavar="GIB", help="1200, 2400, 4800, ... (1200)")
    add("--mb-per-tib", type=int, default=0, metavar="MB", help="of PERSISTENT_2: 125 to 1000")
    add("--no-lz4", action="store_true", help="do not compress")
    add("--version", default="2.15", help="of Lustre (2.15)")
    add("--name", default="nearlinear", help="tag Name")
    _add_sending(verb)


def _add_link(verb) -> None:
    verb.add_argument("id", help="of the file system")
    verb.add_argument("s3", help="s3://bucket/prefix")
    verb.add_argument("directory", help="on the file system, as in /tokens")
    verb.add_argument("--export", action="store_true", help="also write what changes here to S3")
    _add_sending(verb)


def _add_sending(verb) -> None:
    verb.add_argument("--no-wait", action="store_true", help="do not wait until it is available")
    verb.add_argument("--dry-run", action="store_true", help="print the request; touch nothing")


def _add_id(verb) -> None:
    verb.add_argument("id", help="of the file system")


def _add_nothing(verb) -> None:
    """It takes no argument of its own."""


def _add_delete(verb) -> None:
    _add_id(verb)
    verb.add_argument("--yes", action="store_true", help="do not ask")
    verb.add_argument("--dry-run", action="store_true", help="print the request; touch nothing")


def _add_config(verb) -> None:
    verb.add_argument("config", help="a .toml or .json file with a table [job]")
    _add_settings(verb)


def _add_settings(verb) -> None:
    verb.add_argument("--set", action="append", default=[], metavar="a.b=value", dest="settings",
                      help="change one key of the config; may be repeated")  # fmt: skip


def _add_folder(verb) -> None:
    verb.add_argument("folder", help="on the mounted file system")


def _add_hydrate(verb) -> None:
    _add_folder(verb)
    verb.add_argument("--config", default="", help="of the training: its order comes first")
    verb.add_argument("--at-once", type=int, default=1000, metavar="N", help="files (1000)")
    verb.add_argument("--dry-run", action="store_true", help="only say how much is there")
    _add_settings(verb)


def _add_throughput(verb) -> None:
    _add_folder(verb)
    verb.add_argument("--config", default="", help="of the training whose loader is measured")
    verb.add_argument("--need", type=float, default=0.0, metavar="TOKENS/S",
                      help="of training on this machine; default: of its metrics")  # fmt: skip
    verb.add_argument("--seconds", type=float, default=5.0, help="of each measurement (5)")
    _add_settings(verb)


def _run(options, arguments) -> int:
    import importlib

    module = importlib.import_module(f".{options.room}", __package__)
    return getattr(module, options.verb)(options)
