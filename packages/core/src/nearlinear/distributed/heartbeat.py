"""Heartbeats: the current operation of each rank, exchanged through the job's store.

Each rank writes its own `Heartbeat` and reads that of rank 0, which reads all of them. The first
`Fault` of the job is stored once and read by every rank.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import functools
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, TypeVar

import torch.distributed as dist

from ..errors import RankFailure
from . import process_exit
from .consensus import StoreChannel

STORE_ERRORS = (dist.DistError, RuntimeError)
"""Exceptions raised by a store whose process has ended."""

_SHARED_NAME = "nearlinear-operation"
_CRASH_OFFSET, _CRASH_LIMIT = 4096, 1 << 16
"""Place of the crash report in the copy of an operation, and its largest size, in bytes."""

FaultKind = Literal["dead", "stalled", "exited", "deadlock", "failed", "store_lost"]


@dataclass(frozen=True)
class Fault:
    """The first fault of a job, identical on every rank."""

    kind: FaultKind
    rank: int | None
    """The faulty rank, or None if no single rank is to blame."""
    text: str
    """One line with cause and remedy."""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Fault:
        return cls(**json.loads(text))

    def error(self, more: str = "") -> RankFailure:
        """Build the exception raised on healthy ranks.

        Args:
            more: Text appended to the message, e.g. the result of the emergency checkpoint.
        """
        dead_rank = self.rank if self.kind == "dead" else None
        message = self.text
        if more:
            full_stop = message.endswith(".")
            message += f" {more[0].upper()}{more[1:]}" if full_stop else f"; {more}"
        return RankFailure(message, restart=self.kind != "failed", dead_rank=dead_rank)


class Operation:
    """Current operation of this rank, written by its main thread and read by its watchdog.

    On Linux, a copy in anonymous memory survives the process as long as a peer has it open.
    Heartbeats are too rare to tell where a rank died. Python's fault handler adds the stack of a
    process that crashes.
    """

    def __init__(self):
        self.name: str = "start of the run"
        self.detail: str = ""
        self.patience: float = 1.0
        self.index: int = 0
        self.progress: int = 0
        self.since: float = time.monotonic()
        self.shared_fd: int = -1
        """Descriptor of the copy in this process, or -1."""
        self._reports_crashes = False

    def share(self) -> None:
        """Create the copy that peers on this machine can open."""
        if self.shared_fd >= 0 or not hasattr(os, "memfd_create") or not pid_namespace():
            return
        self.shared_fd = os.memfd_create(_SHARED_NAME)
        self._publish()
        os.lseek(self.shared_fd, _CRASH_OFFSET, os.SEEK_SET)
        self._reports_crashes = not faulthandler.is_enabled()
        if self._reports_crashes:  # otherwise the program has chosen another file
            faulthandler.enable(self.shared_fd)

    def close(self) -> None:
        """Close the copy."""
        if self._reports_crashes:
            faulthandler.disable()
            self._reports_crashes = False
        if self.shared_fd >= 0:
            os.close(self.shared_fd)
            self.shared_fd = -1

    @property
    def place(self) -> str:
        """Name and detail of the operation."""
        return f"{self.name}, {self.detail}" if self.detail else self.name

    def begin(self, name: str, patience: float = 1.0) -> None:
        """Start the next operation. All ranks start the same operations in the same order."""
        self.name, self.detail, self.patience = name, "", patience
        self.index += 1
        self.progress, self.since = 0, time.monotonic()
        self._publish()

    def advance(self, detail: str) -> None:
        """Record progress inside the current operation, e.g. the name of the next block."""
        self.detail = detail
        self.progress += 1
        self.since = time.monotonic()
        self._publish()

    def _publish(self) -> None:
        if self.shared_fd >= 0:
            line = f"{self.index} {self.progress} {self.since!r} {self.place}\n"
            os.pwrite(self.shared_fd, line.encode()[:_CRASH_OFFSET], 0)


@dataclass(frozen=True)
class Heartbeat:
    """One message of a rank to the others."""

    sequence: int
    """Monotonic counter. Peers treat an unchanged value as a missed heartbeat."""
    host: str
    pid: int
    pid_namespace: str
    """Ranks in the same namespace can check each other's processes by ``pid``."""
    operation: str
    operation_index: int
    """Number of operations started."""
    progress: int
    """Steps of progress inside the current operation."""
    seconds_since_progress: float
    patience: float
    """Factor by which the current operation may exceed the usual timeout."""
    in_collective: bool
    source_line: str
    exited: bool = False
    """True if the rank left the run and sends no more heartbeats."""
    collective_failed: bool = False
    """True if a collective raised an error on this rank, e.g. because a peer died."""
    shared_fd: int = -1
    """Descriptor of `Operation`'s copy in the rank's process, or -1."""
    thread: int = 0
    """Identifier of the watched thread."""
    crash: str = ""
    """Report of Python's fault handler, read from that copy."""
    current: bool = False
    """True if the operation was read from that copy, because no newer heartbeat came."""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Heartbeat:
        return cls(**json.loads(text))

    def __str__(self) -> str:
        where = f" ({self.source_line})" if self.source_line else ""
        return f'"{self.operation}"{where}'


@dataclass(frozen=True)
class RankStatus:
    """Last known state of one rank."""

    heartbeat: Heartbeat | None
    """Latest heartbeat, or None before the first one."""
    seconds_since_heartbeat: float
    """Age of the latest heartbeat; before the first one, seconds since the watch started."""
    process_exited: bool = False
    """True if the process is known to have ended."""
    out_of_memory: bool = False
    """True if the kernel has ended a process of this rank's container for lack of memory."""

    @property
    def seconds_since_progress(self) -> float:
        """Seconds without progress; infinite before the first heartbeat."""
        if self.heartbeat is None:
            return float("inf")
        return self.heartbeat.seconds_since_progress + self.seconds_since_heartbeat

    @property
    def stalled_seconds(self) -> float:
        """Seconds without progress, divided by the patience factor of the operation."""
        if self.heartbeat is None:
            return float("inf")
        return self.seconds_since_progress / self.heartbeat.patience


class HeartbeatChannel:
    """Heartbeats and the first fault of one watch, in the store through which the ranks met.

    No method blocks except for the round trip to the store.
    """

    def __init__(self, store: dist.Store, name: str, rank: int):
        self._channel, self._rank = StoreChannel(store, f"watch/{name}"), rank
        self._latest: dict[int, tuple[int, float]] = {}
        self._valid: dict[int, Heartbeat] = {}
        self._shared: dict[int, BinaryIO | None] = {}
        self._started = time.monotonic()
        self._memory_kills = process_exit.memory_kills()

    def send(self, heartbeat: Heartbeat) -> None:
        self._channel.set(str(self._rank), heartbeat.to_json())

    def status(self, rank: int) -> RankStatus:
        """Read the latest heartbeat of ``rank``."""
        return self._status(rank, _parse(Heartbeat, self._channel.get(str(rank))))

    def last_status(self, rank: int, exit_delay: float = 0.0) -> RankStatus:
        """Return the status of ``rank`` from its last known heartbeat, without the store.

        Waits up to ``exit_delay`` seconds for the end of its process: the kernel closes the
        connections of a process before it marks the process as ended.
        """
        deadline = time.monotonic() + exit_delay
        while True:
            status = self._status(rank, None)
            over = status.process_exited or status.heartbeat is None
            if over or time.monotonic() >= deadline:
                return status
            time.sleep(0.05)

    def _status(self, rank: int, heartbeat: Heartbeat | None) -> RankStatus:
        now, heartbeat = time.monotonic(), heartbeat or self._valid.get(rank)
        if heartbeat is None:
            return RankStatus(None, now - self._started)
        self._valid[rank] = heartbeat
        sequence, since = self._latest.get(rank, (0, now))
        if heartbeat.sequence != sequence:
            sequence, since = self._latest[rank] = heartbeat.sequence, now
        visible = heartbeat.pid_namespace == pid_namespace()
        ended = visible and not _is_running(heartbeat.pid)
        if visible and not ended and rank not in self._shared:
            self._shared[rank] = _open_shared(heartbeat)
        late = now - since > _LATE
        if (ended or late) and (shared := self._shared.get(rank)):
            heartbeat = _with_last_operation(heartbeat, shared, now - since)
        out_of_memory = ended and process_exit.memory_kills() > self._memory_kills
        return RankStatus(heartbeat, now - since, ended, out_of_memory)

    def fault(self) -> Fault | None:
        """Read the fault of the job, if any rank has reported one."""
        return _parse(Fault, self._channel.get("fault"))

    def report(self, fault: Fault) -> Fault:
        """Report a fault; return the first fault that any rank reported."""
        return _parse(Fault, self._channel.set_first("fault", fault.to_json())) or fault

    def acknowledge(self) -> None:
        """Count this rank among those that have handled the fault."""
        self._channel.add("acknowledged", 1)

    def acknowledged(self) -> int:
        """Number of ranks that have handled the fault."""
        return self._channel.add("acknowledged", 0)


_LATE = 2.5
"""Seconds without a heartbeat, after which the copy of the operation is newer."""
_Message = TypeVar("_Message", Heartbeat, Fault)


def _parse(kind: type[_Message], text: str | None) -> _Message | None:
    """Parse a message, or return None for a missing one and for text of another program."""
    if text is None:
        return None
    try:
        return kind.from_json(text)
    except (ValueError, TypeError):
        return None


def _open_shared(heartbeat: Heartbeat) -> BinaryIO | None:
    """Open the copy of a peer's operation. None if there is none, or access is refused."""
    path = f"/proc/{heartbeat.pid}/fd/{heartbeat.shared_fd}"
    try:
        if heartbeat.shared_fd >= 0 and _SHARED_NAME in os.readlink(path):
            return open(path, "rb", buffering=0)
    except OSError:
        pass
    return None


def _with_last_operation(heartbeat: Heartbeat, shared: BinaryIO, age: float) -> Heartbeat:
    """Return the heartbeat of a silent peer with the operation in which it stopped."""
    line = os.pread(shared.fileno(), _CRASH_OFFSET, 0).partition(b"\n")[0].decode(errors="replace")
    index, progress, since, operation = line.split(" ", 3)
    same = int(index) == heartbeat.operation_index and int(progress) == heartbeat.progress
    return dataclasses.replace(
        heartbeat,
        operation=operation,
        operation_index=int(index),
        progress=int(progress),
        seconds_since_progress=max(0.0, time.monotonic() - float(since) - age),
        source_line=heartbeat.source_line if same else "",
        crash=os.pread(shared.fileno(), _CRASH_LIMIT, _CRASH_OFFSET).decode(errors="replace"),
        current=True,
    )


@functools.cache
def pid_namespace() -> str:
    """Identify the set of processes that see each other by pid; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _is_running(pid: int) -> bool:
    """Return False for a process of this namespace that has ended, zombies included."""
    if not pid_namespace():
        return True
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return True
    return status.rpartition(")")[2].split()[0] not in "ZX"
