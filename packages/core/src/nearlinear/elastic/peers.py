"""Connections between the first ranks of all replicas, which also notice that one is lost.

Each first rank dials every other one and sends on that connection only: lines of JSON, first who it
is, then heartbeats and messages. It reads from the connections that it accepted. A process that the
kernel ends closes its connections at once. One that is stopped, or cut off from the network, is
silent. There is no store, and no rank whose death would end the others.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

log = logging.getLogger(__name__)

DIAL_INTERVAL, DIAL_TIMEOUT = 0.2, 1.0  # seconds
CHECK_INTERVAL = 0.05
"""Seconds between checks for lost peers."""
LONGEST_LINE = 1 << 24
"""Bytes of the longest message; a longer line ends the connection."""

Member = tuple[int, str]
"""A replica and the incarnation of its first rank: a restarted replica is another member."""


@dataclass
class Peer:
    """Knowledge about the newest incarnation of another replica's first rank."""

    incarnation: str = ""
    status: dict[str, Any] = field(default_factory=dict)
    """The latest heartbeat."""
    heard: float = 0.0
    """Time of the latest message, by `time.monotonic`."""
    reading: bool = False
    """True while the connection from this peer is open."""
    lost: str = ""
    """Reason why this incarnation is lost, or an empty string."""
    certain: bool = False
    """True if it is lost for sure: its process closed the connection, or it said goodbye."""


class Peers:
    """The connections of one first rank.

    Args:
        replica: Index of the own replica.
        addresses: (host, port) of the first rank of every replica, by index.
        run: Name of the run; connections of other runs are refused.
        incarnation: Unique name of this process.
        silence: Seconds without a message after which a peer is lost.
        on_message: Called by a reading thread with a member and its message.
        on_loss: Called once with a member that is lost and the reason.
    """

    def __init__(
        self,
        replica: int,
        addresses: Sequence[tuple[str, int]],
        run: str,
        incarnation: str,
        silence: float,
        on_message: Callable[[Member, Mapping[str, Any]], None],
        on_loss: Callable[[Member, str], None],
    ):
        self.replica: int = replica
        self.addresses: list[tuple[str, int]] = list(addresses)
        self.silence: float = silence
        self.run: str = run
        self.incarnation: str = incarnation
        self.status: dict[str, Any] = {}
        """Sent with every heartbeat."""
        self.fenced: str = ""
        """Reason why this process must not go on: it was cut off, and others may have."""
        self.excluded: set[Member] = set()
        """Members without which the others have gone on. They are told so if they come back."""
        self.changed: threading.Condition = threading.Condition()
        """Notified after every message and loss."""
        self._on_message, self._on_loss = on_message, on_loss
        self._peers = {i: Peer() for i in range(len(self.addresses)) if i != replica}
        self._outgoing: dict[int, socket.socket] = {}
        self._incoming: set[socket.socket] = set()
        self._sending = {i: threading.Lock() for i in self._peers}
        self._beat = min(0.5, silence / 8)
        self._closed = threading.Event()
        host, port = self.addresses[replica]
        self._server = socket.create_server((host, port), backlog=64)

    def start(self) -> None:
        """Begin to accept and to dial; `status` is set."""
        for target, arguments in (
            (self._accept, ()),
            (self._check, ()),
            *((self._dial, (peer,)) for peer in self._peers),
        ):
            threading.Thread(target=target, args=arguments, name="replicas", daemon=True).start()

    def connected(self) -> dict[Member, dict[str, Any]]:
        """Return the latest status of every other member that can be reached both ways."""
        with self.changed:
            return {
                (index, peer.incarnation): peer.status
                for index, peer in self._peers.items()
                if peer.reading
                and not peer.lost
                and index in self._outgoing
                and self.incarnation in peer.status.get("hears", ())
            }

    def lost(self, member: Member) -> tuple[str, bool]:
        """Return why ``member`` is lost, and whether that is certain; an empty reason if it is not.

        A member of an older incarnation is lost for sure.
        """
        index, incarnation = member
        if index == self.replica:
            return "", False
        peer = self._peers[index]
        if peer.incarnation and peer.incarnation != incarnation:
            return "it was started again", True
        return peer.lost, peer.certain

    def send(self, replica: int, message: Mapping[str, Any]) -> None:
        """Send ``message`` to a replica. A broken connection loses it, and is noticed as a loss."""
        line = json.dumps(message).encode() + b"\n"
        with self._sending[replica]:
            connection = self._outgoing.get(replica)
            if connection is None:
                return
            try:
                connection.sendall(line)
            except OSError:
                self._outgoing.pop(replica, None)
                connection.close()

    def close(self) -> None:
        """Say goodbye and close all connections."""
        for index in self._peers:
            self.send(index, {"goodbye": True})
        self.abandon()

    def abandon(self) -> None:
        """Close all connections, so that the others know at once that this replica is lost."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # ends a waiting accept
        self._server.close()
        for connection in [*self._outgoing.values(), *self._incoming]:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _dial(self, index: int) -> None:
        """Keep a connection to a peer open, and send heartbeats on it."""
        while not self._closed.is_set():
            if index not in self._outgoing:
                with contextlib.suppress(OSError):
                    self._connect(index)
            if index in self._outgoing:
                hears = [peer.incarnation for peer in self._peers.values() if peer.reading]
                self.send(index, {"beat": {**self.status, "hears": hears}})
                self._closed.wait(self._beat)
            else:
                self._closed.wait(DIAL_INTERVAL)

    def _connect(self, index: int) -> None:
        connection = socket.create_connection(self.addresses[index], timeout=DIAL_TIMEOUT)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(self.silence)
        hello = {"run": self.run, "replica": self.replica, "incarnation": self.incarnation}
        connection.sendall(json.dumps(hello).encode() + b"\n")
        with self._sending[index]:
            self._outgoing[index] = connection

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            self._incoming.add(connection)
            threading.Thread(
                target=self._read, args=(connection,), name="replicas", daemon=True
            ).start()

    def _read(self, connection: socket.socket) -> None:
        """Read the messages of one connection until it ends."""
        peer, member = None, (-1, "")
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError), connection:
            connection.settimeout(None)
            lines = connection.makefile("rb")
            hello = json.loads(lines.readline(LONGEST_LINE))
            index, incarnation = int(hello["replica"]), str(hello["incarnation"])
            if hello["run"] != self.run or index not in self._peers:
                log.warning("refused a connection of replica %s of run %s", index, hello["run"])
                return
            member = index, incarnation
            with self.changed:
                peer = self._peers[index]
                if peer.incarnation != incarnation:
                    peer = self._peers[index] = Peer(incarnation)
                peer.reading, peer.heard = True, time.monotonic()
                self.changed.notify_all()
            while (line := lines.readline(LONGEST_LINE)).endswith(b"\n"):
                self._handle(peer, member, json.loads(line))
        self._incoming.discard(connection)
        if peer is not None and not self._closed.is_set():
            with self.changed:
                peer.reading = False
            self._lose(peer, member, "its process has ended", certain=True)

    def _handle(self, peer: Peer, member: Member, message: Mapping[str, Any]) -> None:
        peer.heard = time.monotonic()
        if member in self.excluded:
            self.send(member[0], {"fenced": member[1]})
        if "beat" in message:
            with self.changed:
                peer.status = message["beat"]
                self.changed.notify_all()
        elif "goodbye" in message:
            self._lose(peer, member, "it has left", certain=True)
        elif "fenced" in message:
            if message["fenced"] == self.incarnation and not self.fenced:
                self.fenced = f"replica {member[0]} had lost this replica, and goes on without it"
                with self.changed:
                    self.changed.notify_all()
        else:
            self._on_message(member, message)
            with self.changed:
                self.changed.notify_all()

    def _lose(self, peer: Peer, member: Member, reason: str, certain: bool) -> None:
        with self.changed:
            # news that arrive after this process was suspended may be old
            certain = certain and time.monotonic() - peer.heard < self.silence
            if peer.lost:
                peer.certain = peer.certain or certain
                return
            peer.lost, peer.certain = reason, certain
            self.changed.notify_all()
        self._on_loss(member, reason)

    def _check(self) -> None:
        """Notice peers that are silent, and the suspension of this process itself."""
        before = time.monotonic()
        while not self._closed.wait(CHECK_INTERVAL):
            now = time.monotonic()
            if now - before > self.silence:
                self.fenced = f"this process was suspended for {now - before:.0f} s"
                with self.changed:
                    self.changed.notify_all()
            before = now
            for index, peer in list(self._peers.items()):
                silent = now - peer.heard
                if peer.reading and not peer.lost and silent > self.silence:
                    reason = f"it has been silent for {silent:.1f} s"
                    self._lose(peer, (index, peer.incarnation), reason, certain=False)
