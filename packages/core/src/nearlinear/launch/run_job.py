"""Implementation of ``nearlinear launch``: validate a job and submit it to its backend.

Every check that needs no network runs before anything is sent. ``--dry-run`` prints the request in
the backend's own format and changes nothing.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ..config.train import TrainConfig
from ..errors import ConfigError
from . import gate, kubernetes, slurm
from .sagemaker import emulate
from .sagemaker.build_request import build_request, timestamped_name
from .secrets import (
    check_secrets,
    export_file,
    read_secrets,
    redact_job,
    redact_request,
    secrets_in_clear_text,
)
from .spec import (
    JobSpec,
    Problem,
    check_environment,
    check_parallel_layout,
    raise_if_invalid,
    token_input,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LaunchOptions:
    """A job and the options of its launch."""

    job: JobSpec
    config: TrainConfig
    file: str
    """Config file that contains both."""
    settings: list[str]
    """Overrides of the training config, without those of the job."""
    dry_run: bool = False
    force: bool = False
    """Send a job that the planner or a recorded table refuses."""
    yes: bool = False
    """Send without asking."""
    check_account: bool = False
    """Ask AWS about the account in a dry run, too."""
    price_per_hour: float | None = None
    """Price of one machine; default: AWS's list price, or the hardware table's."""
    folder: str = ""
    """Working folder of an emulated job; empty: a folder below runs/."""
    num_hosts: int = 0
    """Hosts of an emulated job; 0: the number in the request."""
    ranks_per_host: int = 1
    """Ranks of each host of an emulated job."""
    stand_ins: Mapping[str, Path] = field(default_factory=dict)
    """Local folders that replace the data sources of an emulated job."""


def parse_stand_in(text: str) -> tuple[str, Path]:
    """Split ``SOURCE=FOLDER``. Raises ConfigError if the folder does not exist."""
    source, equals, folder = text.rpartition("=")
    if not equals or not Path(folder).is_dir():
        raise ConfigError(
            f"--stand-in {text}: expected SOURCE=FOLDER with an existing folder of this machine"
        )
    return source, Path(folder)


def run_job(options: LaunchOptions) -> int:
    """Launch a job and return the exit code. Raises InvalidJob or another ConfigError."""
    if exposed := secrets_in_clear_text(options.job):
        log.warning(
            "job.environment holds secrets in clear text: %s. %s; name them in job.secrets instead",
            ", ".join(exposed),
            "They are redacted below" if options.dry_run else "They are readable in the request",
        )
    return {
        "local": _run_local,
        "slurm": _run_slurm,
        "kubernetes": _run_kubernetes,
        "sagemaker": _run_sagemaker,
        "emulate": _run_emulated,
    }[options.job.place](options)


def _plan(options: LaunchOptions) -> gate.Forecast:
    """Plan the job and print the result. Raises InvalidJob for a job that the planner refuses."""
    found = gate.forecast(options.job, options.config)
    problems = gate.refusals(options.job, found)
    if not options.force:
        raise_if_invalid(problems)
    for problem in problems:
        log.warning("--force: %s", problem)
    print(gate.summary(options.job, found), file=sys.stderr)
    return found


def _run_local(options: LaunchOptions) -> int:
    job = options.job
    problems = [
        Problem(
            f"job.inputs.{name}",
            f"local jobs do not fetch {given.source} inputs",
            "give the data as path",
        )
        for name, given in job.inputs.items()
        if given.source != "path"
    ]
    if job.nodes > 1:
        cause = f"{job.nodes}, but a local job runs on one machine"
        problems.append(Problem("job.nodes", cause, "set it to 1, or choose another job.place"))
    raise_if_invalid(problems)
    raise_if_invalid([*check_environment(job), *check_secrets(job, "local")])
    tokens = token_input(job, options.config)
    settings = [*([f"data.path={tokens.folder}"] if tokens else []), *options.settings]
    if job.ranks_per_node:
        settings.append(f"run.nproc={job.ranks_per_node}")
    changes = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "nearlinear.cli", "train", options.file, *changes]
    if options.dry_run:
        print(" ".join(command))
        return 0
    return subprocess.call(command, env=os.environ | job.environment | read_secrets(job))


def _run_slurm(options: LaunchOptions) -> int:
    job, config = options.job, options.config
    raise_if_invalid([*slurm.check_slurm_job(job), *check_parallel_layout(job, config.parallel)])
    _plan(options)
    folders = [config.run.folder, config.checkpoint_folder]
    file = str(Path(options.file).resolve())
    shown = redact_job(job) if options.dry_run else job
    script = slurm.render_script(shown, file, options.settings, folders, list(config.data.sources))
    if not job.secrets or options.dry_run:
        return _submit_with(["sbatch"], script, options.dry_run)
    with _readable(export_file(read_secrets(job))) as descriptor:
        command = ["sbatch", f"--export-file={descriptor}"]
        return _submit_with(command, script, False, pass_fds=[descriptor])


@contextmanager
def _readable(data: bytes) -> Iterator[int]:
    """Yield a descriptor from which another process can read ``data`` once."""
    with tempfile.TemporaryFile() as file:  # has no name, and is readable by this user only
        file.write(data)
        file.seek(0)
        yield file.fileno()


def _run_kubernetes(options: LaunchOptions) -> int:
    job, config = options.job, options.config
    raise_if_invalid(
        [*kubernetes.check_kubernetes_job(job), *check_parallel_layout(job, config.parallel)]
    )
    _plan(options)
    shown = redact_job(job) if options.dry_run else job
    manifest = kubernetes.render_manifest(shown, config, timestamped_name(job.name))
    return _submit_with(["kubectl", "apply", "--server-side", "-f", "-"], manifest, options.dry_run)


def _run_sagemaker(options: LaunchOptions) -> int:
    """Check, price and submit the job. Everything but the request goes to stderr."""
    from .sagemaker import account_checks, cost, jobs

    job, request = options.job, build_request(options.job, options.config)
    found, offline = _plan(options), options.dry_run and not options.check_account
    if not offline:
        if not options.dry_run:
            jobs.check_source(job)
        problems, notes = account_checks.check_account(job, request)
        for note in notes:
            print(f"not checked: {note}", file=sys.stderr)
        raise_if_invalid(problems)
    price, why = gate.table_price(job.instance_type), ""
    if options.price_per_hour is not None or not offline:
        listed, why = cost.find_price(cost.planned_usage(job), options.price_per_hour)
        price = listed or price
    print(gate.price_line(job, found, price, why), file=sys.stderr)
    if options.dry_run:
        print(json.dumps(redact_request(request), indent=2))
        return 0
    machines = f"{job.nodes} x {job.instance_type}"
    if not gate.confirm(f"Submit {request['TrainingJobName']} on {machines}?", options.yes):
        print("nothing was sent", file=sys.stderr)
        return 1
    return jobs.submit_job(job, request)


def _run_emulated(options: LaunchOptions) -> int:
    request = build_request(options.job, options.config)
    if options.dry_run:
        print(json.dumps(redact_request(request), indent=2))
        return 0
    folder = Path(options.folder or f"runs/{request['TrainingJobName']}")
    return emulate.run_emulated(
        request, folder, options.stand_ins, options.num_hosts, options.ranks_per_host
    )


def _submit_with(command: list[str], text: str, dry_run: bool, pass_fds: Sequence[int] = ()) -> int:
    """Pipe ``text`` to ``command``, or print it in a dry run."""
    if dry_run:
        print(text, end="")
        return 0
    if shutil.which(command[0]) is None:
        raise ConfigError(
            f"{command[0]} is not installed on this machine. Run with --dry-run, and pass the "
            f"output to {shlex.join(command)} on a machine that has it"
        )
    return subprocess.run(command, input=text, text=True, pass_fds=pass_fds).returncode
