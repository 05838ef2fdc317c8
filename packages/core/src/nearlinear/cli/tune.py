"""``nearlinear tune``: measure the links of a job and choose its communication settings."""

import argparse

from .train import add_config_arguments, add_nproc_argument, load_config, run_on_ranks

EXAMPLES = """\
examples:
  nearlinear tune run.toml                             measure, and explain the settings chosen
  nearlinear tune run.toml --nproc 4 --write tuned.toml    also write the tuned config
  nearlinear tune run.toml --memory 8 --json tuned.json    for 8 GiB per rank; write all numbers
  torchrun --nnodes 32 --nproc-per-node 8 -m nearlinear.cli tune run.toml --write tuned.toml
  nearlinear train tuned.toml
  torchrun --nnodes 2 --nproc-per-node 8 -m nearlinear.cli tune --machine here.toml
  nearlinear plan run.toml --cluster here.toml:32      plan for 32 of the measured nodes
"""


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add ``tune`` to the subcommands of ``nearlinear``."""
    tune = commands.add_parser(
        "tune",
        help="measure the links of a job and choose its communication settings",
        description="Measure compute, memory and collectives on the ranks and links of the job, "
        "and let the planner choose hybrid_shard_degree, communication_backend, "
        "hierarchical_all_gather, prefetch_depth, sdp_max_live_parameters and "
        "sdp_reduce_bucket_size. No training takes place. Ranks are started or joined as by "
        "train.",
        epilog=EXAMPLES,
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
        options.config or "",
    )  # fmt: skip

    def check(world: int, ranks_per_node: int) -> None:
        command.check_tune(config, tune_options, world, ranks_per_node)

    return run_on_ranks(
        options, arguments, config, check, lambda: command.run_tune(config, tune_options)
    )
