"""What a cluster is made of in Linux: named network namespaces, nodes around them, rate limits.

A name carries its owner's process id and start time, so that clusters can stand side by side and
what a dead owner left is told from what a live one uses. Everything goes through iproute2 and
util-linux; nothing is left on disk.
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

# A token bucket (tc's tbf) keeps a link's rate, at the NIC and at the switch's port to it. BUCKET
# lets 64 KB of a message pass at memory speed before the rate holds: little, and yet two of the
# largest packets that a NIC here takes (segmentation offload, up to PACKET bytes). tbf would cut up
# a packet larger than its bucket, which costs ten times the processor time and delivers out of
# order: four streams at 1 Gbit/s then reach half of it. QUEUE is that of a shallow switch: what
# would wait longer is dropped, so that many senders to one receiver pay in retransmissions, as on
# real links. Ethernet, IP and TCP headers leave 95.5 % of the rate to the payload.
BUCKET = "64kb"
PACKET = 32768
QUEUE = "10ms"

NETNS = Path("/run/netns")  # where iproute2 keeps its names of network namespaces
_NAME = re.compile(r"nearlinear-(?P<pid>\d+)-(?P<started>\d+)-\d+-(switch|node\d+)")
_serials = itertools.count()

# setpriv has the kernel kill the command when the thread that started it ends.
END_WITH_PARENT = ["setpriv", "--pdeathsig", "KILL"]

# Turns a shell in fresh namespaces into a node: $1 is its name, its /etc/hosts comes on standard
# input. The file bound over /etc/hosts lives on when its name in /dev/shm is gone.
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
    """The cluster cannot be made, changed or removed; the message says why."""


@functools.cache
def why_not() -> str | None:
    """What keeps this machine from running a cluster, and the remedy; None where nothing does."""
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
        return "An emulated cluster needs root, to make network namespaces. Run it with sudo."
    trial = ["unshare", "--net", "--mount", "--uts", "--ipc", "sh", "-ec", _NODE + _LINK, "sh"]
    try:
        command([*trial, "trial"])  # nameless: its namespaces end with it
    except ClusterError as error:
        return (
            f"An emulated cluster needs what this kernel or container refuses: {error} "
            "In a container, start it with --privileged (CAP_SYS_ADMIN and CAP_NET_ADMIN); "
            "on a machine, load the modules: sudo modprobe -a veth bridge sch_tbf"
        )
    return None


def command(words: list[str], text: str = "") -> None:
    """Run a command with ``text`` as its input; ClusterError with its complaint if it fails."""
    # Ended with us, lest it go on making what the next start has just looked for.
    done = subprocess.run([*END_WITH_PARENT, *words], input=text, capture_output=True, text=True)
    if done.returncode:
        complaint = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise ClusterError(f"{words[0]}: {complaint}.")


def batch(tool: str, lines: Iterable[str], namespace: str | None = None) -> None:
    """Run ``ip`` or ``tc`` once for many of its commands, in a namespace where one is named."""
    inside = ["-netns", namespace] if namespace else []
    command([tool, *inside, "-batch", "-"], "\n".join(lines))


def limit(device: str, rate: str | None) -> str:
    """The ``tc`` command that limits what leaves a device; None lifts the limit."""
    queue = f"tbf rate {rate} burst {BUCKET} latency {QUEUE}" if rate else "noqueue"
    return f"qdisc replace dev {device} root {queue}"


def new_names(nodes: int) -> tuple[str, list[str]]:
    """New names for the switch and the nodes of a cluster that this process owns."""
    owner = os.getpid()
    prefix = f"nearlinear-{owner}-{_started(owner)}-{next(_serials)}"
    return f"{prefix}-switch", [f"{prefix}-node{node}" for node in range(nodes)]


def hold_node(name: str, hostname: str, hosts: str) -> subprocess.Popen:
    """Start the process that makes a node around the namespace ``name`` and keeps it in being."""
    unshare = ["unshare", "--mount", "--uts", "--ipc", "sh", "-ec", _NODE + _STAY, "sh", hostname]
    holder = subprocess.Popen(
        [*END_WITH_PARENT, "nsenter", f"--net={NETNS / name}", *unshare],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the owner, which ends us
        text=True,
    )
    with contextlib.suppress(BrokenPipeError), holder.stdin as pipe:  # await_node says why
        pipe.write(hosts)
    return holder


def await_node(holder: subprocess.Popen) -> None:
    """Return when the node is there; ClusterError where its making failed."""
    if holder.stdout.readline() != "ready\n":
        raise ClusterError(f"A node did not start: {' '.join(holder.stderr.read().split())}.")


def clean() -> list[str]:
    """Remove what clusters of dead owners left; the names of the namespaces removed."""
    left = []
    for path in NETNS.iterdir() if NETNS.exists() else []:
        name = _NAME.fullmatch(path.name)
        if name and _started(int(name["pid"])) != int(name["started"]):
            left.append(path.name)
    remove(left)
    return sorted(left)


def remove(names: list[str]) -> None:
    """End every process in these network namespaces, and remove those that exist."""
    names = [name for name in names if (NETNS / name).exists()]
    if not names:
        return
    inside = {_identity(NETNS / name) for name in names} - {None}
    patience = time.monotonic() + 5
    # Once more as long as there are any: a process may have forked while we looked.
    while processes := [p for p in _processes() if _identity(f"/proc/{p}/ns/net") in inside]:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if time.monotonic() > patience:
            raise ClusterError(f"Processes {processes} of a cluster survive SIGKILL.")
        time.sleep(0.01)
    try:
        # -force: go on after an error, for another process may be cleaning as well.
        command(["ip", "-force", "-batch", "-"], "\n".join(f"netns delete {n}" for n in names))
    except ClusterError:
        if any((NETNS / name).exists() for name in names):
            raise


def _processes() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _identity(namespace: Path | str) -> tuple[int, int] | None:
    try:
        found = os.stat(namespace)
    except OSError:  # the process ended meanwhile
        return None
    return found.st_dev, found.st_ino


def _started(process: int) -> int | None:
    """When a live process started, in ticks since boot: with its id, a name used only once."""
    try:
        after_name = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if after_name[0] in "ZX" else int(after_name[19])  # dead, though not yet reaped
