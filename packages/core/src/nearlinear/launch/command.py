"""``nearlinear launch``: check a job, and give it to the place where it runs.

Everything that can be found wrong here is found before anything is sent; ``--dry-run`` prints what
would be sent, in the place's own words, and touches nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ConfigError
from ..train.config import TrainConfig
from . import kubernetes, kubernetes_rules, layout, sbatch
from .faults import Fault, FaultyJob
from .sagemaker import emulate, request
from .sagemaker.faultless import faultless
from .spec import JobSpec, tokens


@dataclass(frozen=True)
class Launch:
    """A job, and how it was asked for."""

    job: JobSpec
    config: TrainConfig
    file: str
    """of both"""
    settings: list[str]
    """changes of the config, without those of the job"""
    dry_run: bool = False
    folder: str = ""
    """of an emulated job"""
    hosts: int = 0
    """of an emulated job; 0 = as many as the request asks for"""
    ranks: int = 1
    """of each host of an emulated job"""
    stand_ins: dict[str, Path] = field(default_factory=dict)
    """folders that stand for sources, in an emulated job"""


def stand_in(text: str) -> tuple[str, Path]:
    """Of ``SOURCE=FOLDER``. Raises ConfigError."""
    source, equals, folder = text.rpartition("=")
    if not equals or not Path(folder).is_dir():
        raise ConfigError(f"--stand-in {text}: write SOURCE=FOLDER, with a folder of this machine")
    return source, Path(folder)


def run(asked: Launch) -> int:
    """Do what was asked; the exit status. Raises ConfigError, FaultyJob among them."""
    return {
        "local": _local,
        "slurm": _slurm,
        "kubernetes": _kubernetes,
        "sagemaker": _sagemaker,
        "emulate": _emulate,
    }[asked.job.place](asked)


def _local(asked: Launch) -> int:
    job = asked.job
    faults = [
        Fault(f"job.inputs.{name}", f"{given.source} inputs are not fetched", "write a path")
        for name, given in job.inputs.items()
        if given.source != "path"
    ]
    if job.nodes > 1:
        faults.append(Fault("job.nodes", f"{job.nodes} machines", "a local job has one"))
    _refuse(faults)
    found = tokens(job, asked.config)
    settings = [*([f"data.path={found.folder}"] if found else []), *asked.settings]
    if job.ranks_per_node:
        settings.append(f"run.nproc={job.ranks_per_node}")
    changes = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "nearlinear.cli", "train", asked.file, *changes]
    if asked.dry_run:
        print(" ".join(command))
        return 0
    return subprocess.call(command, env=os.environ | job.environment)


def _slurm(asked: Launch) -> int:
    _refuse([*sbatch.check(asked.job), *layout.check(asked.job, asked.config.parallel)])
    written = [asked.config.run.folder, asked.config.checkpoint.folder]
    file, sources = str(Path(asked.file).resolve()), list(asked.config.data.sources)
    script = sbatch.script(asked.job, file, asked.settings, written, sources)
    return _hand_over(asked, script, ["sbatch"])


def _kubernetes(asked: Launch) -> int:
    _refuse([*kubernetes_rules.check(asked.job), *layout.check(asked.job, asked.config.parallel)])
    name = request.job_name(asked.job.name)
    text = kubernetes.render(asked.job, asked.config, name)
    return _hand_over(asked, text, ["kubectl", "apply", "-f", "-"])


def _sagemaker(asked: Launch) -> int:
    found = faultless(asked.job, asked.config)
    if asked.dry_run:
        print(json.dumps(found, indent=2))
        return 0
    from .sagemaker import submit

    return submit.run(asked.job, found)


def _emulate(asked: Launch) -> int:
    found = faultless(asked.job, asked.config)
    if asked.dry_run:
        print(json.dumps(found, indent=2))
        return 0
    folder = Path(asked.folder or f"runs/{found['TrainingJobName']}")
    return emulate.run(found, folder, asked.stand_ins, asked.hosts, asked.ranks)


def _refuse(faults: list[Fault]) -> None:
    if faults:
        raise FaultyJob(faults)


def _hand_over(asked: Launch, text: str, command: list[str]) -> int:
    """Give ``text`` to ``command`` of this machine, or print it."""
    if asked.dry_run:
        print(text, end="")
        return 0
    if shutil.which(command[0]) is None:
        raise ConfigError(
            f"{command[0]} is not on this machine: take what --dry-run prints to where it is"
        )
    return subprocess.run(command, input=text, text=True).returncode
