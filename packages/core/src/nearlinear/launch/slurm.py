"""Slurm jobs: the batch script, its validation, and rank variables inside an srun step.

The script starts one task per rank. Inside the step, `rank_variables` translates Slurm's variables
to those of torchrun.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath

from ..errors import ConfigError
from .sagemaker.images import is_auto
from .secrets import check_secrets
from .spec import TERMINATION_NOTICE, JobSpec, Problem, check_environment, check_sagemaker_only_keys

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def check_slurm_job(job: JobSpec) -> list[Problem]:
    """Return all problems that prevent ``job`` from running on Slurm."""
    storage = "set run.folder and checkpoint.folder to a file system that all nodes see"
    return [
        *_check_inputs(job),
        *_check_names(job),
        *check_environment(job),
        *check_secrets(job, "slurm"),
        *check_sagemaker_only_keys(job, "Slurm", storage),
    ]


def _check_inputs(job: JobSpec) -> Iterator[Problem]:
    for name, given in job.inputs.items():
        field = f"job.inputs.{name}"
        if given.source != "path":
            cause = f"Slurm nodes do not fetch {given.source} inputs"
            yield Problem(field, cause, "mount it on all nodes, and give its folder as path")
        elif job.image and set(given.folder) & set(",:"):
            cause = f"{given.folder!r} contains , or :, which separate container mounts"
            yield Problem(field, cause, "link to the folder under another name")


def _check_names(job: JobSpec) -> Iterator[Problem]:
    """Check the values that the script contains unquoted."""
    for name in ("name", "partition", "account"):
        value = getattr(job, name)
        is_list = name == "partition"  # Slurm uses the first free partition of a list
        parts = value.split(",") if is_list else [value]
        if value and not all(_NAME.fullmatch(part) for part in parts):
            remedy = "use letters, digits and . _ -, beginning with a letter or digit"
            remedy += "; separate partitions with commas" * is_list
            yield Problem(f"job.{name}", f"{value!r} is not a valid Slurm name", remedy)
    if is_auto(job.image):
        cause = f"{job.image!r} is an image of AWS for SageMaker and Kubernetes"
        yield Problem("job.image", cause, "name an image with nearlinear, or remove the key")
    if not job.name:
        yield Problem("job.name", "is empty", "give the job a name")


def render_script(
    job: JobSpec,
    config: str,
    settings: Sequence[str] = (),
    output_folders: Sequence[str] = (),
    sources: Sequence[str] = (),
) -> str:
    """Return the batch script that trains ``config``.

    Args:
        job: Job to run.
        config: Config file on a file system that all nodes see.
        settings: Overrides "a.b=value" of the training config.
        output_folders: Folders that the training writes; absolute ones are mounted in a container.
        sources: Data sources of the config, which replace the input ``train``.
    """
    lines = ["#!/bin/bash", *(f"#SBATCH --{option}" for option in _sbatch_options(job))]
    lines += ["set -euo pipefail", *_export_lines(job)]
    if job.source:
        lines.append(f"cd {shlex.quote(job.source)}")
    tokens = None if sources else job.inputs.get("train")
    settings = [*([f"data.path={tokens.folder}"] if tokens else []), *settings]
    srun = _srun_command(job, config, [*output_folders, *sources])
    lines.append(f"{srun} \\\n  {_train_command(config, settings)}")
    return "\n".join(lines) + "\n"


def _sbatch_options(job: JobSpec) -> list[str]:
    minutes = max(1, round(job.max_hours * 60))
    options = [
        f"job-name={job.name}",
        f"nodes={job.nodes}",
        f"ntasks-per-node={job.local_world_size}",
        # The whole machine: otherwise each task is bound to a single core.
        "exclusive",
        "mem=0",
        f"time={minutes // 60:02d}:{minutes % 60:02d}:00",
        f"output={job.name}-%j.log",
        f"signal=TERM@{TERMINATION_NOTICE}",
    ]
    if job.num_accelerators:
        options.append(f"gpus-per-node={job.local_world_size}")
    options += [f"{name}={getattr(job, name)}" for name in ("partition", "account")
                if getattr(job, name)]  # fmt: skip
    # A requeued job appends to the log of its first start.
    return [*options, "requeue", "open-mode=append"] if job.retries else [*options, "no-requeue"]


def _export_lines(job: JobSpec) -> list[str]:
    """Export the environment, and check that ``--export-file`` has brought the secrets."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in job.environment.items()]
    missing = "is not set: submit with nearlinear launch, or with sbatch --export-file"
    return exports + [f': "${{{name}:?{missing}}}"' for name in job.secrets]


def _srun_command(job: JobSpec, config: str, folders: Sequence[str]) -> str:
    command = "srun --kill-on-bad-exit=1"
    if not job.image:
        return command
    # Options of Pyxis. A container sees only the folders of the node that are mounted here.
    inputs = (given.folder for given in job.inputs.values())
    absolute = (folder for folder in folders if folder.startswith("/"))
    config_folder = str(PurePosixPath(config).parent)
    mounted = dict.fromkeys([config_folder, *inputs, *absolute])
    mounts = shlex.quote(",".join(f"{folder}:{folder}" for folder in mounted))
    image = shlex.quote(f"--container-image={job.image}")
    return f'{command} {image} --container-mounts={mounts},"$PWD:$PWD" --container-workdir="$PWD"'


def _train_command(config: str, settings: Sequence[str]) -> str:
    changes = [part for setting in settings for part in ("--set", setting)]
    return shlex.join(["python", "-m", "nearlinear.cli", "train", config, *changes])


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return RANK, WORLD_SIZE etc. for this task of an srun step, or {} outside of a step.

    The rendezvous is on the first host of the step, at a port derived from the job ID.
    ``MASTER_ADDR`` and ``MASTER_PORT`` take precedence if they are set.

    Raises:
        ConfigError: Nodes have different numbers of tasks, which no parallel layout supports.
    """
    needed = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_ID")
    if any(name not in environment for name in needed) or int(environment["SLURM_NTASKS"]) < 2:
        return {}
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    nodes = int(environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES", 1))
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    if "," in tasks or int(environment["SLURM_NTASKS"]) % nodes:
        raise ConfigError(
            f"Slurm started {environment['SLURM_NTASKS']} tasks on {nodes} nodes unevenly "
            f"(SLURM_STEP_TASKS_PER_NODE = {tasks!r}). Start the same number on each node, as in "
            "srun --ntasks-per-node 8"
        )
    address = "127.0.0.1" if nodes == 1 else first_host(hosts)
    port = str(20000 + int(environment.get("SLURM_JOB_ID", 0)) % 20000)
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_NTASKS"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(int(environment["SLURM_NTASKS"]) // nodes),
        "MASTER_ADDR": environment.get("MASTER_ADDR", address),
        "MASTER_PORT": environment.get("MASTER_PORT", port),
    }


def first_host(nodelist: str) -> str:
    """Return the first host of a compressed Slurm list: ``gpu[07-12,20],cpu1`` gives ``gpu07``."""
    first = re.match(r"(\[[^\]]*\]|[^,\[])*", nodelist)
    assert first is not None  # the pattern matches the empty string
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])
