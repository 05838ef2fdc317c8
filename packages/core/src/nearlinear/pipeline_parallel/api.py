"""`nl.pipeline` reduces a model to this rank's stages; `Pipelined` is the resulting interface."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..config.parallel import ParallelConfig
from ..distributed import runtime as runtimes
from ..distributed.runtime import Runtime
from ..errors import ConfigError, NearlinearError
from ..fsdp.call_interception import arguments_by_name, current_interceptor
from ..fsdp.deferred_init import require_built
from ..fsdp.model_state import (
    PartialGradients,
    ShardingExtension,
    mixin_class,
    model_state,
)
from ..fsdp.targets import count_targets
from ..tensor_parallel.parallelize import HuggingFaceModel
from .block_costs import measure_costs
from .microbatch import split_microbatches
from .partition import estimate_costs, explicit_partition, memory_weight, partition_blocks
from .runtime import BatchLoss, OnOutput, PipelineRuntime, pipeline_runtime
from .schedules import PipelineSchedule, find_schedule
from .stage import (
    build_stage,
    check_hidden_states,
    find_model_split,
    remove_other_stages,
)
from .tied_weights import copy_tied_parameters, find_tied_parameters, tied_gradient_reducers

log = logging.getLogger(__name__)


def pipeline(
    model: HuggingFaceModel,
    *,
    split: Sequence[int] | Mapping[int, int] | None = None,
    measure: bool = False,
    parts: Mapping[str, Any] | None = None,
) -> HuggingFaceModel:
    """Reduce ``model`` to the pipeline stages of this rank, in place, and return it.

    ::

        pipe = nl.shard(nl.pipeline(model))
        optimizer = torch.optim.AdamW(pipe.parameters())
        for batch in nl.accumulate(pipe, micro_batches):
            loss = pipe.step(batch)
        optimizer.step()

    Call it after `nearlinear.transform` and before `nearlinear.shard`. All ranks must have equal
    parameter values, or none (`deferred_init`). ``str(pipe)`` is a table of the stages.

    Args:
        model: A Hugging Face causal language model.
        split: The first block of every stage but the first, such as ``[3, 6, 9]``, or a dict from
            blocks to stages. Default: balanced automatically, see `partition`.
        measure: Balance by the measured costs of one block of each kind instead of estimates.
        parts: Names of the modules before and after the blocks, for models whose config does not
            list them; see `stage.KNOWN_SPLITS`.

    Raises:
        ConfigError: The model or the config does not allow this pipeline.
    """
    require_built("nl.pipeline")
    runtime = runtimes.current()
    config = runtime.config
    _check_order_of_calls(model)
    model_split = find_model_split(model, parts)
    num_blocks = model_split.num_blocks(model)
    check_hidden_states(model, model_split, num_blocks)
    if measure and model_state(model).layout.axes:
        raise ConfigError(
            "nl.pipeline(measure=True) measures whole blocks, but nl.transform has divided this "
            "model. Remove measure=True, or pass split as measured without nl.transform."
        )
    schedule = find_schedule(
        config.pipeline, runtime.mesh.pipeline, config.virtual_pipeline_degree, config.microbatches
    )
    schedule.check_available()
    schedule.check_microbatches(config.microbatches)
    costs = (
        measure_costs(model, model_split, runtime)
        if measure
        else estimate_costs(model, model_split)
    )
    if split is None and config.auto_partition:
        partition = partition_blocks(costs, schedule.stages, memory_weight(config))
    else:
        partition = explicit_partition(
            {} if split is None else split, num_blocks, schedule.stages, config.default_partition
        )
    numbers = schedule.stages_of(runtime.mesh.coordinates(runtime.rank)["pipeline"])
    tied = find_tied_parameters(model, model_split) if schedule.stages > 1 else []
    if {0, schedule.stages - 1} <= set(numbers):
        copy_tied_parameters(model, tied)
    stages = {n: build_stage(model, model_split, partition[n], num_blocks) for n in numbers}
    blocks = {block for number in numbers for block in partition[number]}
    is_transformed = any("forward" in vars(module) for module in model.modules())
    remove_other_stages(model, model_split, blocks, num_blocks)
    if is_transformed:
        gc.collect()  # removed modules with an instance forward are reference cycles
    wave_size = schedule.wave_size(config.active_microbatches, config.microbatches)
    state = model_state(model)
    state.pipeline = PipelineRuntime(
        runtime, schedule, model_split, partition, costs, tied, stages, wave_size
    )
    state.extensions.append(PipelineSharding(state.pipeline))
    model.__class__ = mixin_class(type(model), Pipelined)
    if runtime.rank == 0:
        _log_pipeline(model, schedule, config)
    return model


def _check_order_of_calls(model: nn.Module) -> None:
    """Raise ConfigError if ``model`` was pipelined, checkpointed or sharded before."""
    if isinstance(model, Pipelined):
        raise ConfigError("the model is a pipeline already: call nl.pipeline once")
    if model_state(model).activations is not None:
        raise ConfigError(
            "nl.pipeline must be called before nl.checkpoint_activations and nl.offload_activations"
        )
    if hasattr(model, "_get_fsdp_state"):
        raise ConfigError("the model is sharded already: call nl.pipeline before nl.shard")


class PipelineSharding(ShardingExtension):
    """Sums the gradients of parameters that the first and the last stage share."""

    def __init__(self, pipeline: PipelineRuntime):
        self.pipeline = pipeline

    def partial_gradients(self, model: nn.Module, runtime: Runtime) -> list[PartialGradients]:
        return tied_gradient_reducers(model, self.pipeline, runtime)


class Pipelined(nn.Module):
    """Mixed into the model's class: this rank's stages of a pipeline."""

    config: Any
    """The model's own config."""

    def __call__(self, *args, **kwargs):
        interceptor = current_interceptor()
        if interceptor is None:
            return super().__call__(*args, **kwargs)
        return interceptor.on_forward(self, args, kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass of ``loss`` in a function under `compat.smp.step`."""
        interceptor = current_interceptor()
        if interceptor is None:
            raise NearlinearError(
                "model.backward(loss) of a pipelined model must be called in a function under "
                "@smp.step (nearlinear.compat.smp). Elsewhere call pipe.step(batch), which runs "
                "both passes."
            )
        interceptor.on_backward(loss)

    def step(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """Run forward and backward passes of ``batch``; return the loss on every pipeline rank.

        The loss is the mean over the batch's targets, without a graph. Gradients are complete on
        return, or inside `nearlinear.accumulate` after its loop.

        Args:
            batch: The model's arguments, the same on every pipeline rank, or with
                ``pipeline_batch = "first_stage"`` those of the first one. Tensors are split along
                dim 0 into ``microbatches`` equal parts.
        """
        return self._run_batch(batch, pipeline_runtime(self).run)

    def evaluate(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """Return the loss of ``batch`` on every pipeline rank, like `step` without gradients."""
        return self._run_batch(batch, pipeline_runtime(self).evaluate)

    def last_logits(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """Return the logits (B, V) of every sequence's last token, on every pipeline rank."""
        pipe = pipeline_runtime(self)
        device = pipe.runtime.device
        (micro_batch,) = split_microbatches(pipe.shared_batch(batch), 1, device)
        rows = next(iter(micro_batch.values())).shape[0]
        logits = torch.empty(rows, self.config.vocab_size, device=device)
        pipe.evaluate(self, [micro_batch], lambda i, output: logits.copy_(output.logits[:, -1]))
        pipe.broadcast_from_last_stage(logits)
        return logits

    def blocks(self) -> list[nn.Module]:
        """Return the blocks of this rank's stages, in order."""
        pipe = pipeline_runtime(self)
        return [block for stage in pipe.stages.values() for block in pipe.blocks_of(stage)]

    def _run_batch(
        self,
        batch: Mapping[str, Any],
        run: Callable[[nn.Module, list[dict[str, Any]], OnOutput], None],
    ) -> torch.Tensor:
        pipe = pipeline_runtime(self)
        runtime = pipe.runtime
        if model_state(self).accumulation is None:  # else `accumulate` has yielded that batch
            batch = pipe.shared_batch(batch)
        micro_batches = split_microbatches(batch, runtime.config.microbatches, runtime.device)
        loss = BatchLoss(self, [count_targets(self, micro_batch) for micro_batch in micro_batches])
        run(self, micro_batches, loss.weighted(lambda i, output: _loss_of(output)))
        return loss.broadcast()

    def forward(self, *args, **kwargs):
        raise NearlinearError(
            "a pipelined model computes whole batches: call pipe.step(batch) or "
            "pipe.evaluate(batch), or write the step under @smp.step (nearlinear.compat.smp)"
        )

    def arguments(self, args: tuple, kwargs: dict) -> dict[str, Any]:
        """Return the arguments of the whole model's forward pass by name."""
        return arguments_by_name(super().forward, args, kwargs)

    def train(self, mode: bool = True) -> nn.Module:
        for stage in pipeline_runtime(self).stages.values():
            stage.train(mode)
        return super().train(mode)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters under their names in the whole model.

        A copy of a tied parameter has the name of the original.
        """
        pipe, dot = pipeline_runtime(self), prefix + "." * bool(prefix)
        copies = {dot + tie.copy_name: dot + tie.name for tie in pipe.tied}
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            if not (pipe.holds_both_ends and name in copies):
                yield copies.get(name, name), parameter

    def __str__(self) -> str:
        return str(pipeline_runtime(self))


def _loss_of(output: Any) -> torch.Tensor:
    loss = getattr(output, "loss", None)
    if loss is None:
        raise NearlinearError("the model returned no loss: pass pipe.step a batch with labels")
    return loss


def _log_pipeline(model: nn.Module, schedule: PipelineSchedule, config: ParallelConfig) -> None:
    """Log the stages, and config keys whose effect is limited."""
    log.info("pipeline:\n%s", model)
    if config.microbatches < schedule.ranks:
        log.warning(
            "microbatches = %d on %d ranks of a pipeline: some ranks are always idle. Use a "
            "multiple of %d.",
            config.microbatches,
            schedule.ranks,
            schedule.ranks,
        )
    if config.active_microbatches and not schedule.spec.all_forward_first:
        log.info(
            "active_microbatches = %d has no effect: schedule %s limits the micro-batches in "
            "flight itself, to about the number of stages",
            config.active_microbatches,
            schedule.name,
        )
