"""Run a job locally with the SDK's own driver script, to check that it starts training.

The channels ``code`` and ``sm_drivers`` are those uploaded by the SDK. ``/opt/ml`` in its scripts
is replaced by a local folder, which is also passed to the training command.
"""

import os
import subprocess
import sys
from pathlib import Path

from ci.sagemaker_sdk import jobs
from nearlinear.launch.sagemaker import aws, emulate
from nearlinear.launch.sagemaker.container import CODE_CHANNEL, CONTAINER_ROOT, DRIVER_CHANNEL
from nearlinear.launch.sagemaker.model_trainer import COMMAND

HOST = "algo-1"


def run(request: dict, folder: Path, tokens: Path) -> subprocess.CompletedProcess:
    """Run host 1 of ``request`` in ``folder`` on ``tokens``; stderr is merged into stdout."""
    places = {
        channel["ChannelName"]: channel["DataSource"]["S3DataSource"]["S3Uri"]
        for channel in request["InputDataConfig"]
    }
    sources = {"train": tokens, CODE_CHANNEL: folder / "brought" / CODE_CHANNEL}
    _download(places[CODE_CHANNEL], sources[CODE_CHANNEL])
    emulate.write_host_files(folder, request, [HOST], HOST, sources)
    drivers = folder / "input" / "data" / DRIVER_CHANNEL
    _download(places[DRIVER_CHANNEL], drivers)
    for script in (path for path in drivers.rglob("*") if path.suffix in (".py", ".sh")):
        text = script.read_text().replace(CONTAINER_ROOT, str(folder))
        script.write_text(text.replace(COMMAND, f"{COMMAND} {folder}"))
    algorithm = request["AlgorithmSpecification"]
    words = [*algorithm["ContainerEntrypoint"], *algorithm["ContainerArguments"]]
    return subprocess.run(
        [word.replace(CONTAINER_ROOT, str(folder)) for word in words],
        env=os.environ | request.get("Environment", {}) | _container_environment(folder, request),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )


def _container_environment(folder: Path, request: dict) -> dict[str, str]:
    """Return a container's variables, with its own python and pip on PATH."""
    programs = folder / "bin"
    programs.mkdir()
    for name, program in (("python", sys.executable), ("python3", sys.executable)):
        # a link would not do: Python finds its packages relative to its path
        (programs / name).write_text(f'#!/bin/sh\nexec {program} "$@"\n')
        (programs / name).chmod(0o755)
    (programs / "pip").symlink_to("/bin/true")
    return {
        "TRAINING_JOB_NAME": request["TrainingJobName"],
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
    }


def _download(uri: str, folder: Path) -> None:
    """Download all objects below ``uri``."""
    bucket, prefix = aws.bucket_and_key(uri)
    s3 = aws.create_client("s3", jobs.REGION)
    for found in s3.list_objects_v2(Bucket=bucket, Prefix=prefix)["Contents"]:
        path = folder / found["Key"].removeprefix(f"{prefix}/")
        path.parent.mkdir(parents=True, exist_ok=True)
        s3.download_file(bucket, found["Key"], str(path))
