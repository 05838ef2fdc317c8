"""Runs a rank's stages: micro-batches through a schedule, the loss and errors to every rank.

A step of the schedule is one forward and one backward pass of every micro-batch. FSDP2 gathers a
stage's parameters once for it, sums gradients up on this rank and reduces them at its end; across
replicas only where `accumulate` says so. Losses are weighted by their micro-batches' targets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from ...errors import NearlinearError
from ...runtime import Runtime
from .. import joint, loss_scale
from ..same_batch import SameBatch
from .partition import Costs, table
from .parts import Parts
from .schedules import Plan
from .stage import Skip, Stage, Work, handed_on
from .tied import OnOneRank, Tie


class _Stage(PipelineStage):
    """Torch's stage, telling ours which micro-batch is at hand."""

    def forward_one_chunk(self, fwd_chunk_id, *args, **kwargs):
        self.submod._nearlinear_work.at = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)


@dataclass
class Engine:
    """What a pipelined model is, beside its modules."""

    now: Runtime
    plan: Plan
    parts: Parts
    split: list[range]
    costs: Costs
    ties: list[Tie]
    stages: dict[int, nn.Module]  # this rank's, by number
    active: int  # micro-batches in flight at most; 0: as many as the schedule wants
    dtype: torch.dtype | None = None  # of hidden states, once the stages are sharded
    last: bool = True  # replicas meet at the end of the schedule
    slices: object = None  # `optimizer_shards.Slices`, where replicas share the optimizer's state
    _built: tuple = ()
    _schedules: dict = field(default_factory=dict)

    def __post_init__(self):
        self._same = SameBatch(self.now, "pipeline")

    def __str__(self) -> str:
        stages = range(self.plan.stages)
        lines = table(self.costs, self.split, [self.plan.rank_of(stage) for stage in stages])
        micro = self.now.config.microbatches
        return f"{lines}\nschedule {self.plan.name}, {micro} micro-batches of every batch"

    @property
    def final(self) -> nn.Module | None:
        """The last stage, on the rank that holds it."""
        return self.stages.get(self.plan.stages - 1)

    @property
    def source(self) -> int:
        """The global rank that holds the last stage of this rank's pipeline."""
        line = self.now.mesh.group("pipeline", self.now.rank)
        return line[self.plan.rank_of(self.plan.stages - 1)]

    @property
    def ends_here(self) -> bool:
        """Whether this rank holds the first and the last stage, as two."""
        return 0 in self.stages and self.final is not None and self.plan.stages > 1

    def blocks_of(self, stage: nn.Module) -> list[nn.Module]:
        """The blocks that ``stage`` holds, in order."""
        return [block for block in self.parts.list_of(stage) if not isinstance(block, Skip)]

    def free(self) -> None:
        """Free what this rank's stages have gathered."""
        for stage in self.stages.values():
            for unit in stage.modules():
                if isinstance(unit, FSDPModule):
                    unit.reshard()

    def tell(self, values: torch.Tensor) -> None:
        """Give ``values`` of the last stage's rank to all ranks of this pipeline."""
        if self.now.mesh.pipeline > 1:
            dist.broadcast(values, self.source, group=self.now.group("pipeline"))

    def adopt(self, stage: nn.Module) -> None:
        """Take over when ``stage``, sharded by now, reduces across replicas."""
        reduce = stage.set_requires_gradient_sync

        def reduce_as_told(required: bool, *, recurse: bool = True) -> None:
            # torch's schedules call this before the reduction, and it asks for both hops
            reduce(required, recurse=recurse)
            if required and not self.last:
                stage.set_requires_all_reduce(False)

        stage.set_requires_gradient_sync = reduce_as_told

    def run(self, model: nn.Module, calls: list[dict], consume: Callable) -> None:
        """One forward and one backward pass of every micro-batch of ``calls``.

        ``consume(micro-batch, output)`` is called on the rank of the last stage, with what the
        model returned; it returns the loss to differentiate, a scalar with a graph.
        """
        shape = self._shape(calls)
        loss_scale.require_step(model)
        alone = getattr(model, "_nearlinear_step", None) is None
        if alone:
            for part in joint.of(model):
                part.begin()
        told, wave = self.last, self.active or len(calls)
        try:
            for begin in range(0, len(calls), wave):
                self.last = told and begin + wave >= len(calls)
                part = calls[begin : begin + wave]
                self._wave(shape, part, lambda i, out, b=begin: consume(b + i, out))
        except RuntimeError as error:
            self._schedules.clear()  # what is left in them is of this step
            if isinstance(error.__cause__, NearlinearError):
                raise error.__cause__ from None
            raise
        finally:
            self.last = told
            for stage in self.stages.values():
                _work(stage).calls, _work(stage).consume = [], None
        if alone:
            for part in joint.of(model):
                part.add_up()

    def evaluate(self, model: nn.Module, calls: list[dict], consume: Callable) -> None:
        """One forward pass of every micro-batch, without gradients; stages as in `run`."""
        shape = self._shape(calls)
        for part in joint.of(model):
            if isinstance(part, OnOneRank):
                part.follow()
        group, line = self.now.group("pipeline"), self.now.mesh.group("pipeline", self.now.rank)
        me, plan, sending = self.now.mesh.coordinates(self.now.rank)["pipeline"], self.plan, []
        with torch.no_grad():
            for i in range(len(calls)):
                hidden = ()
                for number, stage in self.stages.items():
                    work = _work(stage)
                    work.calls, work.consume, work.at = calls, consume, i
                    if number and plan.rank_of(number - 1) != me:
                        hidden = (torch.empty(shape, dtype=self.dtype, device=self.now.device),)
                        dist.recv(hidden[0], line[plan.rank_of(number - 1)], group=group)
                    hidden = (stage(*hidden),)
                    if not work.last and plan.rank_of(number + 1) != me:
                        to = line[plan.rank_of(number + 1)]
                        sending.append((dist.isend(hidden[0], to, group=group), hidden))
        for message, _ in sending:
            message.wait()
        for stage in self.stages.values():
            _work(stage).calls, _work(stage).consume = [], None
        self.free()

    def _shape(self, calls: list[dict]) -> tuple[int, ...]:
        """Of what stages hand on, the same for all of ``calls``."""
        if self.dtype is None:
            raise NearlinearError("the stages are not sharded yet: call nl.shard(pipe) first")
        self._same(calls)
        stage = next(iter(self.stages.values()))
        shapes = {handed_on(stage, call) for call in calls}
        if len(shapes) > 1:
            raise NearlinearError(
                f"the micro-batches of a pipeline have one shape, and these are {sorted(shapes)}: "
                "pad them"
            )
        return shapes.pop()

    def _wave(self, shape: tuple[int, ...], calls: list[dict], consume: Callable) -> None:
        if self._built != (shape, self.dtype):  # received hidden states have a place of their own
            self._schedules.clear()
            self._built = (shape, self.dtype)
        for stage in self.stages.values():
            _work(stage).calls, _work(stage).consume = calls, _as_row(consume)
        if self.slices is not None:
            self.slices.last = self.last
        numbers = torch.arange(len(calls))  # no target: a stage knows its own
        if len(calls) in self._schedules:
            self._schedules[len(calls)].step(target=numbers)
            return
        self._schedules[len(calls)] = self._schedule(shape, len(calls))
        with self._gradients_aside():  # torch drops them when it prepares a schedule
            self._schedules[len(calls)].step(target=numbers)

    @contextlib.contextmanager
    def _gradients_aside(self):
        """Have no gradients at the beginning, and those there were added at the end."""
        held = [p for stage in self.stages.values() for p in stage.parameters()]
        before = [(p, p.grad) for p in dict.fromkeys(held) if p.grad is not None]
        for parameter, _ in before:
            parameter.grad = None
        yield
        for parameter, gradient in before:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    def _schedule(self, shape: tuple[int, ...], micro_batches: int):
        """Torch's schedule for hidden states of ``shape``."""
        hidden = torch.empty(shape, dtype=self.dtype, device="meta", requires_grad=True)
        loss = torch.empty(1, device="meta", requires_grad=True)
        stages = [
            _Stage(
                stage,
                number,
                self.plan.stages,
                self.now.device,
                input_args=() if number == 0 else (hidden,),
                output_args=(loss if _work(stage).last else hidden,),
                group=self.now.group("pipeline"),
            )
            for number, stage in self.stages.items()
        ]
        return self.plan.build(stages, micro_batches)


def _work(stage: Stage) -> Work:
    return stage._nearlinear_work


def _as_row(consume: Callable) -> Callable:
    """Losses of shape (1,): torch's schedules join outputs on their first dim."""
    return lambda micro_batch, output: torch.stack([consume(micro_batch, output)])
