"""The SDK's own driver script, run here: does the job of a ModelTrainer start our training?

The channels ``code`` and ``sm_drivers`` are those that the SDK uploaded; ``/opt/ml`` in its scripts
is a folder of this machine, and the command that they start is told so.
"""

import os
import subprocess
import sys
from pathlib import Path

from ci.sagemaker import jobs
from nearlinear.launch.sagemaker import aws, emulate
from nearlinear.launch.sagemaker.model_trainer import COMMAND
from nearlinear.launch.sagemaker.request import CODE, DRIVERS

HOST = "algo-1"


def run(request: dict, folder: Path, tokens: Path) -> subprocess.CompletedProcess:
    """Host 1 of ``request`` below ``folder``, on ``tokens``; output and errors as one text."""
    places = {
        channel["ChannelName"]: channel["DataSource"]["S3DataSource"]["S3Uri"]
        for channel in request["InputDataConfig"]
    }
    sources = {"train": tokens, CODE: folder / "brought" / CODE}
    _fetch(places[CODE], sources[CODE])
    emulate.lay_out(folder, request, [HOST], HOST, sources)
    drivers = folder / "input" / "data" / DRIVERS
    _fetch(places[DRIVERS], drivers)
    for script in (path for path in drivers.rglob("*") if path.suffix in (".py", ".sh")):
        text = script.read_text().replace(emulate.PLACE, str(folder))
        script.write_text(text.replace(COMMAND, f"{COMMAND} {folder}"))
    algorithm = request["AlgorithmSpecification"]
    words = [*algorithm["ContainerEntrypoint"], *algorithm["ContainerArguments"]]
    return subprocess.run(
        [word.replace(emulate.PLACE, str(folder)) for word in words],
        env=os.environ | request.get("Environment", {}) | _container(folder, request),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )


def _container(folder: Path, request: dict) -> dict[str, str]:
    """What a container has: its job's name, a python and a pip."""
    programs = folder / "bin"
    programs.mkdir()
    for name, program in (("python", sys.executable), ("python3", sys.executable)):
        # not a link: Python finds its packages by where it lies
        (programs / name).write_text(f'#!/bin/sh\nexec {program} "$@"\n')
        (programs / name).chmod(0o755)
    (programs / "pip").symlink_to("/bin/true")
    return {
        "TRAINING_JOB_NAME": request["TrainingJobName"],
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
    }


def _fetch(uri: str, folder: Path) -> None:
    """What lies below ``uri``."""
    bucket, prefix = aws.bucket_and_key(uri)
    s3 = aws.client("s3", jobs.REGION)
    for found in s3.list_objects_v2(Bucket=bucket, Prefix=prefix)["Contents"]:
        path = folder / found["Key"].removeprefix(f"{prefix}/")
        path.parent.mkdir(parents=True, exist_ok=True)
        s3.download_file(bucket, found["Key"], str(path))
