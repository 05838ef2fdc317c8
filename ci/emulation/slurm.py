"""A two-node Slurm on this machine: Debian's packages, unpacked in a folder, not installed.

    python -m ci.emulation.slurm     unpack it to artifacts/slurm, for the tests (3 MB; needs apt)

Both nodes are this machine. Their names are loopback addresses, so that ranks reach the first node.
Jobs run as the user who starts the daemons. Slurm's licence is the GPL; it is not distributed here.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "artifacts" / "slurm"
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "libhwloc15")
NODES = ("127.0.0.1", "127.0.0.2")
CPUS = 2  # per node, independent of the machine
DAEMON_TIMEOUT = 30.0  # seconds for daemons to start or stop
LIBRARIES = Path("usr", "lib", "x86_64-linux-gnu")
CONFIG = """\
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
PluginDir={plugins}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
SchedulerParameters=batch_sched_delay=0,sched_interval=1
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus}
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


class SlurmUnavailable(RuntimeError):
    """Slurm cannot be unpacked or started; the message states the reason."""


def unpack(folder: Path = FOLDER) -> Path:
    """Download Debian's packages and unpack them in ``folder``.

    Raises:
        SlurmUnavailable: If apt-get is missing or cannot download the packages.
    """
    if is_unpacked(folder):
        return folder
    if shutil.which("apt-get") is None:
        raise SlurmUnavailable("apt-get was not found; Slurm is unpacked from Debian's packages.")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as downloads:
        done = subprocess.run(
            ["apt-get", "download", *PACKAGES], cwd=downloads, capture_output=True, text=True
        )
        if done.returncode:
            raise SlurmUnavailable(
                f"apt-get download failed: {done.stderr.strip()}. Run apt-get update first."
            )
        for package in sorted(Path(downloads).glob("*.deb")):
            subprocess.run(["dpkg", "-x", package, folder], check=True)
    return folder


def is_unpacked(folder: Path = FOLDER) -> bool:
    return (folder / "usr" / "sbin" / "slurmctld-wlm").exists()


@contextlib.contextmanager
def running(root: Path = FOLDER) -> Iterator[dict[str, str]]:
    """Run both nodes during the block and yield the environment in which sbatch reaches them."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        environment = _configured(root, Path(folder))
        daemons = [_start(root, "slurmctld-wlm", environment, folder)]
        stepd = str(root / "usr" / "sbin" / "slurmstepd-wlm")
        try:
            for node in NODES:
                more = ("-N", node, "-d", stepd)
                daemons.append(_start(root, "slurmd-wlm", environment, folder, *more))
            _wait_for_nodes(environment, daemons, Path(folder))
            yield environment
        finally:
            for daemon in reversed(daemons):
                daemon.terminate()
            for daemon in daemons:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    daemon.wait(DAEMON_TIMEOUT)
                daemon.kill()


def _configured(root: Path, folder: Path) -> dict[str, str]:
    plugins = root / LIBRARIES / "slurm-wlm"
    config = folder / "slurm.conf"
    (folder / "state").mkdir()
    config.write_text(
        CONFIG.format(
            host=socket.gethostname().partition(".")[0],
            user=getpass.getuser(),
            plugins=plugins,
            folder=folder,
            ports=_free_ports(3),
            nodes=NODES,
            cpus=CPUS,
        )
    )
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
        "SLURM_CONF": str(config),
        "PATH": f"{root / 'usr' / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "LD_LIBRARY_PATH": f"{root / LIBRARIES}{os.pathsep}{plugins}",
    }


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        listening = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in listening:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in listening]


def _start(root: Path, name: str, environment: dict, folder: str, *more: str) -> subprocess.Popen:
    with open(Path(folder, f"{name}{''.join(more[1:2])}.log"), "w") as log:
        return subprocess.Popen(
            [root / "usr" / "sbin" / name, "-D", "-f", environment["SLURM_CONF"], *more],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _wait_for_nodes(environment: dict, daemons: list[subprocess.Popen], folder: Path) -> None:
    deadline = time.monotonic() + DAEMON_TIMEOUT
    query = ["sinfo", "--noheader", "--Node", "--format=%T"]
    while time.monotonic() < deadline and all(daemon.poll() is None for daemon in daemons):
        states = subprocess.run(query, env=environment, capture_output=True, text=True).stdout
        if states.split() == ["idle"] * len(NODES):
            return
        time.sleep(0.2)
    logs = "\n".join(log.read_text()[-2000:] for log in sorted(folder.glob("*.log")))
    raise SlurmUnavailable(f"The Slurm daemons did not start. Their logs:\n{logs}")


def main() -> int:
    try:
        print(unpack())
    except SlurmUnavailable as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
