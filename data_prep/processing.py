"""Run a preparation as a SageMaker Processing job.

One instance uses all its cores: text is copied from S3 to its disk, and the dataset is uploaded
when the job ends. Start the job with
`boto3.client("sagemaker").create_processing_job(**request(...))`.
"""

from collections.abc import Sequence
from typing import Any

from nearlinear.errors import ConfigError

INPUT = "/opt/ml/processing/input/text"
OUTPUT = "/opt/ml/processing/output"


def request(
    name: str,
    *,
    image: str,
    role: str,
    text: str,
    output: str,
    arguments: Sequence[str] = (),
    source: str = "jsonl",
    instance_type: str = "ml.c7i.24xlarge",
    volume_gb: int = 200,
    max_hours: float = 12,
) -> dict[str, Any]:
    """Build a CreateProcessingJob request that runs `python -m data_prep prepare SOURCE`.

    Args:
        name: Name of the job and of the dataset.
        image: Container image in which this repository is installed.
        role: ARN of the job's role.
        text: S3 prefix of the text.
        output: S3 prefix for the dataset.
        arguments: More arguments of `prepare`, such as `--dedup exact`.
        source: jsonl, parquet or text.
        instance_type: SageMaker instance type.
        volume_gb: Disk size in GB.
        max_hours: Time limit in hours.

    Raises:
        ConfigError: `text` or `output` is not an S3 prefix, or `source` does not read files.
    """
    for key, value in (("text", text), ("output", output)):
        if not value.startswith("s3://"):
            raise ConfigError(f"{key} is {value!r}: give an S3 prefix, s3://bucket/prefix")
    if source not in ("jsonl", "parquet", "text"):
        raise ConfigError(f"source is {source!r}: give jsonl, parquet or text")
    return {
        "ProcessingJobName": name,
        "RoleArn": role,
        "AppSpecification": {
            "ImageUri": image,
            "ContainerEntrypoint": ["python", "-m", "data_prep"],
            "ContainerArguments": ["prepare", source, INPUT, "--out", f"{OUTPUT}/{name}", "--json",
                                   *arguments],
        },
        "ProcessingInputs": [
            {
                "InputName": "text",
                "S3Input": {
                    "S3Uri": text,
                    "LocalPath": INPUT,
                    "S3DataType": "S3Prefix",
                    "S3InputMode": "File",
                    "S3DataDistributionType": "FullyReplicated",
                },
            }
        ],
        "ProcessingOutputConfig": {
            "Outputs": [
                {
                    "OutputName": "tokens",
                    "S3Output": {
                        "S3Uri": output,
                        "LocalPath": OUTPUT,
                        "S3UploadMode": "EndOfJob",
                    },
                }
            ]
        },
        "ProcessingResources": {
            "ClusterConfig": {
                "InstanceCount": 1,
                "InstanceType": instance_type,
                "VolumeSizeInGB": volume_gb,
            }
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": round(max_hours * 3600)},
    }  # fmt: skip
