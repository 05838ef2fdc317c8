"""Commands for those who watch: ``watch`` in the terminal, ``dashboard`` in a browser."""

import argparse

WATCH_EXAMPLES = """\
examples:
  nearlinear watch                                     the run in runs/latest, until Ctrl-C
  nearlinear watch runs/gpt2                           another run's folder, also before it begins
  nearlinear watch runs/gpt2 --once                    as it stands; needs no terminal
  nearlinear watch slurm-1234.out                      any log with the run's lines in it
  nearlinear logs gpt2-30b-20261122031500 --follow | nearlinear watch -
"""
DASHBOARD_EXAMPLES = """\
examples:
  nearlinear dashboard runs/gpt2                       one run
  nearlinear dashboard runs                            all runs, one above the other
  nearlinear dashboard runs/gpt2 --port 6007
"""


def add_commands(commands) -> None:
    """Add them to the parsers of ``nearlinear``."""
    watch = commands.add_parser(
        "watch",
        help="watch a run in the terminal: loss, speed, memory, slow ranks",
        description="Watch a run from beside it: its loss and held-out loss, how long it will "
        "take, its speed, the memory of every rank, ranks that hold up the others, and what looks "
        "wrong. It reads the run's files, or a log's lines, and does not disturb it.",
        epilog=WATCH_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    watch.add_argument(
        "where",
        nargs="?",
        default="",
        metavar="FOLDER",
        help="a run's folder, its metrics.jsonl, a log, or - for standard input; default: "
        "runs/latest",
    )
    watch.add_argument("--once", action="store_true", help="print it as it stands, and stop")
    watch.set_defaults(run=_watch)

    dashboard = commands.add_parser(
        "dashboard",
        help="look at runs in a browser, by TensorBoard",
        description="Serve the TensorBoard events of runs on this machine until Ctrl-C, and say "
        "where to open it; in SageMaker Studio, too.",
        epilog=DASHBOARD_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    dashboard.add_argument(
        "folder", nargs="?", default="", metavar="FOLDER", help="of runs; default: runs/latest"
    )
    dashboard.add_argument("--port", type=int, default=0, help="default: 6006, or the next free")
    dashboard.set_defaults(run=_dashboard)


def _watch(options, arguments) -> int:
    from . import command

    return command.run(options.where, options.once)


def _dashboard(options, arguments) -> int:
    from . import tensorboard

    return tensorboard.run(options.folder, options.port)
