"""Linux building blocks of a cluster: named network namespaces, node processes and rate limits.

The name of a namespace contains its owner's process id and start time. Clusters can therefore run
side by side, and leftovers of a dead owner are distinguishable from namespaces in use. All commands
come from iproute2 and util-linux; nothing is written to disk.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

# A token bucket filter (tc's tbf) limits each link's rate, at the NIC and at the switch port. The
# first BUCKET bytes of a burst pass at memory speed. 64 KB is small, but holds two of the largest
# packets a NIC sends here (segmentation offload, up to PACKET bytes). tbf splits packets larger
# than its bucket, at ten times the processor time and out of order; four streams at 1 Gbit/s then
# reach half the rate. QUEUE models a shallow switch: packets that would wait longer are dropped, so
# that many senders to one receiver cause retransmissions, as on real links. Ethernet, IP and TCP
# headers leave 95.5 % of the rate to the payload.
BUCKET = "64kb"
PACKET = 32768
QUEUE = "10ms"

NETNS = Path("/run/netns")  # iproute2's folder of named network namespaces
_NAME = re.compile(r"nearlinear-(?P<pid>\d+)-(?P<started>\d+)-\d+-(switch|node\d+)")
_serials = itertools.count()

# Prefix of commands that the kernel kills when the thread that started them ends.
END_WITH_PARENT = ["setpriv", "--pdeathsig", "KILL"]

# Turn a shell in fresh namespaces into a node: $1 is its name, standard input its /etc/hosts. The
# file mounted over /etc/hosts stays accessible after its name in /dev/shm is removed.
_NODE = """
echo "$1" > /proc/sys/kernel/hostname
mount -t sysfs sysfs /sys
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
cat > /dev/shm/hosts
mount --bind /dev/shm/hosts /etc/hosts
rm /dev/shm/hosts
"""
_STAY = """
echo ready
exec sleep infinity
"""
_LINK = f"""
ip link add name eth0 type veth peer name port0
ip link add name switch type bridge
tc qdisc add dev eth0 root tbf rate 1gbit burst {BUCKET} latency {QUEUE}
"""


class ClusterError(RuntimeError):
    """The cluster cannot be created, changed or removed."""


@functools.cache
def unavailable_reason() -> str | None:
    """Return why this machine cannot run a cluster, with the remedy, or None if it can."""
    if not hasattr(os, "pidfd_open"):
        return "An emulated cluster needs Linux 5.3 or newer: its nodes are Linux namespaces."
    tools = {"ip": "iproute2", "tc": "iproute2", "mount": "mount"}
    tools |= dict.fromkeys(["nsenter", "setpriv", "unshare"], "util-linux")
    missing = [tool for tool in tools if not shutil.which(tool)]
    if missing:
        packages = " ".join(sorted({tools[tool] for tool in missing}))
        return (
            f"An emulated cluster needs {', '.join(missing)}, not found on PATH. "
            f"On Debian or Ubuntu: sudo apt install {packages}"
        )
    if os.geteuid() != 0:
        return "An emulated cluster needs root to create network namespaces. Run it with sudo."
    trial = ["unshare", "--net", "--mount", "--uts", "--ipc", "sh", "-ec", _NODE + _LINK, "sh"]
    try:
        command([*trial, "trial"])  # unnamed namespaces end with the process
    except ClusterError as error:
        return (
            f"This kernel or container refuses an operation of the emulated cluster: {error} "
            "Start a container with --privileged (CAP_SYS_ADMIN and CAP_NET_ADMIN). On a machine, "
            "load the kernel modules: sudo modprobe -a veth bridge sch_tbf"
        )
    return None


def command(words: list[str], text: str = "") -> None:
    """Run a command with ``text`` as standard input.

    Raises:
        ClusterError: If the command fails; the message contains its standard error.
    """
    # Killed with this process: otherwise it could create namespaces after the next start's cleanup.
    done = subprocess.run([*END_WITH_PARENT, *words], input=text, capture_output=True, text=True)
    if done.returncode:
        message = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise ClusterError(f"{words[0]}: {message}.")


def batch(tool: str, lines: Iterable[str], namespace: str | None = None) -> None:
    """Run many commands of ``ip`` or ``tc`` in one process, inside ``namespace`` if given."""
    inside = ["-netns", namespace] if namespace else []
    command([tool, *inside, "-batch", "-"], "\n".join(lines))


def limit(device: str, rate: str | None) -> str:
    """Return the ``tc`` command that limits the egress of a device; None removes the limit."""
    queue = f"tbf rate {rate} burst {BUCKET} latency {QUEUE}" if rate else "noqueue"
    return f"qdisc replace dev {device} root {queue}"


def new_names(nodes: int) -> tuple[str, list[str]]:
    """Return new names for the switch and the nodes of a cluster owned by this process."""
    owner = os.getpid()
    prefix = f"nearlinear-{owner}-{_started(owner)}-{next(_serials)}"
    return f"{prefix}-switch", [f"{prefix}-node{node}" for node in range(nodes)]


def hold_node(name: str, hostname: str, hosts: str) -> subprocess.Popen:
    """Start the process that creates a node in the namespace ``name`` and keeps it alive."""
    unshare = ["unshare", "--mount", "--uts", "--ipc", "sh", "-ec", _NODE + _STAY, "sh", hostname]
    holder = subprocess.Popen(
        [*END_WITH_PARENT, "nsenter", f"--net={NETNS / name}", *unshare],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C goes to the owner, which ends this process
        text=True,
    )
    with contextlib.suppress(BrokenPipeError), holder.stdin as pipe:  # await_node reports the cause
        pipe.write(hosts)
    return holder


def await_node(holder: subprocess.Popen) -> None:
    """Wait until the node is ready. Raises ClusterError if it did not start."""
    if holder.stdout.readline() != "ready\n":
        raise ClusterError(f"A node did not start: {' '.join(holder.stderr.read().split())}.")


def clean() -> list[str]:
    """Remove the namespaces of clusters with dead owners and return their names."""
    left = []
    for path in NETNS.iterdir() if NETNS.exists() else []:
        name = _NAME.fullmatch(path.name)
        if name and _started(int(name["pid"])) != int(name["started"]):
            left.append(path.name)
    remove(left)
    return sorted(left)


def remove(names: list[str]) -> None:
    """Kill every process in these network namespaces and remove those that exist."""
    names = [name for name in names if (NETNS / name).exists()]
    if not names:
        return
    inside = {_identity(NETNS / name) for name in names} - {None}
    deadline = time.monotonic() + 5
    # Repeat until none is left: a process may fork between listing and killing.
    while processes := [p for p in _processes() if _identity(f"/proc/{p}/ns/net") in inside]:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise ClusterError(
                f"Processes {processes} of a cluster did not end within 5 s of SIGKILL."
            )
        time.sleep(0.01)
    try:
        # -force continues after an error, because another process may clean up at the same time.
        command(["ip", "-force", "-batch", "-"], "\n".join(f"netns delete {n}" for n in names))
    except ClusterError:
        if any((NETNS / name).exists() for name in names):
            raise


def _processes() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _identity(namespace: Path | str) -> tuple[int, int] | None:
    try:
        found = os.stat(namespace)
    except OSError:  # the process has ended
        return None
    return found.st_dev, found.st_ino


def _started(process: int) -> int | None:
    """Return the start time of a live process in ticks since boot; unique together with its id."""
    try:
        after_name = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if after_name[0] in "ZX" else int(after_name[19])  # Z, X: dead, not reaped
