"""A preparation as a SageMaker Processing job: the CreateProcessingJob request.

One instance does it with all its cores: text comes from S3 to its disk, the dataset goes back when
the job ends. `boto3.client("sagemaker").create_processing_job(**request(...))` starts it.
"""

from collections.abc import Sequence

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
) -> dict:
    """The request for job `name`: `python -m data_prep prepare SOURCE` over `text` in a container.

    `text` and `output` are S3 prefixes; `arguments` go on after those of `prepare`, such as
    `--dedup exact`. The image has this repository installed. Raises `ConfigError` for a prefix
    that is none, or a source that is not of files.
    """
    for key, value in (("text", text), ("output", output)):
        if not value.startswith("s3://"):
            raise ConfigError(f"{key} is {value!r}: give a prefix in S3, as s3://bucket/prefix")
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
