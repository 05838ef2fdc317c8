"""Command-line parsers of jobs: ``launch``, ``status``, ``logs``, ``stop``, ``cost``, ``policies``.

Commands import their implementation when they run, so that building the parsers is fast.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from .fsx import cli as fsx

LAUNCH_EXAMPLES = """\
examples:
  nearlinear launch run.toml --dry-run                 print the request of its table [job]
  nearlinear launch run.toml --place slurm --dry-run > run.sbatch
  nearlinear launch run.toml --place sagemaker --set job.nodes=32     print the price and ask
  nearlinear launch run.toml --yes                     for scripts: submit without asking
  nearlinear launch run.toml --dry-run --check-account   ask AWS about quotas and access, too
  nearlinear launch run.toml --place emulate --hosts 2 --ranks 2 \\
      --stand-in fs-0123456789abcdef0/abcdefgh/tokens=data/botocore
"""
FOLLOW_EXAMPLES = """\
examples:
  nearlinear status gpt2-30b-20261122031500
  nearlinear logs gpt2-30b-20261122031500 --follow     first host, until the job ends
  nearlinear logs gpt2-30b-20261122031500 --all        all hosts, with the host before each line
  nearlinear stop gpt2-30b-20261122031500
"""
COST_EXAMPLES = """\
examples:
  nearlinear cost gpt2-30b-20261122031500              cost of a submitted job, so far or final
  nearlinear cost run.toml --set job.nodes=16          upper bound for a job before submission
  nearlinear cost run.toml --price-per-hour 20         with your own price
"""
POLICY_EXAMPLES = """\
examples:
  nearlinear policies run.toml                         all policies, by name
  nearlinear policies run.toml --caller > caller.json
  aws iam put-user-policy --user-name me --policy-name nearlinear \\
      --policy-document file://caller.json
"""
REGION_HELP = "AWS region; default: the environment's"


def add_commands(commands: Any) -> None:
    """Add the job and file system commands to the subparsers of ``nearlinear``."""
    launch = commands.add_parser(
        "launch",
        help="run a config on SageMaker, Slurm, Kubernetes or this machine, as its [job] says",
        description="Validate the job in a config's table [job] and submit it: to SageMaker, "
        "Slurm or Kubernetes, to this machine, or to an emulation of SageMaker's hosts on this "
        "machine (emulate). All problems are reported before anything is sent: of the request, of "
        "the planner's memory on the job's machines, and of the AWS account. A SageMaker job is "
        "submitted after its price was confirmed on the terminal, or with --yes.",
        epilog=LAUNCH_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_launch_arguments(launch)
    launch.set_defaults(run=_launch)
    for name, run, help_text in (
        ("status", _status, "print the state of a SageMaker job"),
        ("logs", _logs, "print the output of a SageMaker job"),
        ("stop", _stop, "stop a SageMaker job; its ranks have two minutes to save"),
    ):
        command = commands.add_parser(
            name,
            help=help_text,
            epilog=FOLLOW_EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument("name", help="job name, as printed by launch")
        command.add_argument("--region", default="", help=REGION_HELP)
        command.set_defaults(run=run)
        if name == "logs":
            command.add_argument("--follow", action="store_true", help="until the job ends")
            command.add_argument("--all", action="store_true", help="print the logs of all hosts")
    cost = commands.add_parser(
        "cost",
        help="print the cost of a SageMaker job, or an upper bound before submission",
        description="Machine-hours of a job, and their cost at AWS's on-demand list price for "
        "training (needs pricing:GetProducts) or at a given price.",
        epilog=COST_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cost.add_argument("job", help="job name, or a .toml or .json file of a job to submit")
    _add_set(cost)
    cost.add_argument("--price-per-hour", type=float, metavar="X", help="price of one machine")
    cost.add_argument("--region", default="", help=REGION_HELP)
    cost.set_defaults(run=_cost)
    policies = commands.add_parser(
        "policies",
        help="print the minimal IAM policies of a SageMaker job",
        description="IAM policies of the job in a config's table [job]: for the user who submits "
        "and watches it (caller), for the checks before a launch (checks, optional), for the role "
        "that it runs as (execution), and the trust policy of that role (trust).",
        epilog=POLICY_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    policies.add_argument("config", help="a .toml or .json file with a table [job]")
    _add_set(policies)
    one = policies.add_mutually_exclusive_group()
    for name in ("caller", "checks", "execution", "trust"):
        one.add_argument(f"--{name}", dest="only", action="store_const", const=name, default="",
            help="print only this policy, as an IAM document")  # fmt: skip
    policies.set_defaults(run=_policies)
    fsx.add_commands(commands)


def _add_set(command: argparse.ArgumentParser) -> None:
    command.add_argument("--set", action="append", default=[], metavar="a.b=value", dest="settings",
        help="change one key of the config, as in job.nodes=2; repeatable")  # fmt: skip


def _add_launch_arguments(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("config", help="a .toml or .json file with a table [job]")
    _add_set(command)
    add("--place", default="", help="job.place: local, emulate, sagemaker, slurm, kubernetes")
    add("--dry-run", action="store_true", help="print the request; change nothing")
    add("--force", action="store_true",
        help="send a job that does not fit by the planner, or whose region lacks its machines by "
        "the recorded tables")  # fmt: skip
    add("--yes", "-y", action="store_true",
        help="sagemaker: submit without asking; required without a terminal")  # fmt: skip
    add("--price-per-hour", type=float, metavar="X", help="sagemaker: price of one machine")
    add("--check-account", action="store_true",
        help="sagemaker: with --dry-run, also check quotas, role, buckets and network")  # fmt: skip
    add("--hosts", type=int, default=0, metavar="N",
        help="emulate: number of hosts; default: job.nodes")  # fmt: skip
    add("--ranks", type=int, default=1, metavar="N", help="emulate: ranks per host (1)")
    add("--folder", default="", metavar="FOLDER",
        help="emulate: working folder of the hosts; default: below runs/")  # fmt: skip
    add("--stand-in", action="append", default=[], metavar="SOURCE=FOLDER", dest="stand_ins",
        help="emulate: local folder that replaces an input; repeatable")  # fmt: skip


def _launch(options: argparse.Namespace, arguments: list[str]) -> int:
    from . import run_job, spec

    place = [f"job.place={options.place}"] if options.place else []
    job, config = spec.load(options.config, [*options.settings, *place])
    return run_job.run_job(
        run_job.LaunchOptions(
            job,
            config,
            file=options.config,
            settings=[text for text in options.settings if not spec.is_job_setting(text)],
            dry_run=options.dry_run,
            force=options.force,
            yes=options.yes,
            check_account=options.check_account,
            price_per_hour=options.price_per_hour,
            folder=options.folder,
            num_hosts=options.hosts,
            ranks_per_host=options.ranks,
            stand_ins=dict(run_job.parse_stand_in(text) for text in options.stand_ins),
        )
    )


def _status(options: argparse.Namespace, arguments: list[str]) -> int:
    from .sagemaker import jobs

    print(jobs.format_status(jobs.describe_job(options.name, options.region)))
    return 0


def _logs(options: argparse.Namespace, arguments: list[str]) -> int:
    from .sagemaker import jobs

    jobs.print_logs(options.name, options.region, all_hosts=options.all, follow=options.follow)
    return 0


def _stop(options: argparse.Namespace, arguments: list[str]) -> int:
    from .sagemaker import jobs

    jobs.stop_job(options.name, options.region)
    print(f"requested a stop of {options.name}; check: nearlinear status {options.name}")
    return 0


def _cost(options: argparse.Namespace, arguments: list[str]) -> int:
    from ..errors import ConfigError
    from . import gate, spec
    from .sagemaker import cost, jobs

    if options.job.endswith((".toml", ".json")):
        region = [f"job.region={options.region}"] if options.region else []
        job, _ = spec.load(options.job, [*options.settings, *region])
        usage = cost.planned_usage(job)
    elif options.settings:
        raise ConfigError(
            f"--set changes a config, but {options.job!r} is the name of a job; give a .toml or "
            ".json file, or remove --set"
        )
    else:
        usage = cost.actual_usage(jobs.describe_job(options.job, options.region))
    price, why_unknown = cost.find_price(usage, options.price_per_hour)
    if price is None and (recorded := gate.table_price(usage.instance_type)):
        why = f"AWS's price list was not read: {why_unknown}; or pass --price-per-hour X"
        price = dataclasses.replace(recorded, source=f"{recorded.source}. {why}")
    print(cost.format_cost(usage, price, why_unknown))
    return 0


def _policies(options: argparse.Namespace, arguments: list[str]) -> int:
    import json

    from . import spec
    from .sagemaker import policies

    job, _ = spec.load(options.config, options.settings)
    builders = {"caller": lambda: policies.caller_policy(job),
                "checks": lambda: policies.checks_policy(job),
                "execution": lambda: policies.execution_policy(job),
                "trust": policies.trust_policy}  # fmt: skip
    if options.only:
        document = builders[options.only]()
    else:
        document = {name: build() for name, build in builders.items()}
    print(json.dumps(document, indent=2))
    return 0
