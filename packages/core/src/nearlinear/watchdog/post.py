"""How ranks hear of each other: beats and one alarm in the store by which the job's ranks met."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path

import torch.distributed as dist

from .alarm import Alarm
from .beat import Beat
from .judge import Seen

StoreError = (dist.DistError, RuntimeError)
"""what a store raises whose process is gone"""


class Post:
    """One watch's. Nothing here blocks, other than for an answer of the store."""

    def __init__(self, store: dist.Store, name: str, rank: int):
        self._store = store.clone()  # a connection of its own: other threads wait on theirs
        self._name, self._rank = f"nearlinear/watch/{name}", rank
        self._heard: dict[int, tuple[int, float]] = {}
        self._began = time.monotonic()

    def tell(self, beat: Beat) -> None:
        self._store.set(self._key(self._rank), beat.to_json())

    def seen(self, rank: int) -> Seen:
        """What is known of ``rank`` now."""
        text, now = self._look(self._key(rank)), time.monotonic()
        if text is None:
            return Seen(None, now - self._began)
        beat = Beat.from_json(text)
        number, since = self._heard.get(rank, (0, now))
        if beat.number != number:
            number, since = self._heard[rank] = beat.number, now
        return Seen(beat, now - since, beat.house == house() and not _is_running(beat.pid))

    def alarm(self) -> Alarm | None:
        """The alarm that some rank has raised."""
        text = self._look(self._key("alarm"))
        return None if text is None else Alarm.from_json(text)

    def raise_alarm(self, alarm: Alarm) -> Alarm:
        """The alarm of the job: this one, if it is the first."""
        text = alarm.to_json()
        return Alarm.from_json(self._store.compare_set(self._key("alarm"), "", text))

    def hear_out(self) -> None:
        """Say that this rank has dealt with the alarm."""
        self._store.add(self._key("heard"), 1)

    def heard_out(self) -> int:
        """The ranks that have."""
        return self._store.add(self._key("heard"), 0)

    def _key(self, what) -> str:
        return f"{self._name}/{what}"

    def _look(self, key: str) -> bytes | None:
        return self._store.get(key) if self._store.check([key]) else None


@functools.cache
def house() -> str:
    """What processes have in common that see each other by their ids; empty: unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _is_running(pid: int) -> bool:
    """Of a process of this house; one that has ended and is not yet waited for is not."""
    if not house():
        return True
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return True
    return status.rpartition(")")[2].split()[0] not in "ZX"
