"""The cluster itself: make nodes and links, start ranks, watch and disturb the network."""

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

from ci.cluster import namespaces
from ci.cluster.namespaces import ClusterError, batch
from ci.cluster.ranks import Rank, environment, in_order_of_end, inside

SUBNET = "10.77.0"
MOST_NODES = 250
FIRST_PORT = 29500  # torchrun's default, below the ports that the kernel hands out

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Stream = int | IO | None  # where output goes, as Popen takes it


@dataclass(frozen=True)
class Counters:
    """What crossed a NIC since the cluster began, Ethernet headers included; ``after - before``.

    With segmentation offload (on, as for real NICs) a packet may stand for up to 32 KB of segments
    and its headers count once here, while the link's rate is charged for every segment's.
    """

    tx_bytes: int
    tx_packets: int
    rx_bytes: int
    rx_packets: int

    def __sub__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))


@contextlib.contextmanager
def _undisturbed():
    """Hold back the signals that would leave this block midway; they act when it is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held = []
    handlers = {n: signal.getsignal(n) for n in ENDING_SIGNALS if callable(signal.getsignal(n))}
    for number in handlers:
        signal.signal(number, lambda number, _: held.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in held:
            signal.raise_signal(number)


class Cluster:
    """``with Cluster(nodes=4, rate="200mbit") as cluster``: nodes 0 to 3 around one switch.

    ``rate`` is what each NIC sends at most and receives at most, as tc writes it ("200mbit",
    "1gbit"; beware, "mbps" is megabytes), or None for no limit. All of it ends with the block, also
    by an exception or SIGTERM; what an owner leaves that is killed, the next cluster removes.
    """

    def __init__(self, nodes: int, rate: str | None = None):
        if not 1 <= nodes <= MOST_NODES:
            raise ValueError(f"nodes={nodes}: an emulated cluster has 1 to {MOST_NODES} nodes.")
        self.nodes = nodes
        self._rate = rate
        self._owner = os.getpid()
        self._switch, self._names = namespaces.new_names(nodes)
        self._holders: list[subprocess.Popen] = []
        self._ranks: list[Rank] = []
        self._ports = itertools.count(FIRST_PORT)
        self._handlers: dict[int, object] = {}
        # "Parent" means to the kernel the thread that forked, and the end of that thread ends the
        # child: so all children are started by a thread that lives as long as the cluster.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="cluster")

    def __enter__(self) -> Cluster:
        if reason := namespaces.why_not():
            raise ClusterError(reason)
        namespaces.clean()
        try:
            self._end_on_signals()
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _end_on_signals(self) -> None:
        """Leave the block by SystemExit on signals that would end the process on the spot."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in ENDING_SIGNALS:
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

        # addrgenmode none: no IPv6 addresses, whose announcements would be in the counters.
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

    def close(self) -> None:
        """End every process of the cluster and remove its namespaces."""
        if os.getpid() != self._owner:  # a fork of the owner has left the block
            return
        try:
            with _undisturbed():
                namespaces.remove([*self._names, self._switch])
                self._starter.shutdown()  # ends what had not entered its node yet
                for child in [*self._ranks, *self._holders]:
                    child.wait()
                for holder in self._holders:
                    holder.stdout.close()
                    holder.stderr.close()
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self._handlers.clear()

    def address(self, node: int) -> str:
        """The node's IPv4 address; inside the cluster its name, ``node0``, resolves to it."""
        return f"{SUBNET}.{self._checked(node) + 1}"

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
        """Start ``command`` as ranks 0 to ``nodes * ranks_per_node - 1``, one node after another.

        Ranks see this process's environment, torchrun's variables with a MASTER_PORT of this job's
        own, OMP_NUM_THREADS=1 unless it is set, and ``env``. ``stdin``, ``stdout`` and ``stderr``
        are Popen's, or functions of the rank that return such; ``popen`` goes to Popen. A rank is
        killed when this process ends, however it ends.
        """
        port = next(self._ports)
        popen = {"start_new_session": True, **popen}
        ranks = []
        for rank in range(self.nodes * ranks_per_node):
            node = rank // ranks_per_node
            place = environment(rank, ranks_per_node, self.nodes, self.address(0), port)
            started = self._starter.submit(
                Rank,
                inside(self._holders[node].pid, command, cwd),
                rank=rank,
                node=node,
                env={**place, **(env or {})},
                stdin=stdin(rank) if callable(stdin) else stdin,
                stdout=stdout(rank) if callable(stdout) else stdout,
                stderr=stderr(rank) if callable(stderr) else stderr,
                **popen,
            )
            ranks.append(started.result())
            self._ranks.append(ranks[-1])
        return ranks

    def wait(self, ranks: Sequence[Rank], timeout: float | None = None) -> list[int]:
        """Wait until all have ended; their exit codes in the order given (-9: by signal 9).

        Raises TimeoutError, naming the ranks that still run, after ``timeout`` seconds.
        """
        ended = set(in_order_of_end(ranks, timeout))
        running = [str(rank) for rank in ranks if rank not in ended]
        if running:
            raise TimeoutError(f"Still running after {timeout:g} s: {', '.join(running)}.")
        return [rank.returncode for rank in ranks]

    def link_down(self, node: int) -> None:
        """Pull the node's cable: packets are lost in both directions, and no socket is told."""
        batch("ip", [f"link set port{self._checked(node)} down"], self._switch)

    def link_up(self, node: int) -> None:
        """Plug the node's cable in again."""
        batch("ip", [f"link set port{self._checked(node)} up"], self._switch)

    def set_rate(self, rate: str | None, node: int | None = None) -> None:
        """Limit each direction of one node's link, or of all links, to ``rate``; None: no limit."""
        nodes = range(self.nodes) if node is None else [self._checked(node)]
        # Linux limits what leaves a device: the node's sending at its NIC, its receiving at the
        # switch's port to it.
        for one in nodes:
            batch("tc", [namespaces.limit("eth0", rate)], self._names[one])
        batch("tc", [namespaces.limit(f"port{one}", rate) for one in nodes], self._switch)

    def counters(self, node: int) -> Counters:
        """What crossed the node's NIC so far, read inside its network namespace."""
        holder = self._holders[self._checked(node)]
        table = Path(f"/proc/{holder.pid}/net/dev").read_text()
        numbers = [int(text) for text in table.partition("eth0:")[2].split("\n")[0].split()]
        rx_bytes, rx_packets, tx_bytes, tx_packets = (numbers[i] for i in (0, 1, 8, 9))
        return Counters(tx_bytes, tx_packets, rx_bytes, rx_packets)

    def _checked(self, node: int) -> int:
        if not 0 <= node < self.nodes:
            raise ValueError(f"node {node}: the nodes of this cluster are 0 to {self.nodes - 1}.")
        return node
