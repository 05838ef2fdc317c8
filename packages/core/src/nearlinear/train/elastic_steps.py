"""Steps of a trainer whose replica is one of several that may be lost, see `nearlinear.elastic`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from ..distributed import runtime
from ..distributed.consensus import all_gather_json
from ..distributed.heartbeat import Fault
from ..elastic.job import ElasticJob
from ..elastic.membership import Decision
from ..elastic.replica_sum import WHOLE
from ..errors import CheckpointError, RankFailure
from .callbacks import NO_TARGETS, TrainStep
from .callbacks.divergence import (
    ReplicasDiverged,
    describe_different,
    find_diverged_replicas,
    fingerprints,
)
from .checkpoint_manager import CheckpointManager

if TYPE_CHECKING:
    from .trainer import Trainer

FLAGS = 3
"""Numbers of `Trainer.flags`."""
MOST_ATTEMPTS = 5
"""Attempts of a step with the same replicas, none of which has been lost."""


class ElasticSteps:
    """The steps of ``trainer``, agreed with the other replicas."""

    def __init__(self, trainer: Trainer):
        self.trainer: Trainer = trainer
        self.job: ElasticJob = ElasticJob(trainer.config, find_diverged_replicas)
        self.all_stop: bool = False
        """True if all replicas have received a signal to stop, and not only this one."""
        self._decision: Decision | None = None
        self._overflow: bool = False

    @property
    def joining(self) -> bool:
        """True if this replica receives the state of a running job."""
        return self.job.joining

    def start(self, step: int) -> int:
        """Meet the other replicas after ``step`` of a checkpoint; return the last done step."""
        trainer = self.trainer
        others: dict[str, Any] = {"loader": trainer.loader, "bad_steps": trainer.bad_steps}
        if trainer.scaler:
            others["loss_scaler"] = trainer.scaler
        micro_batches = trainer.loader.micro_batches
        return self.job.start(step, trainer.model, trainer.optimizer, micro_batches, others)

    def compute(self, step: TrainStep, micro_batches: list[Any]) -> list[float]:
        """Compute the gradients of ``step`` until the replicas agree that they are complete.

        The update follows, and then `settle`. Returns the sums over all replicas as
        `Trainer._compute_gradients` does; the flag to stop is that of this replica.
        """
        attempts = Counter()
        while True:
            payload, failures = self._attempt(step, micro_batches)
            reason = self.job.sum.failed
            decision = self.job.decide(step.number, failures, payload)
            if decision.committed:
                break
            attempts[decision.members] += 1
            if attempts[decision.members] == MOST_ATTEMPTS:
                raise RankFailure(
                    f"step {step.number} has failed {MOST_ATTEMPTS} times although no replica was "
                    f"lost: {reason or 'on another rank'}"
                )
            if decision.faulty:
                self._exclude(decision, step.number)
            self.trainer.watch.at(f"step {step.number} again, after the loss of a replica")
            self._go_on(decision, step.number)
            self.trainer.optimizer.zero_grad()
        self._decision = decision
        if self.trainer.scaler:
            self.trainer.scaler.update(self._overflow)
        payloads = list(decision.payloads.values())
        loss, targets = (sum(row[i] for row in payloads[0]["rows"]) for i in (0, 1))
        if not targets and not step.skip_reason:
            step.skip_reason = NO_TARGETS
        stop, failed, elapsed = ([each["flags"][i] for each in payloads] for i in range(FLAGS))
        own = payload["flags"]
        if any(failed) and not own[1]:
            raise CheckpointError("the replica that writes the checkpoints failed: see its message")
        self.all_stop = all(stop)
        return [loss, targets, own[0], own[1], float(sum(elapsed))]

    def _attempt(self, step: TrainStep, micro_batches: list[Any]) -> tuple[dict[str, Any], float]:
        """Compute the gradients of this replica, and of the work of lost ones that it has.

        Returns the payload of this replica's vote, and on how many of its ranks a sum failed.
        """
        trainer, job = self.trainer, self.job
        job.begin_step()
        shape = job.config.replicas, job.micro_batches, 2
        rows = torch.zeros(shape, dtype=torch.float64, device=trainer.device)
        given = {job.replica: micro_batches}
        for work in job.work:
            its_rows = rows[work.replica]
            if work.replica not in given:
                place, _ = runtime.data_place(work.replica)
                given[work.replica] = trainer.loader.last_step_of(place)
            if work.micro_batch != WHOLE:
                its_rows = its_rows[work.micro_batch : work.micro_batch + 1]
            batches = job.accumulate(step.number, work, given[work.replica])
            trainer.run_micro_batches(step, batches, its_rows)
        job.sum.gather_rows(rows)
        if trainer.scaler:
            self._overflow = trainer.scaler.unscale(trainer.model)
        trainer.measure_gradients(step)
        stop, failed, elapsed = trainer.flags()
        own = [stop, failed, elapsed if job.writes else 0.0, float(bool(job.sum.failed))]
        sums = trainer.sum_over_ranks(step, torch.cat([rows.new_tensor(own), rows.view(-1)]))
        both = iter(sums[len(own) :])
        payload = {
            "flags": sums[:FLAGS],
            "rows": list(zip(both, both, strict=True)),
            "norm": step.grad_norm,
            "fingerprints": fingerprints(step),
        }
        return payload, sums[FLAGS]

    def _exclude(self, decision: Decision, step: int) -> None:
        """Raise ReplicasDiverged if this replica is excluded, and note it otherwise."""
        finding = f"step {step}: {describe_different(decision.payloads, decision.faulty)}"
        if not decision.members:
            remedy = (
                "There is no majority: all replicas end. The next start resumes from the newest "
                "checkpoint, written by the replica that was a member for longest"
            )
            raise ReplicasDiverged(finding, step, decision.faulty, remedy)
        if self.job.replica in decision.faulty:
            hosts = ", ".join(dict.fromkeys(all_gather_json(runtime.host())))
            remedy = (
                "The others go on without this replica. Started again, it copies their state. "
                f"If it happens again, test the memory and the accelerators of {hosts}"
            )
            raise ReplicasDiverged(finding, step, decision.faulty, remedy)
        self.job.events.append(finding)

    def settle(self) -> None:
        """Go on with the replicas that were agreed on, after the update of the step."""
        assert self._decision is not None
        self._go_on(self._decision, self.trainer.done)

    def finish(self, checkpoints: CheckpointManager) -> None:
        """Write the last checkpoint; another replica does if the one that writes is lost."""
        trainer, job, step = self.trainer, self.job, self.trainer.done
        job.admit(False)
        while True:
            if job.writes:
                trainer.save(checkpoints)
                checkpoints.finish()
            writer, step = job.members[0], step + 1
            decision = job.decide(step, 0.0, None)
            self._go_on(decision, step)
            if job.members[0] == writer:
                return

    def leave(self, fault: Fault, consistent: bool) -> str:
        """Tell the other replicas that this one ends with ``fault``; the watchdog's handler."""
        self.job.abandon()
        return "the other replicas go on without this one"

    @property
    def outcome_of_stop(self) -> str:
        """Outcome of a signal that stops this replica, which saves nothing itself."""
        rest = "all replicas stop" if self.all_stop else "the other replicas go on"
        return f"replica {self.job.replica} stopped after step {self.trainer.done}; {rest}"

    def _go_on(self, decision: Decision, step: int) -> None:
        """Settle ``decision``, and take over the metrics if the replica that wrote them is lost.

        That one may have reported ``step``, which this replica has not reported yet.
        """
        trainer, wrote = self.trainer, self.job.writes
        self.job.settle(decision, step)
        self.job.seed_after(trainer.done)
        if decision.joined and trainer.sentinel:
            trainer.sentinel.due = True
        if self.job.writes and not wrote:
            trainer.reporter.close()
            trainer.reporter = trainer.open_reporter(step - 1)
            trainer.reporter.log_if_missing(trainer.last_row)
        for event in self.job.take_events():
            trainer.reporter.print(event)
