"""The cluster: create nodes and links, start ranks, read counters and disturb the network."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO

from ci.emulation.cluster import namespaces, processors
from ci.emulation.cluster.namespaces import ClusterError, batch, unavailable_reason
from ci.emulation.cluster.ranks import (
    Rank,
    RankFailed,
    as_completed,
    command_on_node,
    rank_environment,
)

SUBNET = "10.77.0"
MAX_NODES = 250
FIRST_PORT = 29500  # torchrun's default, below the kernel's ephemeral ports

TERMINATION_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Stream = int | IO | None  # a stream argument of Popen


@dataclass(frozen=True)
class Counters:
    """Traffic of a NIC since the cluster started, Ethernet headers included.

    With segmentation offload (on, as for real NICs) a packet may stand for up to 32 KB of segments.
    Its headers count once here, while the rate limit charges the headers of every segment.
    Subtract two readings for the traffic between them.
    """

    tx_bytes: int
    tx_packets: int
    rx_bytes: int
    rx_packets: int

    def __sub__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))


@contextlib.contextmanager
def _deferred_signals():
    """Defer termination signals until the end of the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received = []
    handlers = {
        n: signal.getsignal(n) for n in TERMINATION_SIGNALS if callable(signal.getsignal(n))
    }
    for number in handlers:
        signal.signal(number, lambda number, _: received.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in received:
            signal.raise_signal(number)


class Cluster:
    """Nodes around one switch: ``with Cluster(nodes=4, rate="200mbit") as cluster``.

    All nodes and ranks end with the block, also on an exception or SIGTERM. Leftovers of a killed
    owner are removed when the next cluster starts.

    Args:
        nodes: Number of nodes, named ``node0``, ``node1`` and so on.
        rate: Limit of each NIC in each direction, in tc's notation ("200mbit", "1gbit"; "mbps"
            means megabytes), or None for no limit.
        cores: Processors of each node, such as 0.5; None to share those of this machine.
    """

    def __init__(self, nodes: int, rate: str | None = None, cores: float | None = None):
        if not 1 <= nodes <= MAX_NODES:
            raise ValueError(f"nodes={nodes}: an emulated cluster has 1 to {MAX_NODES} nodes.")
        self.nodes = nodes
        self._rate = rate
        self._cores = cores
        self._groups: list[Path] = []
        self._owner = os.getpid()
        self._switch, self._names = namespaces.new_names(nodes)
        self._holders: list[subprocess.Popen] = []
        self._ranks: list[Rank] = []
        self._ports = itertools.count(FIRST_PORT)
        self._handlers: dict[int, object] = {}
        # For the kernel, the parent of a child is the thread that forked it, and the parent-death
        # signal fires when that thread ends. One thread that lives as long as the cluster starts
        # all children.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="cluster")

    def __enter__(self) -> Cluster:
        if reason := namespaces.unavailable_reason():
            raise ClusterError(reason)
        if self._cores and (reason := processors.unavailable_reason()):
            raise ClusterError(f"cores={self._cores}: {reason}")
        namespaces.clean()
        try:
            self._exit_on_signals()
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _exit_on_signals(self) -> None:
        """Turn signals that would terminate the process at once into SystemExit."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in TERMINATION_SIGNALS:
            if signal.getsignal(number) == signal.SIG_DFL:
                self._handlers[number] = signal.signal(number, lambda n, _: sys.exit(128 + n))

    def _build(self) -> None:
        lines = [f"netns add {name}" for name in [*self._names, self._switch]]
        for node, name in enumerate(self._names):
            peer = f"peer name port{node} netns {self._switch}"
            lines.append(f"link add eth0 netns {name} type veth {peer}")
        batch("ip", lines)

        hosts = "127.0.0.1 localhost\n::1 localhost\n"
        hosts += "".join(f"{self.address(node)} node{node}\n" for node in range(self.nodes))
        for node, name in enumerate(self._names):
            holder = self._starter.submit(namespaces.hold_node, name, f"node{node}", hosts)
            self._holders.append(holder.result())

        # addrgenmode none: IPv6 address announcements would show up in the counters.
        lines = ["link add switch type bridge mcast_snooping 0"]
        lines += [f"link set port{node} master switch" for node in range(self.nodes)]
        for device in ("switch", *(f"port{node}" for node in range(self.nodes))):
            lines += [f"link set {device} addrgenmode none", f"link set {device} up"]
        batch("ip", lines, self._switch)
        for node, name in enumerate(self._names):
            nic = f"link set eth0 addrgenmode none gso_max_size {namespaces.PACKET}"
            address = f"address add {self.address(node)}/24 dev eth0"
            batch("ip", [nic, address, "link set eth0 up", "link set lo up"], name)
        self.set_rate(self._rate)
        for holder in self._holders:
            namespaces.await_node(holder)
        if self._cores:
            self._groups = processors.limit([each.pid for each in self._holders], self._cores)

    def close(self) -> None:
        """Kill every process of the cluster and remove its namespaces."""
        if os.getpid() != self._owner:  # a forked child of the owner left the block
            return
        try:
            with _deferred_signals():
                namespaces.remove([*self._names, self._switch])
                self._starter.shutdown()  # also ends children that have not entered their node
                for child in [*self._ranks, *self._holders]:
                    child.wait()
                for holder in self._holders:
                    holder.stdout.close()
                    holder.stderr.close()
                processors.remove(self._groups)
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self._handlers.clear()

    def address(self, node: int) -> str:
        """Return the node's IPv4 address; ``nodeN`` resolves to it inside the cluster."""
        return f"{SUBNET}.{self._checked(node) + 1}"

    def holder(self, node: int) -> int:
        """Return the id of the process whose namespaces make up the node."""
        return self._holders[self._checked(node)].pid

    def start(
        self,
        command: Sequence[str],
        ranks_per_node: int = 1,
        *,
        env: dict[str, str] | None = None,
        cwd: str | os.PathLike | None = None,
        stdin: Stream | Callable[[int], Stream] = subprocess.DEVNULL,
        stdout: Stream | Callable[[int], Stream] = None,
        stderr: Stream | Callable[[int], Stream] = None,
        **popen,
    ) -> list[Rank]:
        """Start ``command`` as ranks 0 to ``nodes * ranks_per_node - 1``, node by node.

        The environment of a rank is this process's environment, torchrun's variables with a
        MASTER_PORT unique to the job, OMP_NUM_THREADS=1 unless set, and ``env``. The kernel kills
        the ranks when this process ends for any reason.

        Args:
            command: Command line of a rank.
            ranks_per_node: Ranks on each node.
            env: Additional environment variables.
            cwd: Working directory (default: this process's).
            stdin: Stream as for Popen, or a function from rank to stream.
            stdout: As ``stdin``.
            stderr: As ``stdin``.
            **popen: Further arguments of Popen.
        """
        port = next(self._ports)
        popen = {"start_new_session": True, **popen}
        ranks = []
        for rank in range(self.nodes * ranks_per_node):
            node = rank // ranks_per_node
            words = command_on_node(self._holders[node].pid, command, cwd)
            if self._groups:
                words = processors.command(self._groups[node], words)
            variables = rank_environment(rank, ranks_per_node, self.nodes, self.address(0), port)
            started = self._starter.submit(
                Rank,
                words,
                rank=rank,
                node=node,
                env={**variables, **(env or {})},
                stdin=stdin(rank) if callable(stdin) else stdin,
                stdout=stdout(rank) if callable(stdout) else stdout,
                stderr=stderr(rank) if callable(stderr) else stderr,
                **popen,
            )
            ranks.append(started.result())
            self._ranks.append(ranks[-1])
        return ranks

    def wait(self, ranks: Sequence[Rank], timeout: float | None = None) -> list[int]:
        """Wait for all ranks and return their exit codes in the same order (-9: by signal 9).

        Raises:
            TimeoutError: If a rank still runs after ``timeout`` seconds; names these ranks.
        """
        ended = set(as_completed(ranks, timeout))
        running = [str(rank) for rank in ranks if rank not in ended]
        if running:
            raise TimeoutError(f"Still running after {timeout:g} s: {', '.join(running)}.")
        return [rank.returncode for rank in ranks]

    def link_down(self, node: int) -> None:
        """Disconnect the node: packets are lost in both directions, and sockets see no error."""
        batch("ip", [f"link set port{self._checked(node)} down"], self._switch)

    def link_up(self, node: int) -> None:
        """Reconnect the node."""
        batch("ip", [f"link set port{self._checked(node)} up"], self._switch)

    def set_rate(self, rate: str | None, node: int | None = None) -> None:
        """Limit both directions of one node's link, or of all links; None removes the limit."""
        nodes = range(self.nodes) if node is None else [self._checked(node)]
        # Linux limits the egress of a device: a node's sending at its NIC, its receiving at the
        # switch port.
        for number in nodes:
            batch("tc", [namespaces.limit("eth0", rate)], self._names[number])
        batch("tc", [namespaces.limit(f"port{number}", rate) for number in nodes], self._switch)

    def counters(self, node: int) -> Counters:
        """Return the traffic of the node's NIC, read inside its network namespace."""
        holder = self._holders[self._checked(node)]
        table = Path(f"/proc/{holder.pid}/net/dev").read_text()
        numbers = [int(text) for text in table.partition("eth0:")[2].split("\n")[0].split()]
        rx_bytes, rx_packets, tx_bytes, tx_packets = (numbers[i] for i in (0, 1, 8, 9))
        return Counters(tx_bytes, tx_packets, rx_bytes, rx_packets)

    def _checked(self, node: int) -> int:
        if not 0 <= node < self.nodes:
            raise ValueError(
                f"node {node} does not exist. The nodes of this cluster are 0 to {self.nodes - 1}."
            )
        return node


def exit_status(command: Callable[[], int], rejected: type[Exception] = ValueError) -> int:
    """Run a cluster command and return its exit status; print errors on stderr.

    Args:
        command: Function that runs the job and returns 0 or its own status.
        rejected: Exception that the command raises for an invalid request.

    Returns:
        The command's status; 1 if a rank failed, 2 if this machine cannot run a cluster or the
        request is invalid, 130 if interrupted.
    """
    if reason := unavailable_reason():
        print(reason, file=sys.stderr)
        return 2
    try:
        return command()
    except (ClusterError, ValueError, rejected) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RankFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
