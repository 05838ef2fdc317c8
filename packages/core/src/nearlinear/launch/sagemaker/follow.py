"""A submitted job from afar: how it stands, what it says, and its end."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

from ...errors import ConfigError
from .aws import ServiceRefused, client, told

LOGS = "/aws/sagemaker/TrainingJobs"  # group of all training jobs
ENDED = ("Completed", "Failed", "Stopped")
PAUSE = 5.0  # seconds between looks
FIRST = "algo-1"


def describe(name: str, region: str = "") -> dict:
    """What the service says of a job. Raises ConfigError where it knows none of that name."""
    sagemaker = client("sagemaker", region)
    with _of_a_known(name), told(f"describing {name}"):
        return sagemaker.describe_training_job(TrainingJobName=name)


@contextlib.contextmanager
def _of_a_known(name: str) -> Iterator[None]:
    """Inside, ConfigError where AWS knows no job ``name``: it has no code of its own for that."""
    try:
        yield
    except ServiceRefused as error:
        if error.code == "ResourceNotFound" or re.search("not f(i|ou)nd", str(error)):
            where = "in this region; aws sagemaker list-training-jobs names all"
            raise ConfigError(f"{name}: no such training job {where}") from None
        raise


def status(found: dict) -> str:
    """A job's state in a few lines, of what `describe` returns."""
    machines = found["ResourceConfig"]
    lines = [
        f"{found['TrainingJobName']}: {found['TrainingJobStatus']} ({found['SecondaryStatus']})",
        f"machines: {machines.get('InstanceCount')} x {machines.get('InstanceType')}",
    ]
    for seconds, words in (
        (found.get("TrainingTimeInSeconds"), "trained"),
        (found.get("BillableTimeInSeconds"), "billed, each machine"),
    ):
        if seconds is not None:
            lines.append(f"{words}: {timedelta(seconds=seconds)}")
    metrics = found.get("FinalMetricDataList", [])
    if metrics:
        last = (f"{metric['MetricName']}={metric['Value']:g}" for metric in metrics)
        lines.append("last: " + " ".join(last))
    if reason := found.get("FailureReason"):
        lines.append(f"why it failed: {reason}")
    return "\n".join(lines)


def stop(name: str, region: str = "") -> None:
    """Ask a job to end: its ranks get SIGTERM, and two minutes to save."""
    sagemaker = client("sagemaker", region)
    with _of_a_known(name), told(f"stopping {name}"):
        sagemaker.stop_training_job(TrainingJobName=name)


def show(name: str, region: str = "", *, everybody: bool = False, follow: bool = False) -> None:
    """Print what a job says as `lines` gives it; of one that has said nothing, how it stands."""
    silent = True
    for line in lines(name, region, everybody=everybody, follow=follow):
        silent = False
        print(line, flush=True)
    if silent:
        print(f"nothing said yet; {status(describe(name, region))}", file=sys.stderr)


def lines(
    name: str,
    region: str = "",
    *,
    everybody: bool = False,
    follow: bool = False,
    pause: Callable[[float], None] = time.sleep,
) -> Iterator[str]:
    """What a job prints: its first host, or ``everybody`` with the host's name before each line.

    ``follow``: until the job has ended and said everything.
    """
    logs, read = client("logs", region), {}
    while True:
        ended = not follow or describe(name, region)["TrainingJobStatus"] in ENDED
        for stream in _streams(logs, name, everybody):
            for message in _new(logs, stream, read):
                host = stream.removeprefix(f"{name}/").rpartition("-")[0]
                yield f"[{host}] {message}" if everybody else message
        if ended:
            return
        pause(PAUSE)


def _streams(logs, name: str, everybody: bool) -> list[str]:
    """Log streams of a job's hosts, in their order; none before it has started."""
    prefix = f"{name}/" if everybody else f"{name}/{FIRST}-"
    pages = logs.get_paginator("describe_log_streams")
    try:
        with told(f"looking for what {name} has said"):
            found = [
                stream["logStreamName"]
                for page in pages.paginate(logGroupName=LOGS, logStreamNamePrefix=prefix)
                for stream in page["logStreams"]
            ]
    except ServiceRefused as error:
        if error.code == "ResourceNotFoundException":  # the group comes with the first job
            return []
        raise
    return sorted(found, key=_number)


def _number(stream: str) -> int:
    """Which host a stream is of: ``job/algo-12-1700000000`` gives 12."""
    found = re.search(r"/algo-(\d+)", stream)
    return int(found[1]) if found else 0


def _new(logs, stream: str, read: dict[str, str]) -> Iterator[str]:
    """Lines of ``stream`` after what has been ``read``: a token for each stream.

    A page may be empty before the last one; the last gives back the token it was asked with.
    """
    while True:
        token = {"nextToken": read[stream]} if stream in read else {}
        with told(f"reading {stream}"):
            page = logs.get_log_events(
                logGroupName=LOGS, logStreamName=stream, startFromHead=True, **token
            )
        yield from (event["message"] for event in page["events"])
        if read.get(stream) == page["nextForwardToken"]:
            return
        read[stream] = page["nextForwardToken"]
