"""Send a job to SageMaker: its code and driver to S3, then the request."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from ...errors import ConfigError
from ..spec import JobSpec
from . import drivers
from .aws import bucket_and_key, client, told
from .request import CODE, DRIVERS

LEFT_OUT = {"__pycache__", ".git", ".venv", ".ipynb_checkpoints", "node_modules"}
MOST = 200 * 2**20  # bytes of code: more is data


def run(job: JobSpec, request: dict) -> int:
    """Submit; prints where to look. Raises ConfigError and ServiceRefused."""
    files = list(code_files(Path(job.source))) if job.source else []
    places = {
        channel["ChannelName"]: channel["DataSource"]["S3DataSource"]["S3Uri"]
        for channel in request["InputDataConfig"]
        if channel["ChannelName"] in (CODE, DRIVERS)
    }
    s3, sagemaker = client("s3", job.region), client("sagemaker", job.region)
    for path in files:
        _upload(s3, path, f"{places[CODE]}/{path.relative_to(job.source).as_posix()}")
    with tempfile.TemporaryDirectory() as folder:
        drivers.write(Path(folder))
        _upload(s3, Path(folder) / drivers.SCRIPT, f"{places[DRIVERS]}/{drivers.SCRIPT}")
    name = request["TrainingJobName"]
    with told(f"creating {name}"):
        sagemaker.create_training_job(**request)
    print(f"submitted: {name}")
    print(f"follow it: nearlinear logs {name} --follow")
    print(f"watch it: nearlinear logs {name} --follow | nearlinear watch -")
    return 0


def code_files(source: Path) -> Iterator[Path]:
    """What goes along of a folder of code. Raises ConfigError."""
    if not source.is_dir():
        raise ConfigError(f"job.source = {str(source)!r}: no such folder")
    size = 0
    for path in sorted(source.rglob("*")):
        parts = set(path.relative_to(source).parts)
        if not path.is_file() or parts & LEFT_OUT:
            continue
        size += path.stat().st_size
        if size > MOST:
            raise ConfigError(
                f"job.source = {str(source)!r} holds more than {MOST / 2**20:.0f} MiB: move data "
                "out of it, to where job.inputs finds it"
            )
        yield path


def _upload(s3, path: Path, uri: str) -> None:
    bucket, key = bucket_and_key(uri)
    with told(f"uploading {path.name} to {uri}"), path.open("rb") as file:
        s3.put_object(Bucket=bucket, Key=key, Body=file)
