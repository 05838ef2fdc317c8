"""Sum of gradients over all replicas in a fixed order, independent of who computed them.

A replica that is lost is computed by others, so that a member holds the gradients of one or of
several replicas. Each member adds one part of a unit's gradients: all parts of all replicas come to
it in an all-to-all, it adds them in the order of the replicas, and an all-gather returns the sum.
Every element is the same chain of additions on any members, so that the bits are equal. The bytes
are those of an all-reduce.

A failure does not raise. It is kept in `failed`, later sums do nothing, and the ranks of a replica
stay in step with each other until the replicas agree to compute the step again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from ..config.parallel import HOST_MEMORY_BACKEND

log = logging.getLogger(__name__)

SLICE = timedelta(seconds=0.2)
"""Time between looks at an abort while an operation of gloo is waited for."""
CHUNK = 1 << 20
"""Elements that are sent and added at a time."""
GROUP_TIMEOUT = timedelta(minutes=30)
"""Longest wait of a replica for another one that lives; losses are noticed elsewhere."""


class ReplicaGroup:
    """The ranks with one index inside of their replicas, a rank for each member of the job.

    Args:
        backend: ``gloo`` or ``nearlinear``.
        store: Store through which the ranks meet, used by no other group.
        position: Index of the own member.
        size: Number of members.
    """

    def __init__(self, backend: str, store: dist.Store, position: int, size: int):
        self.position: int = position
        self.size: int = size
        self._aborted = threading.Event()
        self._polls = backend != HOST_MEMORY_BACKEND
        self._group: Any = None
        if size == 1:
            return
        if backend == HOST_MEMORY_BACKEND:
            from nearlinear_collectives.backend import create_backend

            options = SimpleNamespace(store=store, group_rank=position, group_size=size,
                                      timeout=GROUP_TIMEOUT, group_id="replicas",
                                      global_ranks_in_group=[])  # fmt: skip
            self._group = create_backend(options)
        else:
            self._group = dist.ProcessGroupGloo(store, position, size, GROUP_TIMEOUT)

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        received: Sequence[int] = (),
        sent: Sequence[int] = (),
    ) -> Callable[[], None]:
        """Send each member its part of ``input`` (E,); sizes as in ``all_to_all_single``.

        Returns a function that waits for the end.
        """
        if self.size == 1:
            output.copy_(input)
            return lambda: None
        work = self._group.alltoall_base(output, input, list(received), list(sent))
        return lambda: self._wait(work)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Callable[[], None]:
        """Gather ``input`` (E,) of every member into ``output`` (size * E,).

        Returns a function that waits for the end.
        """
        if self.size == 1:
            output.copy_(input)
            return lambda: None
        work = self._group._allgather_base(output, input)
        return lambda: self._wait(work)

    def abort(self) -> None:
        """Make operations in progress, and all later ones, raise RuntimeError."""
        self._aborted.set()
        if not self._polls and self._group is not None:
            self._group.abort()

    def _wait(self, work: Any) -> None:
        if not self._polls:
            work.wait()
            return
        while not work.is_completed():
            if self._aborted.is_set():
                raise RuntimeError("the process group was aborted")
            with suppress(RuntimeError):  # also raised if it is only late
                work.wait(SLICE)
        work.wait()


class ReplicaSum:
    """The sums of one rank.

    Args:
        replicas: Number of replicas of the undisturbed job.
        on_failure: Called once when a sum fails, by the thread that runs it.
    """

    def __init__(self, replicas: int, on_failure: Callable[[str], None]):
        self.replicas: int = replicas
        self.failed: str = "no group"
        """Why the sums of the step are incomplete, or an empty string."""
        self.targets: dict[int, float] = {}
        """Target tokens of the step by replica, of those that this member computes."""
        self.computing: int = 0
        """The replica whose gradients are being computed."""
        self.group: ReplicaGroup | None = None
        self._on_failure = on_failure
        self._hosts: list[list[int]] = []
        self._position = 0
        self._held: dict[Any, dict[int, torch.Tensor]] = {}
        self._weights: dict[int, float] | None = None

    def install(
        self,
        connect: Callable[[], ReplicaGroup],
        missing: Callable[[], str],
        position: int,
        hosts: Sequence[Sequence[int]],
    ) -> bool:
        """Connect a new group, whose member m computes the replicas ``hosts[m]``.

        Args:
            connect: Returns the group, once all members have called it.
            missing: Returns why a member will not come, or an empty string. Asked all the time.
            position: Index of the own member.
            hosts: Replicas that each member computes.

        Returns:
            False if that failed, because a member was lost meanwhile.
        """
        held = [self.group]
        self.group, self.failed = None, ""
        # on a thread that has the last reference: an operation with a suspended process delays the
        # end of a group
        threading.Thread(target=held.clear, name="end of a group", daemon=True).start()
        self._hosts, self._position = [sorted(replicas) for replicas in hosts], position
        self._held.clear()
        made: list[ReplicaGroup | Exception] = []

        def run() -> None:
            try:
                made.append(connect())
            except Exception as error:
                made.append(error)

        thread = threading.Thread(target=run, name="replica group", daemon=True)
        thread.start()
        while thread.is_alive() and not self.failed:
            thread.join(0.02)
            if reason := missing():
                self.fail(reason)
        if made and isinstance(made[0], ReplicaGroup):
            self.group = made[0]
        else:
            self.fail(f"no process group: {made[0] if made else ''}")
        return not self.failed

    @property
    def own(self) -> list[int]:
        """Replicas that this member computes, in order."""
        return self._hosts[self._position]

    def begin_step(self) -> None:
        """Forget the sums of the last step, or of a failed attempt."""
        self.targets, self._weights = {}, None
        self._held.clear()

    def fail(self, reason: str) -> None:
        """Give the step up: sums in progress and later ones do nothing."""
        if self.failed:
            return
        self.failed = reason.partition("\n")[0]
        if self.group is not None:
            self.group.abort()
        self._on_failure(self.failed)

    @contextmanager
    def failing(self, what: str = "") -> Iterator[None]:
        """Give the step up, instead of raising, if the block raises an error after ``what``."""
        try:
            yield
        except Exception as error:  # of a lost peer, in the backend's own type
            self.fail(f"{what}{error}")

    def add(self, key: Any, gradients: torch.Tensor) -> None:
        """Take the ``gradients`` (E,) of one unit and replica; the last replica's become the mean.

        Args:
            key: Identifies the unit, equal for all replicas of this member.
            gradients: Mean over the targets of replica `computing`. Kept by reference.
        """
        if self.failed:
            return
        if self.computing != self.own[-1]:
            self._held.setdefault(key, {})[self.computing] = gradients
            return
        held = self._held.pop(key, {})
        with self.failing():
            self._sum({**held, self.computing: gradients}, gradients)

    def end_replica(self) -> None:
        """End the computation of a replica: if it was the last one, all targets are known."""
        if self.computing == self.own[-1]:
            with self.failing():
                self._exchange_targets()

    def gather_rows(self, rows: torch.Tensor) -> None:
        """Fill the rows (replicas, N) of replicas that other members compute, in place."""
        if self.failed or self.group is None:
            return
        with self.failing():
            own = rows.cpu()
            table = own.new_empty(self.group.size, *own.shape)
            self.group.all_gather(table.view(-1), own.view(-1))()
            for of_member, replicas in zip(table, self._hosts, strict=True):
                rows[replicas] = of_member[replicas].to(rows.device)

    def _exchange_targets(self) -> None:
        """Learn the targets of all replicas, once in a step, after the last one has begun."""
        if self._weights is not None or self.failed:
            return
        assert self.group is not None
        own = torch.zeros(self.replicas, dtype=torch.float64)
        for replica, count in self.targets.items():
            own[replica] = count
        table = own.new_empty(self.group.size * self.replicas)
        self.group.all_gather(table, own)()
        counts = table.view(self.group.size, -1).sum(0).tolist()
        present = sorted(replica for replicas in self._hosts for replica in replicas)
        if len({counts[replica] for replica in present}) == 1:
            self._weights = {}
        else:
            self._weights = {r: counts[r] / sum(counts) for r in present}

    def _sum(self, parts: dict[int, torch.Tensor], result: torch.Tensor) -> None:
        """Put the weighted mean of ``parts`` of all members into ``result``.

        Chunk by chunk, so that one chunk is on its way while another one is added.
        """
        self._exchange_targets()
        for replica, weight in (self._weights or {}).items():
            if replica in parts:
                parts[replica].mul_(weight)
        own = [parts[replica].view(-1).split(CHUNK) for replica in self.own]
        chunks = result.view(-1).split(CHUNK)
        arriving: list[tuple[torch.Tensor, Callable[[], None]]] = []
        ends: list[Callable[[], None]] = []
        for number in range(len(chunks) + 1):
            if number < len(chunks):
                arriving.append(self._send([rows[number] for rows in own]))
            if number:
                ends.append(self._add_and_gather(*arriving.pop(0), chunks[number - 1]))
        for end in ends:
            end()

    def _send(self, rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        """Send the parts of a chunk (E,), a row for each own replica, to those that add them.

        Returns the parts that arrive, (replicas, part), and a function that waits for them.
        """
        group = self.group
        assert group is not None
        size = rows[0].numel()
        length = -(-size // group.size)
        if size == length * group.size and len(rows) == 1:
            sent = rows[0]
        else:
            padded = rows[0].new_zeros(len(rows), length * group.size)
            padded[:, :size] = torch.stack(list(rows))
            sent = padded.view(len(rows), group.size, length).transpose(0, 1).reshape(-1)
        received = sent.new_empty(sum(map(len, self._hosts)), length)
        of_members = [len(replicas) * length for replicas in self._hosts]
        parts = [len(rows) * length] * group.size
        return received, group.all_to_all(received.view(-1), sent, of_members, parts)

    def _add_and_gather(
        self, received: torch.Tensor, arrived: Callable[[], None], result: torch.Tensor
    ) -> Callable[[], None]:
        """Add the parts in the order of their replicas, and gather the sums into ``result``.

        Returns a function that waits for the end.
        """
        group = self.group
        assert group is not None
        arrived()
        order = [replica for replicas in self._hosts for replica in replicas]
        total, *others = (received[order.index(replica)] for replica in sorted(order))
        for other in others:
            total += other
        if not self._weights:
            total *= 1.0 / len(order)
        if result.numel() == total.numel() * group.size:
            return group.all_gather(result, total)
        gathered = total.new_empty(total.numel() * group.size)
        gather = group.all_gather(gathered, total)

        def end() -> None:
            gather()
            result.copy_(gathered[: result.numel()])

        return end
