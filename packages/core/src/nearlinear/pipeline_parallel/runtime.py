"""Execution of a rank's stages: micro-batches through a schedule, losses and errors to all ranks.

One pass through a schedule is a forward and a backward pass of every micro-batch. FSDP2 gathers a
stage's parameters once for it, accumulates gradients locally, and reduces them at its end; across
replicas only in the last pass of a step (`accumulate`). Losses are weighted by the number of
targets in their micro-batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from .. import _torch
from ..distributed.runtime import Runtime
from ..errors import NearlinearError
from ..fsdp import loss_scaler
from ..fsdp.forward_transforms import BatchCheck
from ..fsdp.model_state import model_state
from .microbatch import batch_of_first_stage
from .partition import ModelCosts, format_partition
from .schedules import PipelineSchedule
from .stage import ModelSplit, PassThrough, hidden_shape, stage_state
from .tied_weights import LocalTiedGradients, TiedParameter

MicroBatch = dict[str, Any]
"""Arguments of the whole model for one micro-batch."""
OnOutput = Callable[[int, Any], torch.Tensor]
"""Function of (micro-batch index, model output) that returns the scalar loss."""


class BatchLoss:
    """The loss of one batch: the mean of its micro-batches, weighted by their ``targets``.

    An exception while the last stage computes a loss, which is user code, is kept until the
    schedule has ended, so that no rank waits for another. Then all ranks raise.
    """

    def __init__(self, model: nn.Module, targets: list[float]):
        self.pipeline = pipeline_runtime(model)
        self.accumulation = model_state(model).accumulation
        self.targets, self.total_targets = targets, sum(targets)
        self.value = torch.zeros((), dtype=torch.float64, device=self.pipeline.runtime.device)
        self.error: Exception | None = None

    def weighted(self, compute_loss: OnOutput) -> OnOutput:
        """Return ``compute_loss`` with weighted results, for `PipelineRuntime.run`."""

        def on_output(i: int, output: Any) -> torch.Tensor:
            try:
                loss = compute_loss(i, output)
            except Exception as error:
                self.error = self.error or error
                return _zero_loss(output)
            return self._weigh(i, loss)

        return on_output

    def _weigh(self, i: int, loss: torch.Tensor) -> torch.Tensor:
        """Weigh by micro-batch ``i``'s share of the batch and the batch's share of the step."""
        share = self.targets[i] / self.total_targets if self.total_targets else 0.0
        if share:  # the mean over no targets is NaN
            self.value += loss.detach().double() * share
        return loss * (share * (1.0 if self.accumulation is None else self.accumulation.weight))

    def broadcast(self) -> torch.Tensor:
        """Return the batch's loss on all pipeline ranks, or raise on all. A collective call."""
        if self.accumulation is not None:
            self.accumulation.count_backward()
        failed = torch.zeros_like(self.value)
        if self.error is not None:
            failed.fill_(1.0)
        message = torch.stack([self.value, failed])
        self.pipeline.broadcast_from_last_stage(message)
        value, failed = message.tolist()
        if self.error is not None:
            raise self.error
        if failed:
            raise NearlinearError(
                "the last stage of the pipeline failed. See the error of rank "
                f"{self.pipeline.last_stage_rank}."
            )
        return torch.tensor(value, dtype=torch.float32, device=message.device)


def _zero_loss(output: Any) -> torch.Tensor:
    """Return zero with a graph through ``output``, for backward passes that other ranks expect."""
    tensors = (tensor for tensor in _torch.tensors_in(output) if tensor.requires_grad)
    return sum((tensor.sum() * 0 for tensor in tensors), torch.zeros(()))


class _IndexedStage(PipelineStage):
    """Torch's stage, which also records the index of the current micro-batch."""

    def forward_one_chunk(self, fwd_chunk_id, *args, **kwargs):
        stage_state(self.submod).index = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)


@dataclass(eq=False)
class PipelineRuntime:
    """State of a pipelined model beside its modules; runs its stages."""

    runtime: Runtime
    schedule: PipelineSchedule
    model_split: ModelSplit
    partition: list[range]
    """Blocks of every stage of the pipeline."""
    costs: ModelCosts
    tied: list[TiedParameter]
    stages: dict[int, nn.Module]
    """This rank's stages by number."""
    wave_size: int
    """Micro-batches per pass through the schedule; 0: all."""
    dtype: torch.dtype | None = None
    """Dtype of hidden states; None until the stages are sharded."""
    reduce_replicas: bool = True
    """True if the next pass ends with the reduction across replicas."""
    _built_for: tuple = ()
    _torch_schedules: dict[int, Any] = field(default_factory=dict)  # by number of micro-batches

    def __post_init__(self) -> None:
        self._check_batch = BatchCheck(self.runtime, "pipeline")

    def __str__(self) -> str:
        ranks = [self.schedule.rank_of(stage) for stage in range(self.schedule.stages)]
        table = format_partition(self.costs, self.partition, ranks)
        count = self.runtime.config.microbatches
        return f"{table}\nschedule {self.schedule.name}, {count} micro-batches per batch"

    @property
    def schedule_name(self) -> str:
        return self.schedule.name

    @property
    def needs_gathered_weights(self) -> bool:
        """True if the schedule computes weight gradients apart from the backward pass."""
        return self.schedule.spec.splits_backward

    @property
    def last_stage_rank(self) -> int:
        """Global rank that holds the last stage of this rank's pipeline."""
        ranks = self.runtime.mesh.group("pipeline", self.runtime.rank)
        return ranks[self.schedule.rank_of(self.schedule.stages - 1)]

    @property
    def holds_both_ends(self) -> bool:
        """True if this rank holds the first and the last of several stages."""
        return self.schedule.stages > 1 and {0, self.schedule.stages - 1} <= self.stages.keys()

    def blocks_of(self, stage: nn.Module) -> list[nn.Module]:
        """Return the blocks that ``stage`` holds, in order."""
        blocks = self.model_split.block_list(stage)
        return [block for block in blocks if not isinstance(block, PassThrough)]

    def shared_batch(self, batch: Any) -> Any:
        """Return ``batch``, or with ``pipeline_batch = first_stage`` that of the first rank."""
        runtime = self.runtime
        if runtime.mesh.pipeline == 1 or runtime.config.pipeline_batch != "first_stage":
            return batch
        return batch_of_first_stage(batch, runtime)

    def reshard(self) -> None:
        """Free the gathered parameters of this rank's stages."""
        for stage in self.stages.values():
            for unit in stage.modules():
                if isinstance(unit, FSDPModule):
                    unit.reshard()

    def broadcast_from_last_stage(self, values: torch.Tensor) -> None:
        """Overwrite ``values`` on this pipeline's ranks with those of the last stage's rank."""
        if self.runtime.mesh.pipeline > 1:
            dist.broadcast(values, self.last_stage_rank, group=self.runtime.group("pipeline"))

    def control_replica_reduction(self, stage: nn.Module) -> None:
        """Make the sharded ``stage`` reduce across replicas only if `reduce_replicas` is set."""
        assert isinstance(stage, FSDPModule)
        set_sync = stage.set_requires_gradient_sync

        def set_requires_gradient_sync(
            requires_gradient_sync: bool, *, recurse: bool = True
        ) -> None:
            # Torch's schedules call this method before the reduction and request both hops.
            set_sync(requires_gradient_sync, recurse=recurse)
            if requires_gradient_sync and not self.reduce_replicas:
                stage.set_requires_all_reduce(False)

        stage.set_requires_gradient_sync = set_requires_gradient_sync

    def run(self, model: nn.Module, micro_batches: list[MicroBatch], on_output: OnOutput) -> None:
        """Run a forward and a backward pass of every micro-batch.

        Args:
            on_output: Called on the rank of the last stage. Its result is differentiated.
        """
        shape = self._check_shapes(micro_batches)
        loss_scaler.require_step(model)
        state = model_state(model)
        outside_accumulate = state.accumulation is None
        if outside_accumulate:
            for reducer in state.partial_gradients:
                reducer.begin()
        reduce_replicas, wave = self.reduce_replicas, self.wave_size or len(micro_batches)
        slices = state.optimizer_slices
        try:
            for begin in range(0, len(micro_batches), wave):
                is_last_wave = begin + wave >= len(micro_batches)
                self.reduce_replicas = reduce_replicas and is_last_wave
                if slices is not None:
                    slices.last = self.reduce_replicas
                part = micro_batches[begin : begin + wave]
                self._run_wave(shape, part, lambda i, out, b=begin: on_output(b + i, out))
        except RuntimeError as error:
            self._torch_schedules.clear()  # they hold state of the failed step
            if isinstance(error.__cause__, NearlinearError):
                raise error.__cause__ from None
            raise
        finally:
            self.reduce_replicas = reduce_replicas
            for stage in self.stages.values():
                stage_state(stage).clear()
        if outside_accumulate:
            for reducer in state.partial_gradients:
                reducer.reduce()

    def evaluate(
        self, model: nn.Module, micro_batches: list[MicroBatch], on_output: OnOutput
    ) -> None:
        """Run a forward pass of every micro-batch without gradients; arguments as in `run`."""
        shape = self._check_shapes(micro_batches)
        for reducer in model_state(model).partial_gradients:
            if isinstance(reducer, LocalTiedGradients):
                reducer.copy_values()
        runtime, schedule = self.runtime, self.schedule
        group, ranks = runtime.group("pipeline"), runtime.mesh.group("pipeline", runtime.rank)
        coordinate, sends = runtime.mesh.coordinates(runtime.rank)["pipeline"], []
        with torch.no_grad():
            for i in range(len(micro_batches)):
                hidden = ()
                for number, stage in self.stages.items():
                    state = stage_state(stage)
                    state.begin(micro_batches, on_output)
                    state.index = i
                    if number and schedule.rank_of(number - 1) != coordinate:
                        hidden = (torch.empty(shape, dtype=self.dtype, device=runtime.device),)
                        dist.recv(hidden[0], ranks[schedule.rank_of(number - 1)], group=group)
                    hidden = (stage(*hidden),)
                    if not state.is_last and schedule.rank_of(number + 1) != coordinate:
                        to = ranks[schedule.rank_of(number + 1)]
                        sends.append((dist.isend(hidden[0], to, group=group), hidden))
        for work, _ in sends:
            work.wait()
        for stage in self.stages.values():
            stage_state(stage).clear()
        self.reshard()

    def _check_shapes(self, micro_batches: list[MicroBatch]) -> tuple[int, ...]:
        """Return the shape of the hidden states between stages, equal for all micro-batches."""
        if self.dtype is None:
            raise NearlinearError(
                "the stages of the pipeline are not sharded yet: call nl.shard(pipe) first"
            )
        self._check_batch(micro_batches)
        stage = next(iter(self.stages.values()))
        shapes = {hidden_shape(stage, micro_batch) for micro_batch in micro_batches}
        if len(shapes) > 1:
            raise NearlinearError(
                "all micro-batches of a pipeline must have one shape, but the hidden states have "
                f"shapes {sorted(shapes)}. Pad the sequences."
            )
        return shapes.pop()

    def _run_wave(
        self, shape: tuple[int, ...], micro_batches: list[MicroBatch], on_output: OnOutput
    ) -> None:
        if self._built_for != (shape, self.dtype):  # receive buffers have a fixed shape
            self._torch_schedules.clear()
            self._built_for = (shape, self.dtype)
        for stage in self.stages.values():
            stage_state(stage).begin(micro_batches, _as_row(on_output))
        count = len(micro_batches)
        unused_target = torch.arange(count)  # stages find their targets in `StageState`
        if count in self._torch_schedules:
            self._torch_schedules[count].step(target=unused_target)
            return
        self._torch_schedules[count] = self._build_schedule(shape, count)
        with self._preserve_gradients():  # torch drops them when it prepares a schedule
            self._torch_schedules[count].step(target=unused_target)

    @contextlib.contextmanager
    def _preserve_gradients(self) -> Iterator[None]:
        """Remove the gradients within the block, and add them back at its end."""
        parameters = [p for stage in self.stages.values() for p in stage.parameters()]
        before = [(p, p.grad) for p in dict.fromkeys(parameters) if p.grad is not None]
        for parameter, _ in before:
            parameter.grad = None
        yield
        for parameter, grad in before:
            parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)

    def _build_schedule(self, shape: tuple[int, ...], micro_batches: int):
        """Return torch's schedule for hidden states of ``shape``."""
        hidden = torch.empty(shape, dtype=self.dtype, device="meta", requires_grad=True)
        loss = torch.empty(1, device="meta", requires_grad=True)
        stages = [
            _IndexedStage(
                stage,
                number,
                self.schedule.stages,
                self.runtime.device,
                input_args=() if number == 0 else (hidden,),
                output_args=(loss if stage_state(stage).is_last else hidden,),
                group=self.runtime.group("pipeline"),
            )
            for number, stage in self.stages.items()
        ]
        return self.schedule.build(stages, micro_batches)


def _as_row(on_output: OnOutput) -> OnOutput:
    """Return losses of shape (1,): torch's schedules concatenate outputs along dim 0."""
    return lambda i, output: torch.stack([on_output(i, output)])


def pipeline_runtime(model: nn.Module) -> PipelineRuntime:
    """Return the runtime of a model that `nl.pipeline` divided into stages."""
    pipeline = model_state(model).pipeline
    assert isinstance(pipeline, PipelineRuntime)
    return pipeline
