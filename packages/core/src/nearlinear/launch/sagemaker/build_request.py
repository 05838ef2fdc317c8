"""Build and validate the CreateTrainingJob request of a job.

The request has the layout of the SageMaker SDK 3 (channels ``code`` and ``sm_drivers``,
hyperparameters as JSON, a shell that starts the driver), so that the container finds the same files
for both.
"""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime
from typing import Any

from ...config.train import TrainConfig
from ...train.metrics import METRIC_PATTERNS
from ..secrets import SECRETS_VARIABLE, check_secrets
from ..spec import JobInput, JobSpec, check_parallel_layout, raise_if_invalid
from .container import (
    CODE_CHANNEL,
    DRIVER_CHANNEL,
    RANKS_VARIABLE,
    START_COMMAND,
    encode_hyperparameter,
)
from .images import resolve_image
from .job_checks import check_job, job_region
from .request_checks import check_against_model, check_rules

FILE_SYSTEM_TYPES = {"fsx": "FSxLustre", "efs": "EFS"}


def build_request(job: JobSpec, config: TrainConfig) -> dict[str, Any]:
    """Return a valid request with a unique job name. Needs no network.

    Raises:
        InvalidJob: The job has problems; the exception lists all of them.
    """
    raise_if_invalid([*check_job(job, config), *check_secrets(job, "sagemaker")])
    name = timestamped_name(job.name)
    request = render_request(job, config, name, f"{job.output.rstrip('/')}/{name}")
    raise_if_invalid(
        [
            *check_against_model(request),
            *check_rules(request),
            *check_parallel_layout(job, config.parallel),
        ]
    )
    return request


def render_request(job: JobSpec, config: TrainConfig, name: str, folder: str) -> dict[str, Any]:
    """Return the request without validating it.

    Args:
        job: Job to submit.
        config: Training config.
        name: Unique name of the training job.
        folder: S3 URI of the folder that holds the job's code.
    """
    uploaded = [CODE_CHANNEL, DRIVER_CHANNEL] if job.source else [DRIVER_CHANNEL]
    request = {
        "TrainingJobName": name,
        "HyperParameters": hyperparameters(with_checkpoint_path(job, config)),
        "AlgorithmSpecification": {
            "TrainingImage": resolve_image(job.image, job_region(job), job.instance_type),
            "TrainingInputMode": "File",
            "MetricDefinitions": metric_definitions(),
            "ContainerEntrypoint": ["/bin/bash"],
            "ContainerArguments": ["-c", START_COMMAND],
        },
        "RoleArn": job.role,
        "InputDataConfig": [
            *(_channel(name, given) for name, given in job.inputs.items()),
            *(
                _channel(name, JobInput(s3=f"{folder}/input/{name}", mode="File"))
                for name in uploaded
            ),
        ],
        "OutputDataConfig": {"S3OutputPath": job.output, "CompressionType": "GZIP"},
        "ResourceConfig": {
            "InstanceType": job.instance_type,
            "InstanceCount": job.nodes,
            "VolumeSizeInGB": job.volume_gb,
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": round(job.max_hours * 3600)},
    }
    return request | _optional_members(job, request)


def with_checkpoint_path(job: JobSpec, config: TrainConfig) -> TrainConfig:
    """Return ``config`` with its checkpoints in the folder that the service copies to S3."""
    if not job.checkpoints:
        return config
    checkpoint = dataclasses.replace(config.checkpoint, folder=job.checkpoint_path)
    return dataclasses.replace(config, checkpoint=checkpoint)


def _optional_members(job: JobSpec, request: dict) -> dict:
    members: dict = {}
    if job.subnets or job.security_groups:
        members["VpcConfig"] = {"Subnets": job.subnets, "SecurityGroupIds": job.security_groups}
    if job.checkpoints:
        members["CheckpointConfig"] = {"S3Uri": job.checkpoints, "LocalPath": job.checkpoint_path}
    if variables := environment_variables(job):
        members["Environment"] = variables
    if job.tags:
        members["Tags"] = [{"Key": key, "Value": value} for key, value in job.tags.items()]
    if job.retries:
        members["RetryStrategy"] = {"MaximumRetryAttempts": job.retries}
    if job.keep_warm_minutes:
        warm = {"KeepAlivePeriodInSeconds": job.keep_warm_minutes * 60}
        members["ResourceConfig"] = request["ResourceConfig"] | warm
    if job.spot:
        wait = {"MaxWaitTimeInSeconds": max_wait_seconds(job)}
        members["EnableManagedSpotTraining"] = True
        members["StoppingCondition"] = request["StoppingCondition"] | wait
    return members


def environment_variables(job: JobSpec) -> dict[str, str]:
    """Return the environment variables of every container."""
    ranks = job.ranks_per_node or job.accelerators  # without both, one rank per known GPU
    variables = {RANKS_VARIABLE: str(ranks)} if ranks else {}
    if job.secrets:  # names only: the container reads the values
        variables[SECRETS_VARIABLE] = json.dumps(job.secrets)
    return variables | job.environment


def max_wait_seconds(job: JobSpec) -> int:
    """Return the limit for waiting for spot capacity and running together."""
    return round((job.max_wait_hours or 2 * job.max_hours) * 3600)


def _channel(name: str, given: JobInput) -> dict:
    """Return one input channel. `check_against_model` rejects the result for a local folder."""
    if given.source in FILE_SYSTEM_TYPES:
        source = {
            "FileSystemDataSource": {
                "FileSystemId": getattr(given, given.source),
                "FileSystemAccessMode": "rw" if given.writable else "ro",
                "FileSystemType": FILE_SYSTEM_TYPES[given.source],
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
    """Return the non-default keys of ``config`` as flat hyperparameters with JSON values.

    ``optimizer.lr`` becomes ``optimizer-lr``: the SDK's driver turns names into shell variables,
    which cannot contain a dot. The table ``[parallel]`` is a single hyperparameter,
    ``mp_parameters``, as in SMP; the container passes it on in ``SM_HP_MP_PARAMETERS``.
    """
    flat: dict[str, str] = {}
    for table, changes in _non_default_keys(config).items():
        if table == "parallel":
            flat["mp_parameters"] = json.dumps(changes)
        else:
            values = changes.items()
            flat |= {f"{table}-{key}": encode_hyperparameter(value) for key, value in values}
    return flat


def _non_default_keys(config: TrainConfig) -> dict[str, dict]:
    """Return the changed keys of each table; tables without changes are omitted."""
    values, defaults = dataclasses.asdict(config), dataclasses.asdict(TrainConfig())
    changed = {
        table: {key: value for key, value in keys.items() if value != defaults[table][key]}
        for table, keys in values.items()
    }
    return {table: changes for table, changes in changed.items() if changes}


def metric_definitions() -> list[dict[str, str]]:
    """Return the patterns with which CloudWatch parses the metric lines of the trainer."""
    return [{"Name": name, "Regex": regex} for name, regex in METRIC_PATTERNS.items()]


def timestamped_name(base: str, now: datetime | None = None) -> str:
    """Return ``base`` with a timestamp: names of training jobs are unique."""
    now = now or datetime.now(UTC)
    return f"{base}-{now:%Y%m%d%H%M%S}"
