"""Validation of jobs before submission: problem reports, and checks shared by the backends.

Slurm nodes and Kubernetes pods run software that is installed on them already: nothing is fetched
from S3 or copied to it. Launchers there pass each rank its number in environment variables, which a
job must therefore not set for all ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..config.parallel import ParallelConfig
from ..errors import ConfigError
from ..hardware import find_instance_type
from .spec import JobSpec

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PER_RANK_VARIABLE = re.compile(
    r"RANK|WORLD_SIZE|(LOCAL|GROUP|ROLE)_(RANK|WORLD_SIZE)|(PET|TORCHELASTIC|SLURM)_.*"
)


@dataclass(frozen=True)
class Problem:
    """One invalid field of a `JobSpec` or of a service request."""

    field: str
    """Path of the field, as in ResourceConfig.InstanceType."""
    cause: str
    """Reason why the value is invalid."""
    remedy: str
    """Allowed values, or the action that solves the problem."""

    def __str__(self) -> str:
        return f"{self.field}: {self.cause}; {self.remedy}"


class InvalidJob(ConfigError):
    """A job that the service would reject or that would fail. Carries all ``problems`` at once."""

    def __init__(self, problems: Iterable[Problem], subject: str = "the job"):
        self.problems = list(problems)
        count = f"{len(self.problems)} problems" if len(self.problems) > 1 else "a problem"
        lines = "".join(f"\n  {problem}" for problem in self.problems)
        super().__init__(f"{subject} has {count}; nothing was sent:{lines}")


def raise_if_invalid(problems: Iterable[Problem], subject: str = "the job") -> None:
    """Raise InvalidJob if there are any ``problems``."""
    if found := list(problems):
        raise InvalidJob(found, subject)


def check_environment(job: JobSpec) -> Iterator[Problem]:
    """Yield problems of the environment variables that a job sets."""
    for name, value in job.environment.items():
        field = f"job.environment.{name}"
        if not _VARIABLE.fullmatch(name):
            cause = f"{name!r} is not a valid variable name"
            yield Problem(field, cause, "use letters, digits and _; begin with a letter or _")
        elif _PER_RANK_VARIABLE.fullmatch(name):
            yield Problem(field, "the launcher sets this variable for each rank", "remove it")
        elif "\0" in value:
            cause = f"{value!r} contains a NUL character, which ends a value"
            yield Problem(field, cause, "remove the character")


def check_sagemaker_only_keys(job: JobSpec, backend: str, storage_remedy: str) -> Iterator[Problem]:
    """Yield a problem for each key that only SageMaker supports.

    Args:
        job: Job to check.
        backend: Name of the other backend, for messages.
        storage_remedy: Way to keep outputs on that backend, for messages.
    """
    for name in ("output", "checkpoints"):
        if value := getattr(job, name):
            cause = f"{value!r}: {backend} jobs do not copy files to S3"
            yield Problem(f"job.{name}", cause, f"remove the key; {storage_remedy}")
    for name in ("spot", "keep_warm_minutes"):
        if getattr(job, name):
            yield Problem(f"job.{name}", f"not supported on {backend}", "remove the key")


def check_parallel_layout(job: JobSpec, parallel: ParallelConfig) -> list[Problem]:
    """Return the mismatches between the machines of a job and the parallel layout."""
    unknown = not job.num_accelerators and not job.ranks_per_node
    return [*_check_ranks(job), *([] if unknown else _check_degrees(job, parallel))]


def _check_ranks(job: JobSpec) -> Iterator[Problem]:
    field, known = "job.ranks_per_node", find_instance_type(job.instance_type)
    if known and job.accelerators not in (0, known.gpus):
        cause = f"{job.accelerators}, but {job.instance_type} has {known.gpus} GPUs"
        remedy = "remove the key, or name the matching job.instance_type"
        yield Problem("job.accelerators", cause, remedy)
        return
    ranks, gpus = job.local_world_size, job.num_accelerators
    if not gpus:
        if not job.ranks_per_node:
            cause = f"the number of accelerators of {job.instance_type!r} is not known"
            yield Problem(field, cause, "set it, or set job.accelerators if it has GPUs")
        return
    if ranks < gpus:
        cause = (
            f"{ranks} of the {gpus} accelerators of {job.instance_type} would be used; the others, "
            "and the network cards next to them, would be idle"
        )
        yield Problem(field, cause, f"remove the key, or set it to {gpus}")
    if ranks > gpus:
        cause = f"{ranks} ranks for {gpus} accelerators of {job.instance_type}"
        yield Problem(field, cause, f"at most {gpus}")


def _check_degrees(job: JobSpec, parallel: ParallelConfig) -> Iterator[Problem]:
    ranks = job.local_world_size
    try:
        parallel.degrees(job.world_size)
    except ConfigError as error:
        yield Problem("parallel", f"{error}", f"the job has {job.nodes} x {ranks} ranks")
        return
    degree = parallel.hybrid_shard_degree or job.world_size
    if degree > ranks and degree % ranks:
        cause = (
            f"{degree} ranks do not fill whole nodes of {ranks} ranks, so sharding groups would "
            "share network cards unevenly"
        )
        remedy = f"use a multiple or a divisor of {ranks}"
        yield Problem("parallel.hybrid_shard_degree", cause, remedy)
