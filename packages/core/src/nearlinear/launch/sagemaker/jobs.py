"""Submit a training job to SageMaker, and follow it: status, logs and stop."""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ..spec import JobSpec
from ..wheel import write_wheel
from .aws import AWSError, bucket_and_key, create_client, translate_errors
from .container import CODE_CHANNEL, DRIVER_CHANNEL, OWN_CHANNELS, write_script
from .images import is_auto

IGNORED_NAMES = {"__pycache__", ".git", ".venv", ".ipynb_checkpoints", "node_modules"}
MAX_CODE_SIZE = 200 * 2**20  # bytes; larger folders contain data

LOG_GROUP = "/aws/sagemaker/TrainingJobs"  # shared by all training jobs
FINAL_STATES = ("Completed", "Failed", "Stopped")
POLL_INTERVAL = 5.0  # seconds
_FIRST_HOST = "algo-1"


def submit_job(job: JobSpec, request: dict[str, Any]) -> int:
    """Upload the code, the launcher script and a needed wheel to S3, and create the training job.

    Raises:
        ConfigError: The source folder is missing or too large, or AWS is not configured.
        AWSError: AWS rejected an upload or the request.
    """
    files = check_source(job)
    folders = {
        channel["ChannelName"]: channel["DataSource"]["S3DataSource"]["S3Uri"]
        for channel in request["InputDataConfig"]
        if channel["ChannelName"] in OWN_CHANNELS
    }
    s3, sagemaker = create_client("s3", job.region), create_client("sagemaker", job.region)
    for path in files:
        relative = path.relative_to(job.source).as_posix()
        _upload(s3, path, f"{folders[CODE_CHANNEL]}/{relative}")
    with tempfile.TemporaryDirectory() as folder:
        write_script(Path(folder))
        if is_auto(job.image):
            write_wheel(Path(folder))
        for path in sorted(Path(folder).iterdir()):
            _upload(s3, path, f"{folders[DRIVER_CHANNEL]}/{path.name}")
    name = request["TrainingJobName"]
    with translate_errors(f"creating {name}"):
        sagemaker.create_training_job(**request)
    print(f"submitted: {name}")
    print(f"follow it: nearlinear logs {name} --follow")
    print(f"watch it: nearlinear logs {name} --follow | nearlinear watch -")
    return 0


def check_source(job: JobSpec) -> list[Path]:
    """Return the files of the job's code. Raises ConfigError if they cannot be uploaded."""
    return list(list_code_files(Path(job.source))) if job.source else []


def list_code_files(source: Path) -> Iterator[Path]:
    """Yield the files of a code folder to upload. Raises ConfigError if they are too large."""
    if not source.is_dir():
        raise ConfigError(
            f"job.source = {str(source)!r}: no such folder; name a folder of this machine"
        )
    size = 0
    for path in sorted(source.rglob("*")):
        parts = set(path.relative_to(source).parts)
        if not path.is_file() or parts & IGNORED_NAMES:
            continue
        size += path.stat().st_size
        if size > MAX_CODE_SIZE:
            raise ConfigError(
                f"job.source = {str(source)!r} holds more than {MAX_CODE_SIZE / 2**20:.0f} MiB: "
                "move data out of it, and provide the data through job.inputs"
            )
        yield path


def _upload(s3: Any, path: Path, uri: str) -> None:
    bucket, key = bucket_and_key(uri)
    with translate_errors(f"uploading {path.name} to {uri}"), path.open("rb") as file:
        s3.put_object(Bucket=bucket, Key=key, Body=file)


def describe_job(name: str, region: str = "") -> dict[str, Any]:
    """Return the answer of DescribeTrainingJob. Raises ConfigError if there is no such job."""
    sagemaker = create_client("sagemaker", region)
    with _report_unknown_job(name), translate_errors(f"describing {name}"):
        return sagemaker.describe_training_job(TrainingJobName=name)


@contextlib.contextmanager
def _report_unknown_job(name: str) -> Iterator[None]:
    """Raise ConfigError if AWS does not know job ``name``; SageMaker has no error code for it."""
    try:
        yield
    except AWSError as error:
        if error.code == "ResourceNotFound" or re.search("not f(i|ou)nd", str(error)):
            raise ConfigError(
                f"{name}: no such training job in this region; run aws sagemaker "
                "list-training-jobs for a list of all"
            ) from None
        raise


def format_status(description: Mapping[str, Any]) -> str:
    """Format the result of `describe_job` in a few lines."""
    resources = description["ResourceConfig"]
    state = f"{description['TrainingJobStatus']} ({description['SecondaryStatus']})"
    lines = [
        f"{description['TrainingJobName']}: {state}",
        f"machines: {resources.get('InstanceCount')} x {resources.get('InstanceType')}",
    ]
    for seconds, label in (
        (description.get("TrainingTimeInSeconds"), "trained"),
        (description.get("BillableTimeInSeconds"), "billed, each machine"),
    ):
        if seconds is not None:
            lines.append(f"{label}: {timedelta(seconds=seconds)}")
    metrics = description.get("FinalMetricDataList", [])
    if metrics:
        last = (f"{metric['MetricName']}={metric['Value']:g}" for metric in metrics)
        lines.append("last metrics: " + " ".join(last))
    if reason := description.get("FailureReason"):
        lines.append(f"failure reason: {reason}")
    return "\n".join(lines)


def stop_job(name: str, region: str = "") -> None:
    """Request a stop of a job: its ranks receive SIGTERM and have two minutes to save."""
    sagemaker = create_client("sagemaker", region)
    with _report_unknown_job(name), translate_errors(f"stopping {name}"):
        sagemaker.stop_training_job(TrainingJobName=name)


def print_logs(
    name: str, region: str = "", *, all_hosts: bool = False, follow: bool = False
) -> None:
    """Print the log lines of a job, or its status if there are none yet."""
    empty = True
    for line in read_logs(name, region, all_hosts=all_hosts, follow=follow):
        empty = False
        print(line, flush=True)
    if empty:
        print(f"no output yet; {format_status(describe_job(name, region))}", file=sys.stderr)


def read_logs(
    name: str,
    region: str = "",
    *,
    all_hosts: bool = False,
    follow: bool = False,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[str]:
    """Yield the log lines of a job.

    Args:
        name: Name of the job.
        region: AWS region; empty: the environment's.
        all_hosts: Read all hosts, with the host's name before each line, instead of the first.
        follow: Continue until the job has ended and all lines are read.
        sleep: Function that waits between polls.
    """
    logs, tokens = create_client("logs", region), {}
    while True:
        ended = not follow or describe_job(name, region)["TrainingJobStatus"] in FINAL_STATES
        for stream in _log_streams(logs, name, all_hosts):
            for message in _new_messages(logs, stream, tokens):
                host = stream.removeprefix(f"{name}/").rpartition("-")[0]
                yield f"[{host}] {message}" if all_hosts else message
        if ended:
            return
        sleep(POLL_INTERVAL)


def _log_streams(logs: Any, name: str, all_hosts: bool) -> list[str]:
    """Return the log streams of a job's hosts in host order; empty before the job has started."""
    prefix = f"{name}/" if all_hosts else f"{name}/{_FIRST_HOST}-"
    pages = logs.get_paginator("describe_log_streams")
    try:
        with translate_errors(f"listing the logs of {name}"):
            found = [
                stream["logStreamName"]
                for page in pages.paginate(logGroupName=LOG_GROUP, logStreamNamePrefix=prefix)
                for stream in page["logStreams"]
            ]
    except AWSError as error:
        if error.code == "ResourceNotFoundException":  # the first job creates the log group
            return []
        raise
    return sorted(found, key=_host_number)


def _host_number(stream: str) -> int:
    """Return the host number of a stream: ``job/algo-12-1700000000`` gives 12."""
    found = re.search(r"/algo-(\d+)", stream)
    return int(found[1]) if found else 0


def _new_messages(logs: Any, stream: str, tokens: dict[str, str]) -> Iterator[str]:
    """Yield the unread messages of ``stream``, and store its read position in ``tokens``.

    A page before the last one may be empty. The last page returns the token of its request.
    """
    while True:
        token = {"nextToken": tokens[stream]} if stream in tokens else {}
        with translate_errors(f"reading {stream}"):
            page = logs.get_log_events(
                logGroupName=LOG_GROUP, logStreamName=stream, startFromHead=True, **token
            )
        yield from (event["message"] for event in page["events"])
        if tokens.get(stream) == page["nextForwardToken"]:
            return
        tokens[stream] = page["nextForwardToken"]
