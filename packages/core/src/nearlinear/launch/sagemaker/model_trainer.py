"""The same job as a ModelTrainer of the SageMaker SDK 3, for pipelines made of those.

`request` says a job in the service's words, this in the SDK's; ``python -m ci.sagemaker`` holds
what the SDK then sends against the request, field by field. The SDK brings a driver script of its
own, which starts `container` in the end.

What the SDK 1.27 calls unasked (1.14 leaves IAM out): making the object, iam:GetRole and
iam:SimulatePrincipalPolicy for the role, which whoever launches must be allowed; in ``train``,
s3:ListBuckets, the simulation again, an s3:PutObject for each of about twenty driver files (even
with ``dry_run=True``), and sagemaker:DescribeTrainingJob. It reports its use to AWS unless its
config file says TelemetryOptOut. `submit` does none of that.
"""

from __future__ import annotations

from pathlib import Path

from ...errors import ConfigError
from ...train.config import TrainConfig
from ..spec import Input, JobSpec
from . import aws, request
from .faultless import faultless
from .submit import LEFT_OUT

COMMAND = "python -m nearlinear.launch.sagemaker.container"
REQUIREMENTS = "requirements.txt"


def model_trainer(job: JobSpec, config: TrainConfig, session=None):
    """A ModelTrainer whose ``train()`` submits ``job``.

    ``session``: a Session of the SDK; by default one that keeps code below ``job.output``. Raises
    ConfigError without the SDK, region or credentials, and FaultyJob.
    """
    try:
        from sagemaker.core.training import configs as sdk
        from sagemaker.train import ModelTrainer
    except ImportError as error:
        raise ConfigError(
            f"a ModelTrainer needs the SageMaker SDK 3 ({error}): pip install "
            '"nearlinear[sagemaker-sdk]", without its version 2 in the same environment'
        ) from None
    faultless(job, config)
    trainer = ModelTrainer(
        sagemaker_session=session or _session(job),
        training_image=job.image,
        role=job.role,
        base_job_name=job.name,
        source_code=_source(sdk, job),
        hyperparameters=hyperparameters(request.checkpointed(job, config)),
        environment=request.environment(job),
        input_data_config=[_channel(sdk, name, given) for name, given in job.inputs.items()],
        output_data_config=sdk.OutputDataConfig(s3_output_path=job.output),
        compute=_compute(sdk, job),
        stopping_condition=_stopping(sdk, job),
        **_optional(sdk, job),
    )
    metrics = request.metric_definitions()
    trainer.with_metric_definitions(
        [sdk.MetricDefinition(name=each["Name"], regex=each["Regex"]) for each in metrics]
    )
    if job.retries:
        trainer.with_retry_strategy(sdk.RetryStrategy(maximum_retry_attempts=job.retries))
    return trainer


def hyperparameters(config: TrainConfig) -> dict:
    """As values, which the SDK writes as JSON; texts as `request` writes them.

    The SDK writes texts as they are, so that one that looks like a number would come out as one.
    """
    written = request.hyperparameters(config)
    values = {name: request.plain(text) for name, text in written.items()}
    return {name: written[name] if isinstance(it, str) else it for name, it in values.items()}


def _session(job: JobSpec):
    from sagemaker.core.helper.session_helper import Session

    bucket, prefix = aws.bucket_and_key(job.output)
    return Session(
        boto_session=aws.session(job.region),
        default_bucket=bucket,
        default_bucket_prefix=prefix.rstrip("/") or None,
    )


def _source(sdk, job: JobSpec):
    wanted = job.source and (Path(job.source) / REQUIREMENTS).is_file()
    return sdk.SourceCode(
        source_dir=job.source or None,
        requirements=REQUIREMENTS if wanted else None,
        command=COMMAND,
        ignore_patterns=sorted(LEFT_OUT),
    )


def _channel(sdk, name: str, given: Input):
    """A whole channel: the SDK's shorter InputData knows no input mode."""
    if given.source in request.SYSTEMS:
        system = sdk.FileSystemDataSource(
            file_system_id=getattr(given, given.source),
            file_system_access_mode="rw" if given.writable else "ro",
            file_system_type=request.SYSTEMS[given.source],
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


def _compute(sdk, job: JobSpec):
    given = {
        "instance_type": job.instance_type,
        "instance_count": job.nodes,
        "volume_size_in_gb": job.volume_gb,
    }
    if job.keep_warm_minutes:
        given["keep_alive_period_in_seconds"] = job.keep_warm_minutes * 60
    if job.spot:
        given["enable_managed_spot_training"] = True
    return sdk.Compute(**given)


def _stopping(sdk, job: JobSpec):
    given = {"max_runtime_in_seconds": round(job.max_hours * request.HOUR)}
    if job.spot:
        given["max_wait_time_in_seconds"] = request.longest_wait(job)
    return sdk.StoppingCondition(**given)


def _optional(sdk, job: JobSpec) -> dict:
    """What only some jobs have."""
    more: dict = {}
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
