"""One description of a job, for wherever it runs: table ``[job]`` of a training config.

What is trained stays in the other tables of the file; here is on which machines, from which data,
to which outputs. `sagemaker`, `slurm`, `kubernetes` and `local` write it in their own words.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal

from .. import schema
from ..errors import ConfigError
from ..train import config as train_config
from ..train.config import TrainConfig
from . import instances

PLACES = Literal["local", "emulate", "sagemaker", "slurm", "kubernetes"]


@dataclass(frozen=True)
class Input:
    """A folder of data that the job reads, from exactly one source."""

    path: str = ""
    """folder that every node sees under this name: local disk, a mounted file system"""
    s3: str = ""
    """s3://bucket/prefix"""
    fsx: str = ""
    """id of an FSx for Lustre file system, as in fs-0123456789abcdef0"""
    efs: str = ""
    """id of an EFS file system"""
    claim: str = ""
    """name of a PersistentVolumeClaim of Kubernetes"""
    directory: str = ""
    """folder on the file system; on FSx it begins with the mount name, as in /abcdefgh/tokens"""
    mode: Literal["File", "FastFile", "Pipe"] = "FastFile"
    """of S3: copied before the job starts, read when asked for, or a stream"""
    sharded: bool = False
    """of S3: every node gets a part of the objects, not all of them"""
    writable: bool = False
    """of a file system: the job may write there"""

    def __post_init__(self):
        given = [name for name in SOURCES if getattr(self, name)]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ConfigError(f"an input has one of {', '.join(SOURCES)}; this one has {found}")
        if (self.fsx or self.efs) and not self.directory.startswith("/"):
            example = "/abcdefgh/tokens (mount name first)" if self.fsx else "/tokens"
            raise ConfigError(
                f"directory = {self.directory!r}: folders on {self.fsx or self.efs} begin with /, "
                f"as in {example}"
            )

    @property
    def source(self) -> str:
        """Which of `SOURCES` it is."""
        return next(name for name in SOURCES if getattr(self, name))

    @property
    def folder(self) -> str:
        """Where the data of a `path` lies: its ``directory`` is below it."""
        return str(PurePosixPath(self.path, self.directory.lstrip("/")))


SOURCES = ("path", "s3", "fsx", "efs", "claim")


@dataclass(frozen=True)
class JobSpec:
    """Where and on what a training config runs."""

    name: str = "nearlinear"
    """what jobs are called; SageMaker's and Kubernetes' get a time behind it"""
    place: PLACES = "local"
    """local, emulate (SageMaker's container on this machine), sagemaker, slurm, kubernetes"""
    image: str = ""
    """container image with nearlinear in it"""
    instance_type: str = "ml.p4d.24xlarge"
    """machine, in SageMaker's words; one of your own may have any name"""
    accelerators: int = 0
    """GPUs of each machine; 0 = as many as instance_type is known to have"""
    nodes: int = 1
    """machines"""
    ranks_per_node: int = 0
    """processes on each machine; 0 = one per accelerator"""
    source: str = ""
    """folder of code to take along; its requirements.txt is installed there"""
    inputs: dict[str, Input] = field(default_factory=dict)
    """data by channel; the channel named train holds the token shards, unless data.sources does"""
    output: str = ""
    """s3://bucket/prefix for what the run leaves"""
    checkpoints: str = ""
    """s3://bucket/prefix that checkpoints are copied to while the job runs, and from before"""
    checkpoint_path: str = "/opt/ml/checkpoints"
    """with checkpoints: the folder on the machine, which is checkpoint.folder there"""
    checkpoint_claim: str = ""
    """PersistentVolumeClaim of Kubernetes that checkpoint_path lies on, for all pods to write"""
    environment: dict[str, str] = field(default_factory=dict)
    """variables for every rank"""
    role: str = ""
    """ARN of the role that the job runs as"""
    region: str = ""
    """AWS region; empty: of the environment"""
    subnets: list[str] = field(default_factory=list)
    """of the VPC; FSx and EFS need them"""
    security_groups: list[str] = field(default_factory=list)
    """of the VPC"""
    volume_gb: int = 100
    """disk of each machine"""
    max_hours: float = 24.0
    """the job is stopped after that"""
    spot: bool = False
    """spare capacity at a lower price, which may be taken away"""
    max_wait_hours: float = 0.0
    """with spot: for capacity and run together; 0 = twice max_hours"""
    keep_warm_minutes: int = 0
    """machines wait so long for another job"""
    retries: int = 0
    """starts after an internal error of the service"""
    tags: dict[str, str] = field(default_factory=dict)
    """names and values to find costs by"""
    partition: str = ""
    """of Slurm"""
    account: str = ""
    """of Slurm"""
    namespace: str = "default"
    """of Kubernetes"""

    def __post_init__(self):
        for name, least in (("nodes", 1), ("volume_gb", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"job.{name} = {getattr(self, name)}: must be at least {least}")
        for name in _COUNTS:
            if getattr(self, name) < 0:
                raise ConfigError(f"job.{name} = {getattr(self, name)}: must be 0 or more")
        if not self.max_hours > 0:
            raise ConfigError(f"job.max_hours = {self.max_hours}: must be more than 0")

    @property
    def accelerators_here(self) -> int:
        """GPUs of each machine; 0: none, or nobody has said."""
        machine = instances.known(self.instance_type)
        return self.accelerators or (machine.accelerators if machine else 0)

    @property
    def ranks_here(self) -> int:
        """Ranks of each machine."""
        return self.ranks_per_node or self.accelerators_here or 1

    @property
    def world(self) -> int:
        """All ranks of the job."""
        return self.nodes * self.ranks_here


_COUNTS = ("accelerators", "ranks_per_node", "max_wait_hours", "keep_warm_minutes", "retries")


def of_job(setting: str) -> bool:
    """Whether "a.b=value" changes the job, not the training."""
    return setting.strip().startswith("job.")


def load(source, settings=()) -> tuple[JobSpec, TrainConfig]:
    """The job and the training of a config file (or plain data). Raises ConfigError.

    ``settings`` ("a.b=value") may change either, as in ``job.nodes=2``.
    """
    data = dict(source) if isinstance(source, dict) else schema.read(source) if source else {}
    changes: dict = {}
    for setting in settings:
        schema.assign(changes, setting)
    job = train_config.merged({"job": data.get("job", {})}, {"job": changes.get("job", {})})["job"]
    rest = [setting for setting in settings if not of_job(setting)]
    return schema.build(JobSpec, job, "job"), train_config.load(data, rest)


def tokens(job: JobSpec, config: TrainConfig) -> Input | None:
    """The input that is ``data.path``: train, unless the config names sources of its own."""
    return None if config.data.sources else job.inputs.get("train")
