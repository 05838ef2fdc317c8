"""Convert a job to a ModelTrainer of the SageMaker SDK 3, for pipelines built with the SDK.

``python -m ci.sagemaker_sdk`` compares the request that the SDK then sends with the one of
`build_request`, field by field. The SDK uses its own driver script, which starts `container` at the
end.

Unlike `jobs.submit_job`, the SDK makes additional AWS calls (SDK 1.27; 1.14 makes no IAM calls).
The constructor calls iam:GetRole and iam:SimulatePrincipalPolicy for the role, which the caller
must be allowed to do. ``train`` calls s3:ListBuckets, the simulation again, s3:PutObject for each
of about twenty driver files (even with ``dry_run=True``), and sagemaker:DescribeTrainingJob. The
SDK reports its use to AWS unless its config file sets TelemetryOptOut.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...config.train import TrainConfig
from ...errors import ConfigError
from ..spec import JobInput, JobSpec
from . import aws, build_request
from .container import decode_hyperparameter
from .images import is_auto
from .jobs import IGNORED_NAMES

COMMAND = "python -m nearlinear.launch.sagemaker.container"
REQUIREMENTS = "requirements.txt"


def model_trainer(job: JobSpec, config: TrainConfig, session: Any = None) -> Any:
    """Return a ModelTrainer whose ``train()`` submits ``job``.

    Args:
        job: Job to submit.
        config: Training config.
        session: Session of the SDK; default: one that uploads code below ``job.output``.

    Raises:
        ConfigError: The SDK, the region or the credentials are missing.
        InvalidJob: The job has problems.
    """
    try:
        from sagemaker.core.training import (  # pyright: ignore[reportMissingImports] # extra
            configs as sdk,
        )
        from sagemaker.train import ModelTrainer  # pyright: ignore[reportMissingImports] # extra
    except ImportError as error:
        raise ConfigError(
            f"ModelTrainer needs the SageMaker SDK 3 ({error}): pip install "
            '"nearlinear[sagemaker-sdk]" in an environment without version 2 of the SDK'
        ) from None
    if is_auto(job.image) and not (Path(job.source or "-") / REQUIREMENTS).is_file():
        raise ConfigError(
            f"job.image = {job.image!r}: the SDK does not ship nearlinear to AWS's image; name it "
            f"in {REQUIREMENTS} of job.source, or name an image that contains it"
        )
    request = build_request.build_request(job, config)  # validates the job
    trainer = ModelTrainer(
        sagemaker_session=session or _create_session(job),
        training_image=request["AlgorithmSpecification"]["TrainingImage"],
        role=job.role,
        base_job_name=job.name,
        source_code=_source_code(sdk, job),
        hyperparameters=hyperparameters(build_request.with_checkpoint_path(job, config)),
        environment=build_request.environment_variables(job),
        input_data_config=[_channel(sdk, name, given) for name, given in job.inputs.items()],
        output_data_config=sdk.OutputDataConfig(s3_output_path=job.output),
        compute=_compute(sdk, job),
        stopping_condition=_stopping_condition(sdk, job),
        **_optional_arguments(sdk, job),
    )
    metrics = build_request.metric_definitions()
    trainer.with_metric_definitions(
        [sdk.MetricDefinition(name=each["Name"], regex=each["Regex"]) for each in metrics]
    )
    if job.retries:
        trainer.with_retry_strategy(sdk.RetryStrategy(maximum_retry_attempts=job.retries))
    return trainer


def hyperparameters(config: TrainConfig) -> dict[str, Any]:
    """Return the hyperparameters as values, which the SDK encodes as JSON.

    Strings stay encoded as in `build_request`: the SDK does not encode them, so that a string that
    looks like a number would be decoded as a number.
    """
    encoded = build_request.hyperparameters(config)
    values = {name: decode_hyperparameter(text) for name, text in encoded.items()}
    return {name: encoded[name] if isinstance(v, str) else v for name, v in values.items()}


def _create_session(job: JobSpec) -> Any:
    from sagemaker.core.helper.session_helper import (  # pyright: ignore[reportMissingImports] # extra
        Session,
    )

    bucket, prefix = aws.bucket_and_key(job.output)
    return Session(
        boto_session=aws.create_session(job.region),
        default_bucket=bucket,
        default_bucket_prefix=prefix.rstrip("/") or None,
    )


def _source_code(sdk: Any, job: JobSpec) -> Any:
    has_requirements = job.source and (Path(job.source) / REQUIREMENTS).is_file()
    return sdk.SourceCode(
        source_dir=job.source or None,
        requirements=REQUIREMENTS if has_requirements else None,
        command=COMMAND,
        ignore_patterns=sorted(IGNORED_NAMES),
    )


def _channel(sdk: Any, name: str, given: JobInput) -> Any:
    """Return a full Channel, because the SDK's shorter InputData has no input mode."""
    if given.source in build_request.FILE_SYSTEM_TYPES:
        system = sdk.FileSystemDataSource(
            file_system_id=getattr(given, given.source),
            file_system_access_mode="rw" if given.writable else "ro",
            file_system_type=build_request.FILE_SYSTEM_TYPES[given.source],
            directory_path=given.directory,
        )
        source = sdk.DataSource(file_system_data_source=system)
        return sdk.Channel(channel_name=name, data_source=source)
    objects = sdk.S3DataSource(
        s3_data_type="S3Prefix",
        s3_uri=given.s3,
        s3_data_distribution_type="ShardedByS3Key" if given.sharded else "FullyReplicated",
    )
    source = sdk.DataSource(s3_data_source=objects)
    return sdk.Channel(channel_name=name, data_source=source, input_mode=given.mode)


def _compute(sdk: Any, job: JobSpec) -> Any:
    given: dict[str, Any] = {
        "instance_type": job.instance_type,
        "instance_count": job.nodes,
        "volume_size_in_gb": job.volume_gb,
    }
    if job.keep_warm_minutes:
        given["keep_alive_period_in_seconds"] = job.keep_warm_minutes * 60
    if job.spot:
        given["enable_managed_spot_training"] = True
    return sdk.Compute(**given)


def _stopping_condition(sdk: Any, job: JobSpec) -> Any:
    given = {"max_runtime_in_seconds": round(job.max_hours * 3600)}
    if job.spot:
        given["max_wait_time_in_seconds"] = build_request.max_wait_seconds(job)
    return sdk.StoppingCondition(**given)


def _optional_arguments(sdk: Any, job: JobSpec) -> dict[str, Any]:
    more: dict[str, Any] = {}
    if job.subnets or job.security_groups:
        more["networking"] = sdk.Networking(
            subnets=job.subnets, security_group_ids=job.security_groups
        )
    if job.checkpoints:
        more["checkpoint_config"] = sdk.CheckpointConfig(
            s3_uri=job.checkpoints, local_path=job.checkpoint_path
        )
    if job.tags:
        more["tags"] = [sdk.Tag(key=key, value=value) for key, value in job.tags.items()]
    return more
