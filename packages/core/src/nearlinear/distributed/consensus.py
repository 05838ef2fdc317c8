"""Agreement between ranks: the same values, decision, or error on every rank.

Two transports, both without pickle:

- Collectives, for calls that all ranks make at the same point: `all_gather_ints`,
  `all_gather_json`, `broadcast_json`, and `raise_on_all_ranks`.
- The TCP store of the job, for background threads, which must not use collectives, and for waits
  that have to end when a peer dies: `StoreChannel` and `StoreBarrier`.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .._torch import all_gather
from ..errors import CheckpointDamaged, CheckpointError, NearlinearError
from . import runtime

POLL_INTERVALS = 0.02, 0.5
"""Seconds between polls of the store: the first interval, and the limit of its growth."""


def all_gather_ints(
    values: Sequence[int], device: torch.device, group: dist.ProcessGroup | None = None
) -> list[list[int]]:
    """Return the ``values`` of every rank of ``group``, in rank order. A collective call.

    All ranks must pass the same number of values.
    """
    mine = torch.tensor(list(values), dtype=torch.int64, device=device)
    gathered = mine.new_empty(dist.get_world_size(group) * len(mine))
    all_gather(gathered, mine, group=group)
    return gathered.view(-1, len(mine)).tolist()


def all_gather_json(value: Any) -> list[Any]:
    """Return the JSON-serializable ``value`` of every rank, in rank order. A collective call."""
    device = runtime.collective_device()
    text = bytearray(json.dumps(value).encode())
    longest = max(size for (size,) in all_gather_ints([len(text)], device))
    text.extend(b" " * (longest - len(text)))  # JSON ignores trailing white space
    mine = torch.frombuffer(text, dtype=torch.uint8).to(device)
    gathered = torch.empty(dist.get_world_size() * longest, dtype=torch.uint8, device=device)
    all_gather(gathered, mine)
    return [json.loads(part.numpy().tobytes()) for part in gathered.cpu().split(longest)]


def broadcast_json(value: Any) -> Any:
    """Return the JSON-serializable ``value`` of rank 0 on every rank. A collective call."""
    device = runtime.collective_device()
    text = json.dumps(value).encode() if dist.get_rank() == 0 else b""
    size = torch.tensor([len(text)], device=device)
    dist.broadcast(size, 0)
    data = torch.frombuffer(bytearray(text.ljust(int(size))), dtype=torch.uint8).to(device)
    dist.broadcast(data, 0)
    return json.loads(data.cpu().numpy().tobytes())


@contextlib.contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """Raise CheckpointError on all ranks after the block if it raised NearlinearError on one.

    The error is CheckpointDamaged if all failing ranks raised it.

    A collective call. A block with collectives of its own must fail after the last of them.
    """
    failed, damaged = "", False
    try:
        yield
    except NearlinearError as error:
        failed, damaged = str(error), isinstance(error, CheckpointDamaged)
    failures = [each for each in all_gather_json([failed, damaged]) if each[0]]
    others = [reason for reason, damage in failures if not damage]
    if others:
        raise CheckpointError(others[0])
    if failures:
        raise CheckpointDamaged(failures[0][0])


class RankUnreachable(Exception):
    """Rank ``rank`` has not responded for as long as it was waited for."""

    def __init__(self, rank: int):
        super().__init__(f"rank {rank} does not respond")
        self.rank = rank


ShouldWait = Callable[[int], bool]
"""Return True while it makes sense to wait for a rank."""


def clone_store(store: dist.Store) -> dist.Store:
    """Open a separate connection to the process of ``store``."""
    return store.clone()  # pyright: ignore[reportAttributeAccessIssue]  # missing in torch's stubs


class StoreChannel:
    """Text in the job's store, under a common prefix. No method waits for a value.

    Args:
        store: Connection to the job's store.
        name: Prefix of the keys.
        own_connection: Open a new connection. Needed unless ``store`` is one already: a blocking
            wait of another thread blocks all users of its connection.
    """

    def __init__(self, store: dist.Store, name: str, own_connection: bool = True):
        self._store = clone_store(store) if own_connection else store
        self._prefix = f"nearlinear/{name}"

    def set(self, key: str, text: str) -> None:
        """Store ``text``."""
        self._store.set(self._key(key), text)

    def get(self, key: str) -> str | None:
        """Return the text of ``key``, or None if it is not set."""
        full = self._key(key)
        return self._store.get(full).decode() if self._store.check([full]) else None

    def set_first(self, key: str, text: str) -> str:
        """Store ``text`` unless ``key`` is set; return the stored text, equal on all ranks."""
        return self._store.compare_set(self._key(key), "", text).decode()

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0, and return the sum."""
        return self._store.add(self._key(key), amount)

    def delete(self, key: str) -> None:
        """Remove ``key``."""
        self._store.delete_key(self._key(key))

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"


class StoreBarrier:
    """Agreement of all ranks on values by way of rank 0, which tolerates ranks that die.

    Rank 0 collects all values and publishes one result, so that store traffic grows linearly with
    the number of ranks. All ranks make the same calls in the same order.

    Args:
        store: Connection to the job's store that no other thread uses.
        name: Unique name of the barrier, equal on all ranks.
        rank: This rank.
        world: Number of ranks.
    """

    def __init__(self, store: dist.Store, name: str, rank: int, world: int):
        self.rank, self.world = rank, world
        self._channel = StoreChannel(store, name, own_connection=False)

    def agree(
        self,
        subject: str,
        value: Any,
        should_wait: ShouldWait,
        reduce: Callable[[list[Any]], Any] = list,
    ) -> Any:
        """Return ``reduce`` of the JSON values of all ranks, computed on rank 0, on every rank.

        Args:
            subject: Name of this agreement within the barrier.
            value: JSON-serializable value of this rank.
            should_wait: Called with a rank while its value is missing.
            reduce: Function of the list of values in rank order.

        Raises:
            RankUnreachable: A rank did not respond. Raised on all ranks alike, unless rank 0 is
                the one that did not respond.
        """
        self.send(subject, value)
        if self.rank == 0:
            try:
                self.publish(subject, {"agreed": reduce(self._collect(subject, should_wait))})
            except RankUnreachable as error:
                self.publish(subject, {"unreachable": error.rank})
        answer = self._wait(f"{subject}/all", 0, should_wait)
        if "unreachable" in answer:
            raise RankUnreachable(answer["unreachable"])
        return answer["agreed"]

    def send(self, subject: str, value: Any) -> None:
        """Send this rank's value to rank 0."""
        self._channel.set(f"{subject}/{self.rank}", json.dumps(value))

    def publish(self, subject: str, value: Any) -> None:
        """Publish a result to all ranks. Call on rank 0."""
        self._channel.set(f"{subject}/all", json.dumps(value))

    def forget(self, *subjects: str) -> None:
        """Delete published results that all ranks have read. Call on rank 0."""
        for subject in subjects:
            self._channel.delete(f"{subject}/all")

    def _collect(self, subject: str, should_wait: ShouldWait) -> list[Any]:
        values = []
        for rank in range(self.world):
            values.append(self._wait(f"{subject}/{rank}", rank, should_wait))
            self._channel.delete(f"{subject}/{rank}")
        return values

    def _wait(self, key: str, rank: int, should_wait: ShouldWait) -> Any:
        """Poll for the value of ``rank``: a blocking wait could not end when the rank dies."""
        interval, limit = POLL_INTERVALS
        while (text := self._channel.get(key)) is None:
            if not should_wait(rank):
                raise RankUnreachable(rank)
            time.sleep(interval)
            interval = min(2 * interval, limit)
        return json.loads(text)
