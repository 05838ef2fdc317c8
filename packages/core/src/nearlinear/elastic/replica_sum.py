"""Sum of gradients over all replicas in a fixed order, independent of who computed them.

A replica that is lost is computed by others: by one of them, or every micro-batch by another one,
see `assign_work`. Each member adds one piece of a unit's gradients: this piece of all replicas and
micro-batches comes to it in an all-to-all, it adds them in order, and an all-gather returns the
sum. Every element is the same chain of additions on any members, so that the bits are equal.
Without a loss the bytes are those of an all-reduce.

A failure does not raise. It is kept in `failed`, later sums do nothing, and the ranks of a replica
stay in step with each other until the replicas agree to compute the step again.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..config.parallel import HOST_MEMORY_BACKEND
from ..errors import NearlinearError

log = logging.getLogger(__name__)

SLICE = timedelta(seconds=0.2)
"""Time between looks at an abort while an operation of gloo is waited for."""
CHUNK = 1 << 20
"""Elements that are sent and added at a time."""
GROUP_TIMEOUT = timedelta(minutes=30)
"""Longest wait of a replica for another one that lives; losses are noticed elsewhere."""
WHOLE = -1


class Work(NamedTuple):
    """Micro-batches of a step that a member computes."""

    replica: int
    micro_batch: int = WHOLE
    """Index of a single micro-batch, or `WHOLE` for all of the replica."""


def assign_work(
    replicas: int, members: Sequence[int], mode: str, micro_batches: int = 0
) -> list[list[Work]]:
    """Return the work of each of ``members``: its own replica, and a part of the lost ones.

    Args:
        replicas: Replicas of the undisturbed job.
        members: Replicas that are left.
        mode: ``exact``, or ``rescale`` to leave lost replicas out.
        micro_batches: Micro-batches of a replica that different members may compute; 0 if a lost
            replica must be computed by one member.
    """
    of_members = {member: [Work(member)] for member in members}
    if mode == "exact":
        lost = [index for index in range(replicas) if index not in of_members]
        parts = range(micro_batches) if micro_batches else [WHOLE]
        for position, part in enumerate(Work(index, part) for index in lost for part in parts):
            of_members[members[position % len(members)]].append(part)
    return [sorted(of_members[member]) for member in members]


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
        """Target tokens of the step by replica, of those that this member computes a part of."""
        self.computing: Work = Work(0)
        """The work whose gradients are being computed."""
        self.group: ReplicaGroup | None = None
        self._on_failure = on_failure
        self._work: list[list[Work]] = []
        self._position = 0
        self._rows: dict[int, list[int]] = {}
        self._held: dict[Any, list[torch.Tensor]] = {}
        self._summed: list[tuple[Any, int]] = []
        self._weights: dict[int, float] | None = None

    def install(
        self,
        connect: Callable[[], ReplicaGroup],
        missing: Callable[[], str],
        position: int,
        work: list[list[Work]],
    ) -> bool:
        """Connect a new group, whose member m computes ``work[m]``.

        Args:
            connect: Returns the group, once all members have called it.
            missing: Returns why a member will not come, or an empty string. Asked all the time.
            position: Index of the own member.
            work: As of `assign_work`.

        Returns:
            False if that failed, because a member was lost meanwhile.
        """
        held = [self.group]
        self.group, self.failed = None, ""
        # on a thread that has the last reference: an operation with a suspended process delays the
        # end of a group
        threading.Thread(target=held.clear, name="end of a group", daemon=True).start()
        self._work, self._position = work, position
        every = [each for of_member in work for each in of_member]
        self._rows = {replica: [] for replica in sorted({each.replica for each in every})}
        for each in sorted(every):
            self._rows[each.replica].append(every.index(each))
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
    def own(self) -> list[Work]:
        """The work of this member, in order."""
        return self._work[self._position]

    def begin_step(self) -> None:
        """Forget the sums of the last step, or of a failed attempt."""
        self.targets, self._weights = {}, None
        self._held.clear()
        self._summed.clear()

    def fail(self, reason: str) -> None:
        """Give the step up: sums in progress and later ones do nothing."""
        if self.failed:
            return
        self.failed = reason.partition("\n")[0]
        if self.group is not None:
            self.group.abort()
        self._on_failure(self.failed)

    @contextmanager
    def failing(self, prefix: str = "") -> Iterator[None]:
        """Give the step up if the block raises an error, whose text follows ``prefix``."""
        try:
            yield
        except Exception as error:  # of a lost peer, in the backend's own type
            self.fail(f"{prefix}{error}")

    def add(self, key: Any, gradients: torch.Tensor) -> None:
        """Take the ``gradients`` (E,) of one unit; those of the last work become the mean of all.

        Args:
            key: Identifies the unit, equal for all work of all members.
            gradients: Part of the mean over the targets of a replica. Kept by reference.
        """
        if self.failed:
            return
        self._held.setdefault(key, []).append(gradients)
        if self.computing == self.own[-1]:
            parts = self._held.pop(key)
            self._summed.append((key, gradients.numel()))
            with self.failing():
                self._sum(parts, gradients)

    def end_work(self) -> None:
        """End the computation of some work: if it was the last, all targets are known."""
        if self.computing == self.own[-1]:
            with self.failing():
                self._exchange_targets()

    def gather_rows(self, rows: torch.Tensor) -> None:
        """Fill the rows (replicas, micro-batches, N) of other members, in place.

        Raises NearlinearError if members have not added the same units, each for all of their work.
        """
        if self.failed or self.group is None:
            return
        digest = hashlib.blake2b(repr(self._summed).encode(), digest_size=6).digest()
        summed = 0 if self._held else int.from_bytes(digest, "big")  # 0: the last work lacks units
        own = torch.cat([rows.new_tensor([summed]), rows.view(-1)]).cpu()
        table = own.new_empty(self.group.size, own.numel())
        with self.failing():
            self.group.all_gather(table.view(-1), own)()
        if self.failed:
            return
        if 0 in (of_members := set(table[:, 0].tolist())) or len(of_members) > 1:
            raise NearlinearError(
                "elastic.replicas: some micro-batches have not used all blocks of the model, and "
                "the gradients of the replicas cannot be added. Every block must run in every "
                "micro-batch; for models with LayerDrop or conditional blocks set elastic.replicas "
                "to 0"
            )
        rows.copy_(table[:, 1:].sum(0).view(rows.shape))  # one member has computed each number

    def _exchange_targets(self) -> None:
        """Learn the targets of all replicas, once in a step, after the last work has begun."""
        if self._weights is not None or self.failed:
            return
        assert self.group is not None
        own = torch.zeros(self.replicas, dtype=torch.float64)
        for replica, count in self.targets.items():
            own[replica] = count
        table = own.new_empty(self.group.size * self.replicas)
        self.group.all_gather(table, own)()
        counts = table.view(self.group.size, -1).amax(0).tolist()
        if len({counts[replica] for replica in self._rows}) == 1:
            self._weights = {}
        else:
            self._weights = {replica: counts[replica] / sum(counts) for replica in self._rows}

    def _sum(self, parts: list[torch.Tensor], result: torch.Tensor) -> None:
        """Put the weighted mean of ``parts`` of all members into ``result``.

        Chunk by chunk, so that one chunk is on its way while another one is added.
        """
        self._exchange_targets()
        if len(parts) != len(self.own):
            raise ValueError("a unit was used in some micro-batches only")
        own = [part.view(-1).split(CHUNK) for part in parts]
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
        """Send the pieces of a chunk (E,), a row for each own work, to those that add them.

        Returns the pieces that arrive, (work, piece), and a function that waits for them.
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
        received = sent.new_empty(sum(map(len, self._work)), length)
        of_members = [len(of_member) * length for of_member in self._work]
        parts = [len(rows) * length] * group.size
        return received, group.all_to_all(received.view(-1), sent, of_members, parts)

    def _add_and_gather(
        self, received: torch.Tensor, arrived: Callable[[], None], result: torch.Tensor
    ) -> Callable[[], None]:
        """Add the pieces in the order of their work, and gather the sums into ``result``.

        Returns a function that waits for the end.
        """
        group = self.group
        assert group is not None
        arrived()
        of_replicas = []
        for replica, numbers in self._rows.items():
            one, *others = (received[number] for number in numbers)
            for other in others:
                one += other
            if self._weights:
                one *= self._weights[replica]
            of_replicas.append(one)
        total, *others = of_replicas
        for other in others:
            total += other
        if not self._weights:
            total *= 1.0 / len(of_replicas)
        if result.numel() == total.numel() * group.size:
            return group.all_gather(result, total)
        gathered = total.new_empty(total.numel() * group.size)
        gather = group.all_gather(gathered, total)

        def end() -> None:
            gather()
            result.copy_(gathered[: result.numel()])

        return end
