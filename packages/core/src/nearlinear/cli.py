"""The command line: ``nearlinear train``, ``tune``, ``plan``, ``env`` and those of other rooms.

Nothing heavy is imported before it is needed, so that ``--help`` answers at once. A mistake of the
user is one line on stderr and exit code 2; ``--debug`` adds the traceback.
"""

import argparse
import logging
import math
import os
import sys
from pathlib import Path

from . import __version__
from .checkpoint import cli as checkpoints
from .errors import NearlinearError
from .launch import cli as jobs
from .plan import cli as planning
from .watch import cli as watching

TRAIN_EXAMPLES = """\
examples:
  nearlinear train run.toml                            as the file says
  nearlinear train run.toml --nproc 4                  4 ranks on this machine
  nearlinear train run.toml --set optimizer.lr=1e-3 --set parallel.hybrid_shard_degree=2
  nearlinear train --set data.path=data/botocore       no file: all defaults
  nearlinear train run.toml --print-config             every key, its value and its meaning
  torchrun --nnodes 32 --nproc-per-node 8 -m nearlinear.cli train run.toml
"""
TUNE_EXAMPLES = """\
examples:
  nearlinear tune run.toml                             measure, and say what to set and why
  nearlinear tune run.toml --nproc 4 --write tuned.toml    and write the config with it
  nearlinear tune run.toml --memory 8 --json tuned.json    as if a rank had 8 GiB; all numbers
  torchrun --nnodes 32 --nproc-per-node 8 -m nearlinear.cli tune run.toml --write tuned.toml
  nearlinear train tuned.toml
  torchrun --nnodes 2 --nproc-per-node 8 -m nearlinear.cli tune --machine here.toml
  nearlinear plan run.toml --cluster here.toml:32      as many of these nodes
"""


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit code: 0 done, 1 a failure of a rank, 2 a mistake to correct."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = _parser().parse_args(arguments)
    rank = os.environ.get("RANK", "0")
    if options.launched_by:
        from .orphan import end_with_parent

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
        from .leaving import leave_error

        if not (leave_error(str(error)) and options.launched_by):
            who = f"[rank {rank}] " if "RANK" in os.environ else ""
            print(f"{who}{error.word}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except Exception as error:
        from .leaving import leave_error

        leave_error(f"{type(error).__name__}: {error}")
        raise
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nearlinear",
        description="Train models too big for one accelerator at near-linear scaling.",
    )
    parser.add_argument("--version", action="version", version=f"nearlinear {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="command", required=True)

    train = commands.add_parser(
        "train",
        help="train a model from a config file",
        description="Train a model. Starts its ranks itself, or joins those that torchrun (so "
        "SageMaker) or Slurm's srun started.",
        epilog=TRAIN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_argument("--print-config", action="store_true", help="print the config and stop")
    train.set_defaults(run=_train)

    tune = commands.add_parser(
        "tune",
        help="measure a job's links and pick its communication settings",
        description="Time the collectives that training a config would run, on the ranks and links "
        "where it would run, and pick hybrid_shard_degree, communication_backend, "
        "hierarchical_all_gather, prefetch_depth, sdp_max_live_parameters and "
        "sdp_reduce_bucket_size. Nothing is trained. Starts or joins ranks as train does.",
        epilog=TUNE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tune.add_argument("--rounds", type=int, default=5, metavar="N", help="timed rounds (5)")
    tune.add_argument(
        "--memory",
        type=float,
        default=0.0,
        metavar="GIB",
        help="GiB per rank; default: what is free",
    )
    tune.add_argument("--write", default="", metavar="FILE", help="write the tuned config (.toml)")
    tune.add_argument("--json", default="", metavar="FILE", help="write all numbers (.json)")
    tune.add_argument(
        "--machine",
        default="",
        metavar="FILE",
        help="measure the machine itself, for nearlinear plan --cluster FILE:NODES (.toml)",
    )
    tune.set_defaults(run=_tune)

    planned = planning.add_commands(commands, _load)
    jobs.add_commands(commands)
    watching.add_commands(commands)
    checkpoints.add_commands(commands, _described)

    env = commands.add_parser("env", help="print what a bug report needs")
    env.set_defaults(run=_env)
    for command in (train, tune, *planned):
        _add_config(command)
    for command in (train, tune):
        command.add_argument(
            "--nproc", type=int, metavar="N", help="ranks to start here (run.nproc)"
        )
    for command in commands.choices.values():
        command.add_argument("--debug", action="store_true", help="show tracebacks of errors")
        command.add_argument("--launched-by", type=int, default=0, help=argparse.SUPPRESS)
    return parser


def _add_config(command: argparse.ArgumentParser) -> None:
    """What commands that read a run's config have in common."""
    command.add_argument("config", nargs="?", help="a .toml or .json file; default: all defaults")
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="a.b=value",
        dest="settings",
        help="change one key of the config; may be repeated",
    )


def _described(path: Path, rows):
    """See `checkpoint.cli.add_commands`."""
    from .train import config as train_config
    from .train.model import describe

    return describe(train_config.load(path), rows)


def _env(options, arguments) -> int:
    from . import environment

    print(environment.text())
    return 0


def _train(options, arguments) -> int:
    config = _load(options)
    if options.print_config:
        from . import schema

        print(schema.to_toml(config), end="")
        return 0

    from .train import preflight

    def check(world: int, node: int) -> None:
        preflight.check(config, world, node)

    return _on_ranks(options, arguments, config, check, lambda: _fit(config))


def _tune(options, arguments) -> int:
    from .tune import command

    config = _load(options)
    asked = command.Options(
        options.rounds, options.memory, options.write, options.json, options.machine,
        options.config or "",
    )  # fmt: skip

    def check(world: int, node: int) -> None:
        command.check(config, asked, world, node)

    return _on_ranks(options, arguments, config, check, lambda: command.run(config, asked))


def _load(options):
    """The config a command was given: its file, then its settings."""
    from .train import config as train_config

    settings = list(options.settings)
    if getattr(options, "nproc", None) is not None:
        settings.append(f"run.nproc={options.nproc}")
    return train_config.load(options.config, settings)


def _on_ranks(options, arguments, config, check, work) -> int:
    """Check, then ``work`` as the rank this process is, or start ranks that do."""
    from .config import whole_number
    from .launch import local

    if local.joined():
        if not options.launched_by:
            check(whole_number("WORLD_SIZE"), whole_number("LOCAL_WORLD_SIZE"))
        return work()
    ranks = config.run.nproc or _default_ranks()
    check(ranks, ranks)
    if ranks == 1:
        return work()
    return local.start("nearlinear.cli", arguments, ranks)


def _default_ranks() -> int:
    """One rank per GPU of this machine, or one."""
    import torch

    return max(1, torch.cuda.device_count())


def _fit(config) -> int:
    """Be one rank of the job, from beginning to end, on data that preflight has checked."""
    from . import runtime
    from .train.trainer import Trainer

    result = Trainer(config, verified=True).fit()
    rank = runtime.current().rank
    runtime.shutdown()
    if rank == 0:
        _leave(config, result)
    return 0


def _leave(config, result) -> None:
    """Say what the run came to and where it is."""
    folder = Path(config.run.folder)
    held_out = "" if math.isnan(result.eval_loss) else f", held-out {result.eval_loss:.4f}"
    print(f"done: {result.steps} steps, loss {result.loss:.4f}{held_out} (guessing: "
          f"{result.guessing:.4f})")  # fmt: skip
    print(f"metrics: {folder / 'metrics.jsonl'}")
    try:
        from . import plots

        print(f"loss curve: {plots.save_loss_curve(folder)}")
        if config.run.memory_report:
            print(f"memory: {plots.save_memory(folder)}")
    except ImportError:
        print('loss curve: not drawn; pip install "nearlinear[notebooks]" to have it')


if __name__ == "__main__":
    sys.exit(main())
