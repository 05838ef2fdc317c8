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
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from ..config.parallel import HOST_MEMORY_BACKEND

log = logging.getLogger(__name__)

SLICE = timedelta(seconds=0.2)
"""Time between looks at an abort while an operation of gloo is waited for."""
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
        self.position, self.size = position, size
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
    ) -> None:
        """Send each member its part of ``input`` (E,); sizes as in ``all_to_all_single``."""
        if self.size == 1:
            output.copy_(input)
        else:
            self._wait(self._group.alltoall_base(output, input, list(received), list(sent)))

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """Gather ``input`` (E,) of every member into ``output`` (size * E,)."""
        if self.size == 1:
            output.copy_(input)
        else:
            self._wait(self._group._allgather_base(output, input))

    def abort(self) -> None:
        """Make operations in progress, and all later ones, raise RuntimeError."""
        self._aborted.set()
        if not self._polls and self._group is not None:
            self._group.abort()

    def _wait(self, work: Any) -> None:
        if not self._polls:
            work.wait()
            return
        while True:
            if self._aborted.is_set():
                raise RuntimeError("the process group was aborted")
            try:
                work.wait(SLICE)
                return
            except RuntimeError:
                if work.is_completed():
                    raise


class ReplicaSum:
    """The sums of one rank.

    Args:
        replicas: Number of replicas of the undisturbed job.
        on_failure: Called once when a sum fails, by the thread that runs it.
    """

    def __init__(self, replicas: int, on_failure: Callable[[str], None]):
        self.replicas = replicas
        self.failed: str = "no group"
        """Why the sums of the step are incomplete, or an empty string."""
        self.targets: dict[int, float] = {}
        """Target tokens of the step by replica, of those that this member computes."""
        self.total_targets: float = 0.0
        """Target tokens of the step on all replicas, known after the first sum."""
        self.computing: int = 0
        """The replica whose gradients are being computed."""
        self.group: ReplicaGroup | None = None
        self._on_failure = on_failure
        self._hosts: list[list[int]] = []
        self._position = 0
        self._held: dict[Any, dict[int, torch.Tensor]] = {}
        self._weights: dict[int, float] | None = None

    def install(
        self, connect: Callable[[], ReplicaGroup], position: int, hosts: Sequence[Sequence[int]]
    ) -> bool:
        """Connect a new group, whose member m computes the replicas ``hosts[m]``.

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
        if made and isinstance(made[0], ReplicaGroup):
            self.group = made[0]
        else:
            self.fail(f"no process group: {made[0] if made else ''}".partition("\n")[0])
        return not self.failed

    @property
    def own(self) -> list[int]:
        """Replicas that this member computes, in order."""
        return self._hosts[self._position]

    def begin_step(self) -> None:
        """Forget the sums of the last step, or of a failed attempt."""
        self.targets, self.total_targets, self._weights = {}, 0.0, None
        self._held.clear()

    def fail(self, reason: str) -> None:
        """Give the step up: sums in progress and later ones do nothing."""
        if self.failed:
            return
        self.failed = reason
        if self.group is not None:
            self.group.abort()
        self._on_failure(reason)

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
        try:
            self._sum({**held, self.computing: gradients}, gradients)
        except Exception as error:  # of a lost peer, in the backend's own type
            self.fail(str(error).partition("\n")[0])

    def end_replica(self) -> None:
        """End the computation of a replica: if it was the last one, all targets are known."""
        if self.computing == self.own[-1]:
            try:
                self.exchange_targets()
            except Exception as error:
                self.fail(str(error).partition("\n")[0])

    def exchange_targets(self) -> None:
        """Learn the targets of all replicas, once in a step, after the last one has begun."""
        if self._weights is not None or self.failed:
            return
        assert self.group is not None
        own = torch.zeros(self.replicas, dtype=torch.float64)
        for replica, count in self.targets.items():
            own[replica] = count
        table = own.new_empty(self.group.size * self.replicas)
        self.group.all_gather(table, own)
        counts = table.view(self.group.size, -1).sum(0).tolist()
        present = sorted(replica for replicas in self._hosts for replica in replicas)
        self.total_targets = sum(counts)
        if len({counts[replica] for replica in present}) == 1:
            self._weights = {}
        else:
            self._weights = {r: counts[r] / self.total_targets for r in present}

    def _sum(self, parts: dict[int, torch.Tensor], result: torch.Tensor) -> None:
        """Put the weighted mean of ``parts`` of all members into ``result``."""
        group, own = self.group, self.own
        assert group is not None
        self.exchange_targets()
        for replica, weight in (self._weights or {}).items():
            if replica in parts:
                parts[replica].mul_(weight)
        flat = result.view(-1)
        length = -(-flat.numel() // group.size)
        whole = flat.numel() == length * group.size
        if whole and len(own) == 1:
            sent = flat
        else:
            rows = flat.new_zeros(len(own), length * group.size)
            for row, replica in zip(rows, own, strict=True):
                row[: flat.numel()].copy_(parts[replica].view(-1))
            sent = rows.view(len(own), group.size, length).transpose(0, 1).contiguous().view(-1)
        order = [replica for replicas in self._hosts for replica in replicas]
        received = flat.new_empty(len(order), length)
        group.all_to_all(
            received.view(-1),
            sent,
            [len(replicas) * length for replicas in self._hosts],
            [len(own) * length] * group.size,
        )
        by_replica = {replica: received[place] for place, replica in enumerate(order)}
        total, *others = (by_replica[replica] for replica in sorted(order))
        for other in others:
            total += other
        if not self._weights:
            total *= 1.0 / len(order)
        if whole:
            group.all_gather(flat, total)
        else:
            gathered = flat.new_empty(length * group.size)
            group.all_gather(gathered, total)
            flat.copy_(gathered[: flat.numel()])
