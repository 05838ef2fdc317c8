"""The hosts of a SageMaker job on this machine, from the very request that would go to AWS.

Every host gets the files that the service would lay out, below a folder of its own instead of
``/opt/ml``, and runs the request's own entry point on them. All hosts are this machine: they meet
on the loopback, and one that fails ends the job. What is in S3 or on a file system must be given as
folders of this machine; checkpoints are copied to such a folder, and back by the next job.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from ...errors import ConfigError
from ..local import NOTICE
from . import drivers
from .copied import Copied
from .request import DRIVERS, RANKS

PLACE = "/opt/ml"


def run(request: dict, folder: Path, found: Mapping[str, Path], hosts: int, ranks: int) -> int:
    """Run the job below ``folder`` on ``hosts`` of ``ranks`` each; its exit status.

    ``found``: which folder stands for a source, by S3 URI, or file system id and directory.
    Raises ConfigError for a source that has none.
    """
    count = hosts or request["ResourceConfig"]["InstanceCount"]
    names = [f"algo-{number}" for number in range(1, count + 1)]
    sources = {
        channel["ChannelName"]: _folder_of(channel, found) for channel in request["InputDataConfig"]
    }
    for name in names:
        lay_out(folder / name, request, names, name, sources)
    with _ended_by_sigterm(), _kept_checkpoints(request, folder, names, found):
        port = str(_free_port())
        return _wait([_start(folder / name, request, ranks, port) for name in names])


def lay_out(root: Path, request: dict, names: list[str], name: str, sources: dict) -> None:
    """The files of host ``name``, as the container of a training job finds them."""
    config, data = root / "input" / "config", root / "input" / "data"
    for made in (config, data, root / "model", root / "output" / "data"):
        made.mkdir(parents=True, exist_ok=True)
    machines = request["ResourceConfig"]
    channels = {channel["ChannelName"]: channel for channel in request["InputDataConfig"]}
    written = {
        "resourceconfig": {
            "current_host": name,
            "current_instance_type": machines["InstanceType"],
            "hosts": names,
            "network_interface_name": "lo",
        },
        "hyperparameters": {
            key: value.replace(f"{PLACE}/", f"{root}/")
            for key, value in request.get("HyperParameters", {}).items()
        },
        "inputdataconfig": {
            name: {"TrainingInputMode": "File"} | channel for name, channel in channels.items()
        },
    }
    for name, content in written.items():
        (config / f"{name}.json").write_text(json.dumps(content, indent=1))
    for name, source in sources.items():
        link = data / name
        if link.is_symlink():
            link.unlink()
        if name == DRIVERS:
            drivers.write(link)  # a copy of its own: where it lies tells it where it is
        else:
            link.symlink_to(source)


def _kept_checkpoints(request: dict, folder: Path, names: list[str], found: Mapping[str, Path]):
    """While it is entered, what hosts keep is copied to the folder that stands for the job's S3."""
    asked = request.get("CheckpointConfig")
    if asked is None:
        return contextlib.nullcontext()
    inside = Path(asked["LocalPath"]).relative_to(PLACE)
    store = found.get(asked["S3Uri"], folder / "kept")
    return Copied([folder / name / inside for name in names], store)


def _folder_of(channel: dict, found: Mapping[str, Path]) -> Path | None:
    if channel["ChannelName"] == DRIVERS:
        return None
    source = channel["DataSource"]
    system = source.get("FileSystemDataSource")
    if system:
        name = f"{system['FileSystemId']}{system['DirectoryPath']}"
    else:
        name = source["S3DataSource"]["S3Uri"]
    if name not in found:
        raise ConfigError(
            f"input {channel['ChannelName']!r} is {name}: say which folder of this machine stands "
            f"for it, as in --stand-in {name}=FOLDER"
        )
    return found[name].resolve()


def _free_port() -> int:
    """For ranks to meet at: two jobs on this machine must not meet each other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _start(root: Path, request: dict, ranks: int, port: str) -> subprocess.Popen:
    algorithm = request["AlgorithmSpecification"]
    words = [*algorithm["ContainerEntrypoint"], *algorithm["ContainerArguments"]]
    here = {
        RANKS: str(ranks),
        "SM_MASTER_ADDR": "127.0.0.1",
        "SM_MASTER_PORT": port,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    return subprocess.Popen(
        [word.replace(PLACE, str(root)) for word in words],
        env=os.environ | request.get("Environment", {}) | here,
    )


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Inside, SIGTERM ends this process as an exception does: its hosts are ended, too."""

    def end(number, _):
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait(hosts: list[subprocess.Popen]) -> int:
    """The first failure's status, or 0; the others are ended then, and all when this is."""
    try:
        while any(host.poll() is None for host in hosts):
            failed = next((host.returncode for host in hosts if host.returncode), 0)
            if failed:
                return failed
            time.sleep(0.1)
        return next((host.returncode for host in hosts if host.returncode), 0)
    finally:
        _end(hosts)


def _end(hosts: list[subprocess.Popen]) -> None:
    for host in hosts:
        if host.poll() is None:
            host.terminate()
    deadline = time.monotonic() + NOTICE
    for host in hosts:
        try:
            host.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            host.kill()
            host.wait()
