"""``nearlinear train`` and ``tune``: check the config, start or join the ranks, and run on them."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..config.train import TrainConfig
    from ..train.trainer import TrainResult

TRAIN_EXAMPLES = """\
examples:
  nearlinear train run.toml                            train as the file says
  nearlinear train run.toml --nproc 4                  4 ranks on this machine
  nearlinear train run.toml --set optimizer.lr=1e-3 --set parallel.hybrid_shard_degree=2
  nearlinear train --set data.path=data/botocore       no config file: all defaults
  nearlinear train run.toml --nproc 4 --set elastic.replicas=2    2 replicas that may be lost
  nearlinear train run.toml --print-config             every key, its value and its meaning
  torchrun --nnodes 32 --nproc-per-node 8 -m nearlinear.cli train run.toml
"""


def add_train(commands: argparse._SubParsersAction) -> None:
    """Add ``train`` to the subcommands of ``nearlinear``."""
    train = commands.add_parser(
        "train",
        help="train a model from a config file",
        description="Train a model. Start the ranks on this machine, or join the ranks started by "
        "torchrun (also on SageMaker) or by Slurm's srun.",
        epilog=TRAIN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_argument("--print-config", action="store_true", help="print the config and exit")
    add_config_arguments(train)
    add_nproc_argument(train)
    train.set_defaults(run=_train)


def add_config_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of commands that read a training config."""
    command.add_argument("config", nargs="?", help="a .toml or .json file; default: all defaults")
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="a.b=value",
        dest="settings",
        help="change one key of the config; may be repeated",
    )


def add_nproc_argument(command: argparse.ArgumentParser) -> None:
    """Add ``--nproc`` to a command that starts ranks."""
    command.add_argument(
        "--nproc", type=int, metavar="N", help="ranks to start on this machine (run.nproc)"
    )


def load_config(options: argparse.Namespace) -> TrainConfig:
    """Load the config of a command: its file, then its settings."""
    from ..config import train as train_config

    settings = list(options.settings)
    if getattr(options, "nproc", None) is not None:
        settings.append(f"run.nproc={options.nproc}")
    return train_config.load(options.config, settings)


def run_on_ranks(
    options: argparse.Namespace,
    arguments: list[str],
    config: TrainConfig,
    check: Callable[[int, int], None],
    work: Callable[[], int],
) -> int:
    """Run ``work`` on every rank, after ``check(world_size, ranks_per_node)`` on the launcher.

    A process that a launcher started is a rank already. Any other process starts ``run.nproc``
    ranks with the same command line.
    """
    from ..config.parallel import whole_number
    from ..launch import local

    if local.is_launched_rank():
        if not options.launched_by:
            check(whole_number("WORLD_SIZE"), whole_number("LOCAL_WORLD_SIZE"))
        return work()
    ranks = config.run.nproc or _default_ranks()
    check(ranks, ranks)
    if ranks == 1:
        return work()

    def prepare() -> None:
        from ..train import model, trainer  # noqa: F401

        model.import_classes(config.model)

    return local.start_ranks("nearlinear.cli", arguments, ranks, prepare)


def _default_ranks() -> int:
    """Return one rank per GPU of this machine, at least one."""
    import torch

    return max(1, torch.cuda.device_count())


def _train(options: argparse.Namespace, arguments: list[str]) -> int:
    config = load_config(options)
    if options.print_config:
        from ..config import schema

        print(schema.to_toml(config), end="")
        return 0

    from ..errors import ConfigError
    from ..launch import local
    from ..launch.replicas import run_replicas
    from ..train import preflight

    def check(world: int, ranks_per_node: int) -> None:
        preflight.check_run(config, world, ranks_per_node)

    replicas = config.elastic.replicas
    if replicas and "NEARLINEAR_REPLICA" not in os.environ and not local.is_launched_rank():
        ranks = config.run.nproc or max(replicas, _default_ranks())
        if ranks % replicas:
            raise ConfigError(
                f"run.nproc = {ranks} is not a multiple of elastic.replicas = {replicas}: give "
                "every replica equally many ranks"
            )
        check(ranks // replicas, ranks // replicas)
        limit = config.elastic.max_restarts
        return run_replicas(arguments, replicas, ranks // replicas, limit)

    return run_on_ranks(options, arguments, config, check, lambda: _fit(config))


def _fit(config: TrainConfig) -> int:
    """Train as one rank of the job. The preflight check has verified the token shards."""
    from ..distributed import runtime
    from ..train.trainer import Trainer

    trainer = Trainer(_with_degree(config), verified=True)
    result = trainer.fit()
    runtime.shutdown()
    if trainer.rank == 0 and trainer.writes:
        _print_result(config, result)
    return 0


def _with_degree(config: TrainConfig) -> TrainConfig:
    """Choose ``hybrid_shard_degree = "auto"`` for the free memory, by a collective call."""
    if config.parallel.hybrid_shard_degree != "auto":
        return config
    from ..distributed import runtime
    from ..planner.calibrate.rates import free_memory
    from ..planner.memory import with_fewest_sharing

    mesh = runtime.init(config.parallel.widest)
    device = runtime.current().device
    here = mesh.ranks_per_node or mesh.world
    return with_fewest_sharing(
        config,
        mesh.world,
        free_memory(device, here),
        ranks_per_node=mesh.ranks_per_node,
        host_memory=device.type == "cpu",
    )


def _print_result(config: TrainConfig, result: TrainResult) -> None:
    """Print the final losses, draw the figures, and print the paths of all files."""
    folder = Path(config.run.folder)
    losses = {"loss": result.loss, "held-out": result.eval_loss}
    known = [f", {name} {loss:.4f}" for name, loss in losses.items() if not math.isnan(loss)]
    print(f"done: {result.steps} steps{''.join(known)} (guessing: {result.guessing:.4f})")
    print(f"metrics: {folder / 'metrics.jsonl'}")
    if config.checkpoint_folder:
        print(f"model: nearlinear generate {folder}, or nearlinear export {folder} OUT")
    try:
        from .. import plots

        print(f"loss curve: {plots.save_loss_curve(folder)}")
        if config.run.memory_report:
            print(f"memory: {plots.save_memory(folder)}")
    except (OSError, ValueError) as error:  # a full disk, or rows that it has cut off
        print(f"plots: not drawn ({error})", file=sys.stderr)
    except ImportError:
        print('loss curve: not drawn, matplotlib is missing; pip install "nearlinear[notebooks]"')


TUNE_EXAMPLES = """\
examples:
  nearlinear tune run.toml                             measure, and explain the settings chosen
  nearlinear tune run.toml --nproc 4 --write tuned.toml    also write the tuned config
  nearlinear tune run.toml --memory 8 --json tuned.json    for 8 GiB per rank; write all numbers
  nearlinear tune run.toml --validate 12               run steps of 12 settings; print the regret
  torchrun --nnodes 32 --nproc-per-node 8 -m nearlinear.cli tune run.toml --write tuned.toml
  nearlinear train tuned.toml
  torchrun --nnodes 2 --nproc-per-node 8 -m nearlinear.cli tune --machine here.toml
  nearlinear plan run.toml --cluster here.toml:32      plan for 32 of the measured nodes
"""


def add_tune(commands: argparse._SubParsersAction) -> None:
    """Add ``tune`` to the subcommands of ``nearlinear``."""
    tune = commands.add_parser(
        "tune",
        help="measure the links of a job and choose its communication settings",
        description="Measure compute, memory and collectives on the ranks and links of the job, "
        "and let the planner choose hybrid_shard_degree, communication_backend, "
        "hierarchical_all_gather, prefetch_depth, sdp_max_live_parameters and "
        "sdp_reduce_bucket_size. Real steps of the best predictions, on random tokens, decide. "
        "Ranks are started or joined as by train.",
        epilog=TUNE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tune.add_argument("--rounds", type=int, default=5, metavar="N", help="timed rounds (5)")
    tune.add_argument(
        "--memory",
        type=float,
        default=0.0,
        metavar="GIB",
        help="memory per rank in GiB; default: the free memory",
    )
    tune.add_argument(
        "--validate",
        type=int,
        default=3,
        metavar="N",
        help="run real steps of the N best predictions and choose the fastest (3); 0: none",
    )
    tune.add_argument("--write", default="", metavar="FILE", help="write the tuned config (.toml)")
    tune.add_argument("--json", default="", metavar="FILE", help="write all numbers (.json)")
    tune.add_argument(
        "--machine",
        default="",
        metavar="FILE",
        help="measure the machine itself, for nearlinear plan --cluster FILE:NODES (.toml)",
    )
    add_config_arguments(tune)
    add_nproc_argument(tune)
    tune.set_defaults(run=_tune)


def _tune(options: argparse.Namespace, arguments: list[str]) -> int:
    from ..planner.calibrate import command

    config = load_config(options)
    tune_options = command.TuneOptions(
        options.rounds, options.memory, options.write, options.json, options.machine,
        options.validate, options.config or "",
    )  # fmt: skip

    def check(world: int, ranks_per_node: int) -> None:
        command.check_tune(config, tune_options, world, ranks_per_node)

    return run_on_ranks(
        options, arguments, config, check, lambda: command.run_tune(config, tune_options)
    )
