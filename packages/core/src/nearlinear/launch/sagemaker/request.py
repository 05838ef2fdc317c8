"""A job in SageMaker's words: the CreateTrainingJob request.

Laid out as the SageMaker SDK 3 lays it out (channels ``code`` and ``sm_drivers``, hyperparameters
as JSON, a shell that starts the driver), so that the container finds what it finds there.
"""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime

from ...train.config import TrainConfig
from ...train.report import METRIC_PATTERNS
from ..faults import Fault
from ..spec import Input, JobSpec

CODE, DRIVERS = "code", "sm_drivers"
RANKS = "NEARLINEAR_RANKS_PER_NODE"  # for `container`
ROOT = "/opt/ml/input/data"
START = f"{ROOT}/{DRIVERS}/sm_train.sh"
COMMAND = f"chmod +x {START} && {START}"
SYSTEMS = {"fsx": "FSxLustre", "efs": "EFS"}
HOUR = 3600
NEEDED = {
    "image": "123456789012.dkr.ecr.us-west-2.amazonaws.com/nearlinear:2.13",
    "role": "arn:aws:iam::123456789012:role/nearlinear",
    "output": "s3://my-bucket/output",
}
"""Keys of a job without which there is no request, and what they look like."""


def missing(job: JobSpec) -> list[Fault]:
    """What ``job`` must say before there can be a request."""
    return [
        Fault(f"job.{name}", "is missing", f'write it, as in {name} = "{example}"')
        for name, example in NEEDED.items()
        if not getattr(job, name)
    ]


def request(job: JobSpec, config: TrainConfig, name: str, folder: str) -> dict:
    """The request for a job called ``name`` whose code lies under ``folder`` (s3://...)."""
    brought = [CODE, DRIVERS] if job.source else [DRIVERS]
    found = {
        "TrainingJobName": name,
        "HyperParameters": hyperparameters(checkpointed(job, config)),
        "AlgorithmSpecification": {
            "TrainingImage": job.image,
            "TrainingInputMode": "File",
            "MetricDefinitions": metric_definitions(),
            "ContainerEntrypoint": ["/bin/bash"],
            "ContainerArguments": ["-c", COMMAND],
        },
        "RoleArn": job.role,
        "InputDataConfig": [
            *(channel(name, given) for name, given in job.inputs.items()),
            *(channel(name, Input(s3=f"{folder}/input/{name}", mode="File")) for name in brought),
        ],
        "OutputDataConfig": {"S3OutputPath": job.output, "CompressionType": "GZIP"},
        "ResourceConfig": {
            "InstanceType": job.instance_type,
            "InstanceCount": job.nodes,
            "VolumeSizeInGB": job.volume_gb,
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": round(job.max_hours * HOUR)},
    }
    return found | _optional(job, found)


def checkpointed(job: JobSpec, config: TrainConfig) -> TrainConfig:
    """``config`` with checkpoints where the service copies them from and to."""
    if not job.checkpoints:
        return config
    place = dataclasses.replace(config.checkpoint, folder=job.checkpoint_path)
    return dataclasses.replace(config, checkpoint=place)


def _optional(job: JobSpec, found: dict) -> dict:
    """What only some jobs have."""
    more: dict = {}
    if job.subnets or job.security_groups:
        more["VpcConfig"] = {"Subnets": job.subnets, "SecurityGroupIds": job.security_groups}
    if job.checkpoints:
        more["CheckpointConfig"] = {"S3Uri": job.checkpoints, "LocalPath": job.checkpoint_path}
    if variables := environment(job):
        more["Environment"] = variables
    if job.tags:
        more["Tags"] = [{"Key": key, "Value": value} for key, value in job.tags.items()]
    if job.retries:
        more["RetryStrategy"] = {"MaximumRetryAttempts": job.retries}
    if job.keep_warm_minutes:
        warm = {"KeepAlivePeriodInSeconds": job.keep_warm_minutes * 60}
        more["ResourceConfig"] = found["ResourceConfig"] | warm
    if job.spot:
        wait = {"MaxWaitTimeInSeconds": longest_wait(job)}
        more["EnableManagedSpotTraining"] = True
        more["StoppingCondition"] = found["StoppingCondition"] | wait
    return more


def environment(job: JobSpec) -> dict[str, str]:
    """Variables of every container."""
    asked = job.ranks_per_node or job.accelerators  # else as many as the machine is known to have
    return ({RANKS: str(asked)} if asked else {}) | job.environment


def longest_wait(job: JobSpec) -> int:
    """Seconds for spot capacity and run together."""
    return round((job.max_wait_hours or 2 * job.max_hours) * HOUR)


def channel(name: str, given: Input) -> dict:
    """One input; a folder of this machine has none, and is refused by `rules`."""
    if given.source in SYSTEMS:
        source = {
            "FileSystemDataSource": {
                "FileSystemId": getattr(given, given.source),
                "FileSystemAccessMode": "rw" if given.writable else "ro",
                "FileSystemType": SYSTEMS[given.source],
                "DirectoryPath": given.directory,
            }
        }
        return {"ChannelName": name, "DataSource": source}
    source = {
        "S3DataSource": {
            "S3DataType": "S3Prefix",
            "S3Uri": given.s3,
            "S3DataDistributionType": "ShardedByS3Key" if given.sharded else "FullyReplicated",
        }
    }
    return {"ChannelName": name, "DataSource": source, "InputMode": given.mode}


def hyperparameters(config: TrainConfig) -> dict[str, str]:
    """What ``config`` changes of the defaults, as flat keys with values in JSON.

    ``optimizer.lr`` is called ``optimizer-lr``: the SDK's driver makes shell variables of names,
    and a dot ends it. The table ``[parallel]`` travels whole as ``mp_parameters``, as SMP's always
    has: the container finds it in ``SM_HP_MP_PARAMETERS``.
    """
    flat: dict[str, str] = {}
    for table, changes in _changes(config).items():
        if table == "parallel":
            flat["mp_parameters"] = json.dumps(changes)
        else:
            flat |= {f"{table}-{key}": text(value) for key, value in changes.items()}
    return flat


def text(value) -> str:
    """``value`` as the SDK writes it: JSON, but texts as they are, unless they look like JSON."""
    return value if isinstance(value, str) and plain(value) == value else json.dumps(value)


def plain(value: str):
    """What `text` wrote: JSON where it is some, else the text itself."""
    try:
        return json.loads(value)
    except ValueError:
        return value


def _changes(config: TrainConfig) -> dict[str, dict]:
    """Per table the keys that are not as they are by default."""
    asked, usual = dataclasses.asdict(config), dataclasses.asdict(TrainConfig())
    found = {
        table: {key: value for key, value in keys.items() if value != usual[table][key]}
        for table, keys in asked.items()
    }
    return {table: changes for table, changes in found.items() if changes}


def metric_definitions() -> list[dict]:
    """How CloudWatch reads the lines of `train.report`."""
    return [{"Name": name, "Regex": regex} for name, regex in METRIC_PATTERNS.items()]


def job_name(base: str, now: datetime | None = None) -> str:
    """``base`` with the time behind it: names are used once."""
    now = now or datetime.now(UTC)
    return f"{base}-{now:%Y%m%d%H%M%S}"
