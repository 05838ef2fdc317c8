"""Job specification: table ``[job]`` of a training config, and checks shared by the backends.

The other tables of the file configure the training itself. ``[job]`` names the machines, the input
data and the outputs. `sagemaker`, `slurm`, `kubernetes` and `local` translate it for one backend.
Slurm nodes and Kubernetes pods run software that is installed on them already: nothing is fetched
from S3 or copied to it. Launchers there pass each rank its number in environment variables, which a
job must therefore not set for all ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from ..config import schema
from ..config import train as train_config
from ..config.parallel import ParallelConfig
from ..config.train import TrainConfig
from ..errors import ConfigError
from ..hardware import find_instance_type

Backend = Literal["local", "emulate", "sagemaker", "slurm", "kubernetes"]

TERMINATION_NOTICE = 120
"""Seconds between SIGTERM and SIGKILL: fixed by SageMaker, requested from Slurm and Kubernetes."""


@dataclass(frozen=True)
class JobInput:
    """Input folder of a job, from exactly one source."""

    path: str = ""
    """folder that every node sees under this name: local disk or a mounted file system"""
    s3: str = ""
    """s3://bucket/prefix"""
    fsx: str = ""
    """ID of an FSx for Lustre file system, as in fs-0123456789abcdef0"""
    efs: str = ""
    """ID of an EFS file system"""
    claim: str = ""
    """name of a Kubernetes PersistentVolumeClaim"""
    directory: str = ""
    """folder on the file system; on FSx it begins with the mount name, as in /abcdefgh/tokens"""
    mode: Literal["File", "FastFile", "Pipe"] = "FastFile"
    """S3 only: copy before the job starts, read on demand, or stream"""
    sharded: bool = False
    """S3 only: distribute the objects over the nodes instead of replicating them"""
    writable: bool = False
    """file systems only: mount with write access"""

    def __post_init__(self) -> None:
        given = [name for name in SOURCES if getattr(self, name)]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ConfigError(
                f"an input needs exactly one of {', '.join(SOURCES)}; this one has {found}"
            )
        if (self.fsx or self.efs) and not self.directory.startswith("/"):
            example = "/abcdefgh/tokens (mount name first)" if self.fsx else "/tokens"
            raise ConfigError(
                f"directory = {self.directory!r}: a folder on {self.fsx or self.efs} must begin "
                f"with /, as in {example}"
            )

    @property
    def source(self) -> str:
        """Key of `SOURCES` that is set."""
        return next(name for name in SOURCES if getattr(self, name))

    @property
    def folder(self) -> str:
        """Full path of the data for the source ``path``: ``path`` joined with ``directory``."""
        return str(PurePosixPath(self.path, self.directory.lstrip("/")))


SOURCES = ("path", "s3", "fsx", "efs", "claim")


@dataclass(frozen=True)
class JobSpec:
    """Backend, machines, data and outputs of a job."""

    name: str = "nearlinear"
    """name of the job; SageMaker and Kubernetes jobs get a timestamp appended"""
    place: Backend = "local"
    """local, emulate (SageMaker's container on this machine), sagemaker, slurm, kubernetes"""
    image: str = ""
    """container image with nearlinear in it; auto, or auto:2.9 for a torch version = AWS's image,
    to which the launcher ships nearlinear"""
    instance_type: str = "ml.p4d.24xlarge"
    """SageMaker instance type; your own machines may have any name"""
    accelerators: int = 0
    """GPUs per machine; 0 = the known number of instance_type"""
    nodes: int = 1
    """number of machines"""
    ranks_per_node: int = 0
    """processes per machine; 0 = one per accelerator"""
    source: str = ""
    """folder of code to upload; its requirements.txt is installed in the container"""
    inputs: dict[str, JobInput] = field(default_factory=dict)
    """data by channel; channel train holds the token shards, unless data.sources does"""
    output: str = ""
    """s3://bucket/prefix for the outputs of the run"""
    checkpoints: str = ""
    """s3://bucket/prefix that checkpoints are copied to during the job and restored from"""
    checkpoint_path: str = "/opt/ml/checkpoints"
    """with checkpoints: folder on the machine, used as checkpoint.folder there"""
    checkpoint_claim: str = ""
    """Kubernetes PersistentVolumeClaim that holds checkpoint_path, writable by all pods"""
    environment: dict[str, str] = field(default_factory=dict)
    """environment variables of every rank"""
    secrets: dict[str, str] = field(default_factory=dict)
    """secret environment variables of every rank, as references: name/key of a Kubernetes Secret,
    name#key of AWS Secrets Manager; env:NAME or file:PATH on Slurm and on this machine"""
    role: str = ""
    """ARN of the IAM role that the job runs as"""
    region: str = ""
    """AWS region; empty = the environment's region"""
    subnets: list[str] = field(default_factory=list)
    """VPC subnets; required for FSx and EFS"""
    security_groups: list[str] = field(default_factory=list)
    """VPC security groups"""
    volume_gb: int = 100
    """disk size of each machine"""
    max_hours: float = 24.0
    """time limit of the job"""
    spot: bool = False
    """spot capacity: cheaper, may be reclaimed"""
    max_wait_hours: float = 0.0
    """with spot: limit for waiting and running together; 0 = twice max_hours"""
    keep_warm_minutes: int = 0
    """time that machines are kept for another job"""
    retries: int = 0
    """restarts after an internal error of the service"""
    tags: dict[str, str] = field(default_factory=dict)
    """tags for cost allocation"""
    partition: str = ""
    """Slurm partition"""
    account: str = ""
    """Slurm account"""
    namespace: str = "default"
    """Kubernetes namespace"""

    def __post_init__(self) -> None:
        for name, least in (("nodes", 1), ("volume_gb", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"job.{name} = {getattr(self, name)}: must be at least {least}")
        for name in _NON_NEGATIVE:
            if getattr(self, name) < 0:
                raise ConfigError(f"job.{name} = {getattr(self, name)}: must be 0 or more")
        if not self.max_hours > 0:
            raise ConfigError(f"job.max_hours = {self.max_hours}: must be more than 0")

    @property
    def num_accelerators(self) -> int:
        """GPUs per machine; 0 if there are none or the number is unknown."""
        known = find_instance_type(self.instance_type)
        return self.accelerators or (known.gpus if known else 0)

    @property
    def local_world_size(self) -> int:
        """Ranks per machine."""
        return self.ranks_per_node or self.num_accelerators or 1

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return self.nodes * self.local_world_size


_NON_NEGATIVE = ("accelerators", "ranks_per_node", "max_wait_hours", "keep_warm_minutes", "retries")


def is_job_setting(setting: str) -> bool:
    """Return True if "a.b=value" changes the job, False if it changes the training config."""
    return setting.strip().startswith("job.")


def load(
    source: Mapping[str, Any] | str | Path, settings: Sequence[str] = ()
) -> tuple[JobSpec, TrainConfig]:
    """Load the job and the training config from a config file or from plain data.

    Args:
        source: A .toml or .json file, or the parsed data. An empty string means all defaults.
        settings: Overrides "a.b=value" of either, as in ``job.nodes=2``.

    Raises:
        ConfigError: A key is unknown or a value is invalid.
    """
    data = dict(source) if isinstance(source, Mapping) else schema.read(source) if source else {}
    changes: dict = {}
    for setting in settings:
        schema.assign(changes, setting)
    tables = {"job": data.get("job", {})}
    job = train_config.merge_tables(tables, {"job": changes.get("job", {})})["job"]
    training = [setting for setting in settings if not is_job_setting(setting)]
    return schema.build(JobSpec, job, "job"), train_config.load(data, training)


def token_input(job: JobSpec, config: TrainConfig) -> JobInput | None:
    """Return the input used as ``data.path``: train, unless the config names its own sources."""
    return None if config.data.sources else job.inputs.get("train")


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
    for name in job.environment:
        field = f"job.environment.{name}"
        if not _VARIABLE.fullmatch(name):
            cause = f"{name!r} is not a valid variable name"
            yield Problem(field, cause, "use letters, digits and _; begin with a letter or _")
        elif _PER_RANK_VARIABLE.fullmatch(name):
            yield Problem(field, "the launcher sets this variable for each rank", "remove it")


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
        parallel.widest.degrees(job.world_size)
    except ConfigError as error:
        yield Problem("parallel", f"{error}", f"the job has {job.nodes} x {ranks} ranks")
        return
    degree = parallel.widest.sharing or job.world_size
    if degree > ranks and degree % ranks:
        cause = (
            f"{degree} ranks do not fill whole nodes of {ranks} ranks, so sharding groups would "
            "share network cards unevenly"
        )
        remedy = f"use a multiple or a divisor of {ranks}"
        yield Problem("parallel.hybrid_shard_degree", cause, remedy)
