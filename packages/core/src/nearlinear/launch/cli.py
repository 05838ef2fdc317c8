"""Commands for jobs that run elsewhere: ``launch``, ``status``, ``logs``, ``stop`` and others."""

import argparse

from .fsx import cli as fsx

LAUNCH_EXAMPLES = """\
examples:
  nearlinear launch run.toml --dry-run                 what its [job] asks for, printed
  nearlinear launch run.toml --place slurm --dry-run > run.sbatch
  nearlinear launch run.toml --place sagemaker --set job.nodes=32
  nearlinear launch run.toml --place emulate --hosts 2 --ranks 2 \\
      --stand-in fs-0123456789abcdef0/abcdefgh/tokens=data/botocore
"""
FOLLOW_EXAMPLES = """\
examples:
  nearlinear status gpt2-30b-20261122031500
  nearlinear logs gpt2-30b-20261122031500 --follow     the first host, until the job has ended
  nearlinear logs gpt2-30b-20261122031500 --all        every host, named before each line
  nearlinear stop gpt2-30b-20261122031500
"""
COST_EXAMPLES = """\
examples:
  nearlinear cost gpt2-30b-20261122031500              of a job, so far or in the end
  nearlinear cost run.toml --set job.nodes=16          of a job to come, at most
  nearlinear cost run.toml --price-per-hour 20         at a price of your own
"""
POLICY_EXAMPLES = """\
examples:
  nearlinear policies run.toml                         all three, by name
  nearlinear policies run.toml --caller > caller.json
  aws iam put-user-policy --user-name me --policy-name nearlinear \\
      --policy-document file://caller.json
"""


def add_commands(commands) -> None:
    """Add them to the parsers of ``nearlinear``."""
    launch = commands.add_parser(
        "launch",
        help="run a config where its [job] says: SageMaker, Slurm, Kubernetes, here",
        description="Check the job that a config describes in its table [job], and give it to the "
        "place where it runs: SageMaker, Slurm, Kubernetes, this machine, or this machine in place "
        "of SageMaker's (emulate). Faults are named before anything is sent.",
        epilog=LAUNCH_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_launch(launch)
    launch.set_defaults(run=_launch)
    for name, run, words in (
        ("status", _status, "say how a SageMaker job stands"),
        ("logs", _logs, "print what a SageMaker job says"),
        ("stop", _stop, "end a SageMaker job; its ranks have two minutes to save"),
    ):
        command = commands.add_parser(
            name,
            help=words,
            epilog=FOLLOW_EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument("name", help="of the job, as launch printed it")
        command.add_argument("--region", default="", help="of AWS; default: the environment's")
        command.set_defaults(run=run)
        if name == "logs":
            command.add_argument("--follow", action="store_true", help="until the job has ended")
            command.add_argument("--all", action="store_true", help="of every host")
    cost = commands.add_parser(
        "cost",
        help="say what a SageMaker job costs, or will at most",
        description="Machine-hours of a job, and what they cost at AWS's list price for training "
        "on demand (needs pricing:GetProducts), or at a price of your own.",
        epilog=COST_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cost.add_argument("job", help="its name, or the .toml or .json file of one to come")
    _add_set(cost)
    cost.add_argument("--price-per-hour", type=float, metavar="X", help="of one machine")
    cost.add_argument("--region", default="", help="of AWS; default: the environment's")
    cost.set_defaults(run=_cost)
    policies = commands.add_parser(
        "policies",
        help="print what IAM must allow for a SageMaker job, and no more",
        description="Policies of IAM for the job in a config's table [job]: for whoever launches "
        "and watches it (caller), for the role that it runs as (execution), and who may assume "
        "that role (trust).",
        epilog=POLICY_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    policies.add_argument("config", help="a .toml or .json file with a table [job]")
    _add_set(policies)
    one = policies.add_mutually_exclusive_group()
    for name in ("caller", "execution", "trust"):
        one.add_argument(f"--{name}", dest="only", action="store_const", const=name, default="",
            help="that one alone, as IAM takes it")  # fmt: skip
    policies.set_defaults(run=_policies)
    fsx.add_commands(commands)


def _add_set(command: argparse.ArgumentParser) -> None:
    command.add_argument("--set", action="append", default=[], metavar="a.b=value", dest="settings",
        help="change one key of the config, as in job.nodes=2; may be repeated")  # fmt: skip


def _add_launch(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("config", help="a .toml or .json file with a table [job]")
    _add_set(command)
    add("--place", default="", help="job.place: local, emulate, sagemaker, slurm, kubernetes")
    add("--dry-run", action="store_true", help="print what would be sent; touch nothing")
    add("--hosts", type=int, default=0, metavar="N", help="emulate: hosts; default: job.nodes")
    add("--ranks", type=int, default=1, metavar="N", help="emulate: ranks of each host (1)")
    add("--folder", default="", metavar="FOLDER", help="emulate: where hosts live; default: runs/")
    add("--stand-in", action="append", default=[], metavar="SOURCE=FOLDER", dest="stand_ins",
        help="emulate: which folder here stands for an input; may be repeated")  # fmt: skip


def _launch(options, arguments) -> int:
    from . import command, spec

    place = [f"job.place={options.place}"] if options.place else []
    job, config = spec.load(options.config, [*options.settings, *place])
    rest = [setting for setting in options.settings if not spec.of_job(setting)]
    stand_ins = dict(command.stand_in(text) for text in options.stand_ins)
    return command.run(
        command.Launch(
            job,
            config,
            options.config,
            rest,
            options.dry_run,
            options.folder,
            options.hosts,
            options.ranks,
            stand_ins,
        )
    )


def _status(options, arguments) -> int:
    from .sagemaker import follow

    print(follow.status(follow.describe(options.name, options.region)))
    return 0


def _logs(options, arguments) -> int:
    from .sagemaker import follow

    follow.show(options.name, options.region, everybody=options.all, follow=options.follow)
    return 0


def _stop(options, arguments) -> int:
    from .sagemaker import follow

    follow.stop(options.name, options.region)
    print(f"{options.name} is asked to stop: nearlinear status {options.name}")
    return 0


def _cost(options, arguments) -> int:
    from ..errors import ConfigError
    from . import spec
    from .sagemaker import cost, follow

    if options.job.endswith((".toml", ".json")):
        region = [f"job.region={options.region}"] if options.region else []
        job, _ = spec.load(options.job, [*options.settings, *region])
        use = cost.planned(job)
    elif options.settings:
        raise ConfigError(f"--set changes a config, and {options.job} is a job: name a .toml file")
    else:
        use = cost.used(follow.describe(options.job, options.region))
    print(cost.text(use, *cost.price(use, options.price_per_hour)))
    return 0


def _policies(options, arguments) -> int:
    import json

    from . import spec
    from .sagemaker import policies

    job, _ = spec.load(options.config, options.settings)
    made = {"caller": lambda: policies.caller(job), "execution": lambda: policies.execution(job),
            "trust": policies.trust}  # fmt: skip
    if options.only:
        found = made[options.only]()
    else:
        found = {name: make() for name, make in made.items()}
    print(json.dumps(found, indent=2))
    return 0
