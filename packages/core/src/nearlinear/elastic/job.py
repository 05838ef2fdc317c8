"""The replicas of an elastic job, as the trainer sees them.

Every replica is a job of its own, with its own ranks, store and process groups: a lost rank ends
its replica and no other. The replicas meet after each step: their gradients are added in a fixed
order, and their first ranks agree that the step is complete. A replica that is lost is computed by
the others until it is started again.

Replicas exchange data in host memory. Gradients on accelerators are copied there and back, after
the last backward pass.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .. import _torch
from ..config.parallel import whole_number
from ..config.train import ElasticConfig, TrainConfig
from ..distributed import rendezvous, runtime
from ..distributed.consensus import StoreChannel, broadcast_json
from ..errors import ConfigError, RankFailure
from ..fsdp.accumulate import AccumulationStep, accumulate
from ..fsdp.model_state import local_tensor, model_state, runtime_of
from ..spmd import seed_generators
from .membership import LOST_GROUP, Decision, FindFaulty, Membership
from .peers import Member, Peers
from .replica_sum import WHOLE, ReplicaGroup, ReplicaSum, Work, assign_work
from .transfer import copy_state

log = logging.getLogger(__name__)

STORE_POLL = 0.2
"""Seconds between looks of a rank at the failures that its replica has noted."""
DEFAULT_PORT = 29700
"""Port of a replica's first rank, if none is set."""
BUCKET = 1 << 22
"""Elements of the gradients that are added at a time where they are complete already."""


def check_elastic(config: TrainConfig) -> None:
    """Raise ConfigError for settings that an elastic job cannot have."""
    elastic, parallel = config.elastic, config.parallel
    refused = {
        "parallel.shard_optimizer_state": parallel.shard_optimizer_state,
        "train.two_hop = false": not config.train.two_hop,
        "optimizer.kind = 'adamw_8bit'": config.optimizer.kind == "adamw_8bit",
    }
    for key, is_set in refused.items():
        if is_set:
            raise ConfigError(f"elastic.replicas = {elastic.replicas} and {key} cannot be combined")


class ElasticJob:
    """The coupling of this rank's replica with the others.

    Made after `runtime.init`, before anything else: `joining` says whether the other replicas are
    training already, so that this one receives their state instead of loading a checkpoint.

    Args:
        config: Config of the run.
        find_faulty: See `Membership`.
    """

    def __init__(self, config: TrainConfig, find_faulty: FindFaulty):
        check_elastic(config)
        self.config: ElasticConfig = config.elastic
        self.seed: int = config.parallel.random_seed
        self.micro_batches: int = 0
        """Micro-batches of each rank in a step, set by `start`."""
        self.replica: int = own_replica(self.config.replicas)
        self.rank: int = dist.get_rank()
        runtime.place_replica(self.replica, self.config.replicas)
        self.sum: ReplicaSum = ReplicaSum(self.config.replicas, self._note_failure)
        self.members: tuple[Member, ...] = ()
        self.events: list[str] = []
        """Events since the last call of `take_events`, a line each."""
        self._device = runtime.collective_device()
        self._backend = dist.get_backend() if self._device.type == "cpu" else "gloo"
        self._group_name = ""
        self._channel = StoreChannel(_torch.job_store(), "elastic")
        self._membership: Membership | None = None
        self._store: dist.TCPStore | None = None
        self._ended = threading.Event()
        self.joining: bool = False
        if self.rank == 0:
            self._connect(config, find_faulty)
        self.joining = broadcast_json(self.joining)
        threading.Thread(target=self._watch_failures, name="replica failures", daemon=True).start()

    def _connect(self, config: TrainConfig, find_faulty: FindFaulty) -> None:
        addresses = peer_addresses(self.config.peers, self.config.replicas, self.config.port)
        host = addresses[self.replica][0]
        local = all(rendezvous.is_loopback(name) for name, _ in addresses)
        self._store = rendezvous.serve_store(host, 0, all_local=local)
        run = hashlib.sha256(os.path.abspath(config.run.folder).encode()).hexdigest()[:16]
        incarnation = f"{uuid.uuid4().hex[:12]}@{host}:{self._store.port}"
        self.peers: Peers = Peers(
            self.replica, addresses, run, incarnation, self.config.silence_seconds,
            self._receive, self._lose,
        )  # fmt: skip
        self._membership = Membership(
            self.peers,
            self.config.min_replicas,
            self.config.form_seconds,
            Path(config.run.folder) / "elastic",
            find_faulty,
        )
        self.peers.start()
        self.joining = self._membership.finds_running_job()

    # The trainer calls these on all ranks of a replica alike.

    def start(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        micro_batches: int,
        others: dict[str, Any],
    ) -> int:
        """Begin after ``step`` with the other replicas, or join them; return the last done step.

        Args:
            step: Step of the loaded checkpoint, equal on all replicas; 0 without one.
            model: The sharded model.
            optimizer: Its optimizer.
            micro_batches: Micro-batches of each rank in a step.
            others: Objects with ``state_dict`` and ``load_state_dict``, copied to joining replicas.
        """
        self._model, self._optimizer, self._others = model, optimizer, others
        self.micro_batches = micro_batches
        told = None
        if self._membership is not None:
            membership = self._membership
            told = (membership.join() if self.joining else membership.form(step + 1)).to_json()
        decision = Decision.from_json(broadcast_json(told))
        if not self.joining:
            self.settle(decision, step + 1)
            return step
        self._install(decision, decision.step)
        if self._failures():
            raise RankFailure(
                f"this replica could not join the others: {self.sum.failed or 'on another rank'}"
            )
        self.joining = False
        return decision.step

    @property
    def writes(self) -> bool:
        """True if this replica writes metrics and checkpoints: the one that is a member longest."""
        return self.members[0][0] == self.replica

    @property
    def work(self) -> list[Work]:
        """The work of this replica in a step: its own micro-batches, and some of lost replicas."""
        return self.sum.own

    def begin_step(self) -> None:
        """Prepare an attempt of a step."""
        self.sum.begin_step()
        state = model_state(self._model)
        self._overlaps = state.reduction is not None and not state.partial_gradients
        if state.reduction is not None:
            state.reduction.replica_sum = self.sum.add if self._overlaps else None

    def accumulate(self, step: int, work: Work, micro_batches: list[Any]) -> Iterator[Any]:
        """Yield those of ``micro_batches`` that are ``work``, and add the gradients.

        Random generators begin every micro-batch at a state that depends on the step, the replica,
        the micro-batch and the rank only.

        Args:
            step: The step in progress.
            work: One of `work`.
            micro_batches: All micro-batches of the replica.
        """
        state = model_state(self._model)
        self.sum.computing = work
        if work.micro_batch == WHOLE:
            batches = accumulate(self._model, micro_batches)
        else:
            batches = AccumulationStep(self._model, None, True).run(
                micro_batches, None, only=work.micro_batch
            )
        for number, batch in enumerate(batches, max(work.micro_batch, 0)):
            assert state.accumulation is not None
            self.sum.targets[work.replica] = state.accumulation.targets
            self._seed(step, work.replica, number)
            yield batch
        self.sum.end_work()
        if not self._overlaps:
            self._add_complete_gradients()
        if work != self.work[-1]:
            self._model.zero_grad(set_to_none=True)

    def seed_after(self, step: int) -> None:
        """Seed the random generators after ``step``: checkpoints of any replica are the same."""
        self._seed(step, -1, 0)

    def _seed(self, step: int, replica: int, micro_batch: int) -> None:
        text = f"{self.seed}/{step}/{replica}/{micro_batch}/{self.rank}"
        digest = hashlib.blake2b(text.encode(), digest_size=7).digest()
        seed_generators(int.from_bytes(digest, "big"))

    def _add_complete_gradients(self) -> None:
        """Add the gradients of the parameters, in buckets in host memory."""
        found = [p for p in self._model.parameters() if p.grad is not None]
        gradients = [local_tensor(p.grad) for p in found if p.grad is not None]
        bucket: list[torch.Tensor] = []
        for position, gradient in enumerate(gradients):
            bucket.append(gradient)
            full = sum(each.numel() for each in bucket) >= BUCKET
            other = position + 1 < len(gradients) and gradients[position + 1].dtype
            if full or other != gradient.dtype:
                flat = torch.cat([each.reshape(-1) for each in bucket]).cpu()
                self.sum.add(f"bucket of gradient {position}", flat)
                if self.sum.computing == self.work[-1]:
                    parts = flat.split([each.numel() for each in bucket])
                    for each, part in zip(bucket, parts, strict=True):
                        each.copy_(part.view(each.shape))
                bucket = []

    def decide(self, step: int, failures: float, payload: Any) -> Decision:
        """Agree with the other replicas on ``step``. Apply its update, then call `settle`.

        Args:
            step: The step in progress.
            failures: Number of this replica's ranks without the complete gradients of the step.
            payload: JSON value of this replica for the others.

        Raises:
            RankFailure: This replica must end.
        """
        told = None
        if self._membership is not None:
            told = self._membership.decide(step, not failures, payload).to_json()
        return Decision.from_json(broadcast_json(told))

    def settle(self, decision: Decision, step: int) -> None:
        """Go on with the replicas of ``decision`` on ``step``, after its update if it has one."""
        following = step + decision.committed
        while decision.group:
            if decision.group == LOST_GROUP:  # its other members are ahead
                self.sum.fail("another replica is lost")
            else:
                self._install(decision, following - 1)
            if not self._failures():
                break
            decision = self.decide(following, 1.0, None)

    def _failures(self) -> float:
        """Return the number of this replica's ranks on which a sum has failed."""
        failed = torch.tensor(float(bool(self.sum.failed)), device=self._device)
        dist.all_reduce(failed)
        return failed.item()

    def admit(self, admitted: bool) -> None:
        """Set whether replicas may join after a step."""
        if self._membership is not None:
            self._membership.admits = admitted

    def take_events(self) -> list[str]:
        """Return the events since the last call."""
        events, self.events = self.events, []
        return events

    def close(self) -> None:
        """Leave the others in order, at the end of the run."""
        self._ended.set()
        if self._membership is not None:
            self.peers.close()

    def abandon(self) -> None:
        """Let the others know at once that this replica fails."""
        self._ended.set()
        if self._membership is not None:
            self.peers.abandon()

    # Parts of the above.

    def _divides_replicas(self) -> bool:
        """Return whether members may compute single micro-batches of a lost replica.

        The sum of its micro-batches must not depend on who computes them. It does if the ranks of a
        replica add up several micro-batches before they reduce them.
        """
        made = runtime_of(self._model)
        alone = made.mesh.world == made.mesh.sharing
        return alone and (made.mesh.world == 1 or made.config.gradient_reduction == "micro_batch")

    def _install(self, decision: Decision, step: int) -> None:
        """Create the groups of the decision's members, and copy the state to those that join."""
        before = {index for index, _ in self.members}
        self.members = decision.members
        now = [index for index, _ in self.members]
        self._note_members(before, now, step)
        self._group_name = decision.group
        divided = self.micro_batches if self._divides_replicas() else 0
        work = assign_work(self.config.replicas, now, self.config.mode, divided)
        position = now.index(self.replica)
        missing = self._membership.missing if self._membership is not None else lambda: ""
        if not self.sum.install(
            lambda: self._make_group(position, len(now)), missing, position, work
        ):
            return
        group = self.sum.group
        if decision.joined and group is not None:
            joining = [now.index(index) for index, _ in decision.joined]
            others = {name: each.state_dict() for name, each in self._others.items()}
            begin = time.monotonic()
            with self.sum.failing("the state was not copied: "):
                told, size = copy_state(group, joining, self._model, self._optimizer, others)
                seconds = time.monotonic() - begin
                self.events.append(f"copied {size / 2**20:.1f} MiB per rank in {seconds:.2f} s")
            if position in joining and not self.sum.failed:
                for name, each in self._others.items():
                    each.load_state_dict(told[name])

    def _make_group(self, position: int, size: int) -> ReplicaGroup:
        """Connect this rank with those of the same index in the other members."""
        host, _, port = self.members[0][1].partition("@")[2].rpartition(":")
        wait = timedelta(seconds=10 + 2 * self.config.silence_seconds)
        store = dist.TCPStore(host, int(port), is_master=False, timeout=wait)
        store = dist.PrefixStore(f"{self._group_name}/{self.rank}", store)
        with rendezvous.interface_to(host, int(port)):
            return ReplicaGroup(self._backend, store, position, size)

    def _note_members(self, before: set[int], now: list[int], step: int) -> None:
        for lost in sorted(before - set(now)):
            how = "others compute its batches" if self.config.mode == "exact" else "left out"
            self.events.append(f"replica {lost} is lost in step {step}: {how}")
        for joined in sorted(set(now) - before) if before else ():
            self.events.append(f"replica {joined} joined after step {step}")

    def _note_failure(self, reason: str) -> None:
        """Tell the other ranks of this replica that a sum failed."""
        log.debug("replica %d, rank %d: %s", self.replica, self.rank, reason)
        with suppress(RuntimeError, dist.DistError):
            self._channel.set("failed", self._group_name)

    def _watch_failures(self) -> None:
        """Fail the sums of this rank when another rank or replica has failed them."""
        told = ""
        with suppress(RuntimeError, dist.DistError):
            while not self._ended.wait(STORE_POLL):
                name = self._channel.get("failed")
                if not name or name != self._group_name:
                    continue
                if not self.sum.failed:
                    self.sum.fail("the sum failed on another rank")
                if self._membership is not None and told != name:
                    told = name
                    for index, _ in self.members:
                        if index != self.replica:
                            self.peers.send(index, {"failed": name})

    def _receive(self, member: Member, message: Any) -> None:
        if "failed" in message:
            if message["failed"] == self._group_name:
                self._note_failure(f"replica {member[0]} failed")
        elif self._membership is not None:
            self._membership.receive(member, message)

    def _lose(self, member: Member, reason: str) -> None:
        if member in self.members and not self._ended.is_set():
            log.warning("replica %d: %s", member[0], reason)
            self.sum.fail(f"replica {member[0]}: {reason}")


def own_replica(replicas: int) -> int:
    """Return the index of this process's replica. Raises ConfigError."""
    text = os.environ.get("NEARLINEAR_REPLICA", "")
    if not text.isdigit() or int(text) >= replicas:
        raise ConfigError(
            f"elastic.replicas = {replicas}, and NEARLINEAR_REPLICA is {text!r}: set it to the "
            f"index of the replica, 0 to {replicas - 1}, or let nearlinear train start all replicas"
        )
    return int(text)


def peer_addresses(peers: list[str], replicas: int, port: int) -> list[tuple[str, int]]:
    """Return (host, port) of each replica's first rank. Raises ConfigError."""
    if not peers:
        port = port or whole_number("NEARLINEAR_REPLICA_PORT", DEFAULT_PORT)
        return [(rendezvous.LOOPBACK, port + index) for index in range(replicas)]
    if len(peers) != replicas:
        raise ConfigError(f"elastic.peers names {len(peers)} of {replicas} replicas")
    found = []
    for peer in peers:
        host, colon, number = peer.rpartition(":")
        if not colon:
            host, number = peer, str(port or DEFAULT_PORT)
        if not number.isdigit():
            raise ConfigError(f"elastic.peers: {peer!r} is not host or host:port")
        found.append((host, int(number)))
    return found
