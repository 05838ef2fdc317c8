"""Emulate the hosts of a SageMaker job on this machine, from the request that would go to AWS.

Each host gets the files that SageMaker would provide, below its own folder instead of ``/opt/ml``,
and runs the request's entry point. All hosts run on this machine, rendezvous on the loopback
interface, and stop when one fails. Local folders replace data in S3 and on file systems.
Checkpoints are copied to such a folder, and the next job restores them from it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ..spec import TERMINATION_NOTICE
from .container import CONTAINER_ROOT, DRIVER_CHANNEL, RANKS_VARIABLE, write_script

_COPY_INTERVAL = 0.5  # seconds


class LocalS3Copy:
    """Local replacement of SageMaker's checkpoint copies to S3.

    On entry, the content of ``store`` is copied to the folder of every host. Inside, new files of
    all hosts are copied to ``store``, which therefore contains the shards of all of them. Files
    that a host deletes stay in ``store``, as they do in S3.
    """

    def __init__(self, hosts: Sequence[Path], store: Path):
        self.hosts, self.store = hosts, store
        self._copied: dict[Path, tuple[int, int]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="local-s3-copy")

    def __enter__(self) -> LocalS3Copy:
        self.store.mkdir(parents=True, exist_ok=True)
        for host in self.hosts:
            shutil.copytree(self.store, host, dirs_exist_ok=True)
            self._copied |= {path: _fingerprint(path) for path in _files_below(host)}
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.copy_new_files()

    def copy_new_files(self) -> None:
        """Copy the files that hosts have written or changed since the last call."""
        for host in self.hosts:
            for path in _files_below(host):
                self._copy_file(path, self.store / path.relative_to(host))

    def _copy_file(self, path: Path, target: Path) -> None:
        try:
            fingerprint = _fingerprint(path)
            if self._copied.get(path) == fingerprint:
                return
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_name(f"{target.name}.copied")
            shutil.copyfile(path, partial)
            partial.replace(target)
            self._copied[path] = fingerprint
        except FileNotFoundError:
            pass  # the host has deleted the file in the meantime

    def _run(self) -> None:
        while not self._stop.wait(_COPY_INTERVAL):
            self.copy_new_files()


def _files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _fingerprint(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def run_emulated(
    request: dict[str, Any],
    folder: Path,
    stand_ins: Mapping[str, Path],
    num_hosts: int,
    ranks_per_host: int,
) -> int:
    """Run a job below ``folder`` and return its exit code.

    Args:
        request: CreateTrainingJob request.
        folder: Working folder of all hosts.
        stand_ins: Local folder by S3 URI, or by file system ID and directory.
        num_hosts: Number of hosts; 0 for the number in the request.
        ranks_per_host: Ranks of each host.

    Raises:
        ConfigError: An input has no stand-in.
    """
    count = num_hosts or request["ResourceConfig"]["InstanceCount"]
    hosts = [f"algo-{number}" for number in range(1, count + 1)]
    sources = {
        channel["ChannelName"]: _stand_in_folder(channel, stand_ins)
        for channel in request["InputDataConfig"]
    }
    for host in hosts:
        write_host_files(folder / host, request, hosts, host, sources)
    with _sigterm_raises_exit(), _copied_checkpoints(request, folder, hosts, stand_ins):
        port = str(_free_port())
        return _wait([_start_host(folder / host, request, ranks_per_host, port) for host in hosts])


def write_host_files(
    root: Path,
    request: dict[str, Any],
    hosts: list[str],
    host: str,
    sources: Mapping[str, Path | None],
) -> None:
    """Create the files of ``host`` below ``root``, as in the container of a training job.

    ``sources`` maps each channel to its folder; the launcher script needs none.
    """
    config, data = root / "input" / "config", root / "input" / "data"
    for created in (config, data, root / "model", root / "output" / "data"):
        created.mkdir(parents=True, exist_ok=True)
    contents = {
        "resourceconfig": {
            "current_host": host,
            "current_instance_type": request["ResourceConfig"]["InstanceType"],
            "hosts": hosts,
            "network_interface_name": "lo",
        },
        "hyperparameters": {
            key: value.replace(f"{CONTAINER_ROOT}/", f"{root}/")
            for key, value in request.get("HyperParameters", {}).items()
        },
        "inputdataconfig": {
            channel["ChannelName"]: {"TrainingInputMode": "File"} | channel
            for channel in request["InputDataConfig"]
        },
    }
    for name, content in contents.items():
        (config / f"{name}.json").write_text(json.dumps(content, indent=1))
    for name, source in sources.items():
        link = data / name
        if link.is_symlink():
            link.unlink()
        if name == DRIVER_CHANNEL:
            write_script(link)  # one copy per host: the script finds its inputs by its own path
        else:
            assert source is not None, f"channel {name!r} has no folder"
            link.symlink_to(source)


def _copied_checkpoints(
    request: dict[str, Any], folder: Path, hosts: list[str], stand_ins: Mapping[str, Path]
) -> contextlib.AbstractContextManager[object]:
    """Copy the checkpoints of the hosts to the stand-in of the job's S3 folder."""
    config = request.get("CheckpointConfig")
    if config is None:
        return contextlib.nullcontext()
    inside = Path(config["LocalPath"]).relative_to(CONTAINER_ROOT)
    store = stand_ins.get(config["S3Uri"], folder / "kept")
    return LocalS3Copy([folder / host / inside for host in hosts], store)


def _stand_in_folder(channel: dict[str, Any], stand_ins: Mapping[str, Path]) -> Path | None:
    if channel["ChannelName"] == DRIVER_CHANNEL:
        return None
    source = channel["DataSource"]
    system = source.get("FileSystemDataSource")
    if system:
        name = f"{system['FileSystemId']}{system['DirectoryPath']}"
    else:
        name = source["S3DataSource"]["S3Uri"]
    if name not in stand_ins:
        raise ConfigError(
            f"input {channel['ChannelName']!r} ({name}) is not on this machine; name a local "
            f"folder that replaces it, as in --stand-in {name}=FOLDER"
        )
    return stand_ins[name].resolve()


def _free_port() -> int:
    """Return a free port for the rendezvous: jobs on one machine must not share it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _start_host(root: Path, request: dict[str, Any], ranks: int, port: str) -> subprocess.Popen:
    algorithm = request["AlgorithmSpecification"]
    words = [*algorithm["ContainerEntrypoint"], *algorithm["ContainerArguments"]]
    variables = {
        RANKS_VARIABLE: str(ranks),
        "SM_MASTER_ADDR": "127.0.0.1",
        "SM_MASTER_PORT": port,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    return subprocess.Popen(
        [word.replace(CONTAINER_ROOT, str(root)) for word in words],
        env=os.environ | request.get("Environment", {}) | variables,
    )


@contextlib.contextmanager
def _sigterm_raises_exit() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, so that the hosts are stopped as after an exception."""

    def exit_process(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, exit_process)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait(hosts: list[subprocess.Popen]) -> int:
    """Return the exit code of the first failing host, or 0, and stop the others."""
    try:
        while any(host.poll() is None for host in hosts):
            failed = next((host.returncode for host in hosts if host.returncode), 0)
            if failed:
                return failed
            time.sleep(0.1)
        return next((host.returncode for host in hosts if host.returncode), 0)
    finally:
        _stop(hosts)


def _stop(hosts: list[subprocess.Popen]) -> None:
    for host in hosts:
        if host.poll() is None:
            host.terminate()
    deadline = time.monotonic() + TERMINATION_NOTICE
    for host in hosts:
        try:
            host.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            host.kill()
            host.wait()
