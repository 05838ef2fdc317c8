"""A job as a batch script for Slurm: one task per rank, which `slurm` lets join the run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from . import names
from .faults import Fault
from .local import NOTICE
from .spec import JobSpec

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def check(job: JobSpec) -> list[Fault]:
    """What of ``job`` Slurm's nodes cannot do."""
    instead = "write run.folder and checkpoint.folder, on a file system that all nodes see"
    rules = (_inputs(job), _names(job), names.environment(job))
    return [*(it for rule in rules for it in rule), *names.elsewhere(job, "Slurm", instead)]


def _inputs(job: JobSpec) -> Iterator[Fault]:
    for name, given in job.inputs.items():
        if given.source != "path":
            fix = "mount it on all of them, and write its folder as path"
            what = f"Slurm's nodes do not fetch {given.source} inputs"
            yield Fault(f"job.inputs.{name}", what, fix)
        elif job.image and set(given.folder) & set(",:"):
            what = f"{given.folder!r} has a , or a : in it, which part mounts of a container"
            yield Fault(f"job.inputs.{name}", what, "link to it by another name")


def _names(job: JobSpec) -> Iterator[Fault]:
    """Of those that stand in lines of the script, unquoted as Slurm reads them."""
    for name in ("name", "partition", "account"):
        value = getattr(job, name)
        several = name == "partition"  # the first of them that is free
        parts = value.split(",") if several else [value]
        if value and not all(NAME.fullmatch(part) for part in parts):
            fix = "letters, digits, and . _ - between them" + ("; commas part several" * several)
            yield Fault(f"job.{name}", f"{value!r} is no name for Slurm", fix)
    if not job.name:
        yield Fault("job.name", "is empty", "name the job")


def script(
    job: JobSpec,
    config: str,
    settings: Sequence[str] = (),
    written: Sequence[str] = (),
    sources: Sequence[str] = (),
) -> str:
    """The script that trains ``config``, a file that all nodes see, with ``settings`` changed.

    ``written``: folders that the training writes; a container must be shown those with full paths.
    ``sources``: data that the config names, in place of the input train.
    """
    lines = ["#!/bin/bash", *(f"#SBATCH --{option}" for option in _options(job))]
    lines += ["set -euo pipefail", *_exports(job)]
    if job.source:
        lines.append(f"cd {shlex.quote(job.source)}")
    tokens = None if sources else job.inputs.get("train")
    settings = [*([f"data.path={tokens.folder}"] if tokens else []), *settings]
    lines.append(f"{_srun(job, config, [*written, *sources])} \\\n  {_command(config, settings)}")
    return "\n".join(lines) + "\n"


def _options(job: JobSpec) -> list[str]:
    minutes = max(1, round(job.max_hours * 60))
    options = [
        f"job-name={job.name}",
        f"nodes={job.nodes}",
        f"ntasks-per-node={job.ranks_here}",
        # The whole machine, so that a rank is not bound to the one core that a task gets else.
        "exclusive",
        "mem=0",
        f"time={minutes // 60:02d}:{minutes % 60:02d}:00",
        f"output={job.name}-%j.log",
        f"signal=TERM@{NOTICE}",
    ]
    if job.accelerators_here:
        options.append(f"gpus-per-node={job.ranks_here}")
    options += [f"{name}={getattr(job, name)}" for name in ("partition", "account")
                if getattr(job, name)]  # fmt: skip
    # A second start goes on in the log of the first.
    return [*options, "requeue", "open-mode=append"] if job.retries else [*options, "no-requeue"]


def _exports(job: JobSpec) -> list[str]:
    return [f"export {name}={shlex.quote(value)}" for name, value in job.environment.items()]


def _srun(job: JobSpec, config: str, written: Sequence[str]) -> str:
    words = "srun --kill-on-bad-exit=1"
    if not job.image:
        return words
    # Options of Pyxis, by which a container sees the nodes' folders only where they are named.
    inputs = (given.folder for given in job.inputs.values())
    full = (folder for folder in written if folder.startswith("/"))
    here = str(PurePosixPath(config).parent)
    folders = dict.fromkeys([here, *inputs, *full])
    mounts = shlex.quote(",".join(f"{folder}:{folder}" for folder in folders))
    image = shlex.quote(f"--container-image={job.image}")
    return f'{words} {image} --container-mounts={mounts},"$PWD:$PWD" --container-workdir="$PWD"'


def _command(config: str, settings: Sequence[str]) -> str:
    changes = [part for setting in settings for part in ("--set", setting)]
    return shlex.join(["python", "-m", "nearlinear.cli", "train", config, *changes])
