"""Two-hop gradient synchronization over the micro-batches of one optimizer step.

Source: MiCS (Zhang et al. 2022, arXiv:2205.00119). Every micro-batch reduce-scatters its gradients
inside the shard group, and only the last one all-reduces the sums across replicas. Units whose
unreduced gradients fit in ``memory_budget`` run both hops in the last micro-batch only, see
`prefetch`. The gradients equal those of one batch of all micro-batches of all ranks: each
micro-batch is weighted by its number of target tokens, so that uneven ones are correct too.

The module also guards optimizers. Stepping before `accumulate` has synchronized the gradients, and
stepping an optimizer built before ``nl.shard``, would silently do nothing, because ``grad`` is None
everywhere. A hook on all optimizers turns both into an error.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import _torch
from ..distributed.collectives import transform_grad
from ..distributed.runtime import Runtime
from ..errors import ConfigError, DataError, NearlinearError
from . import loss_scaler
from .model_state import (
    fsdp_roots,
    local_tensor,
    model_state,
    optimizer_parameter,
    parameter_state,
    runtime_of,
)
from .targets import Prediction, TargetMeasurement, predict_targets, unknown_targets

log = logging.getLogger(__name__)

Batch = TypeVar("Batch")


def accumulate(
    model: nn.Module,
    micro_batches: Iterable[Batch],
    *,
    weight: Callable[[Batch], float] | None = None,
    two_hop: bool = True,
) -> Generator[Batch, None, None]:
    """Yield each of ``micro_batches``; the body of the loop runs one forward and one backward.

    ::

        for batch in nl.accumulate(model, micro_batches):
            model(**batch).loss.backward()
        optimizer.step()

    ``loss`` is the mean over the targets of the micro-batch. Its value is unchanged and its
    gradient is weighted, so that after the loop every gradient is the mean over all targets of all
    data ranks. The weights apply to the gradients of the model's outputs (tensors, tuples, dicts,
    Hugging Face outputs): a penalty on parameters, or an activation captured by a hook, must be
    part of an output. All ranks need equally many micro-batches; one without targets (labels
    -100) has weight 0. In float16 gradients are multiplied by the loss scale. If they overflow on
    any rank, there are no gradients after the loop and the optimizer changes nothing, see
    `loss_scaler`. Leaving the loop early drops the step's gradients, and the next
    ``optimizer.step()`` raises until a whole step has run.

    Args:
        model: Model sharded by ``nl.shard``.
        micro_batches: Micro-batches of this rank for one optimizer step; of a pipeline with
            ``pipeline_batch = "first_stage"`` those of its first rank count.
        weight: Returns the number of targets of a micro-batch. Default: found by `targets` from
            the model's loss function; samples for a batch without ``labels``.
        two_hop: Synchronize replicas once per step. False: after every micro-batch, which gives the
            same gradients with more communication.

    Raises NearlinearError if a micro-batch was not followed by exactly one backward pass, if ranks
    disagree, or if the number of targets is unknown, and DataError if the step has no target.
    """
    if not all(isinstance(root, FSDPModule) for root in fsdp_roots(model)):
        raise NearlinearError(
            f"nl.accumulate needs a sharded model, and this {type(model).__name__} is not: call "
            "nl.shard(model) first"
        )
    config = runtime_of(model).config
    if config.tensor_parallel_degree > 1 and not config.prescaled_batch:
        raise ConfigError(
            "prescaled_batch = false with tensor_parallel_degree > 1: only a function under "
            "@smp.step (nearlinear.compat.smp), after smp.init, gathers the batches of tensor "
            "ranks. Set it to true and read by data rank, as nl.data.Loader does."
        )
    given, pipe = list(micro_batches), model_state(model).pipeline
    return AccumulationStep(
        model, given if pipe is None else pipe.shared_batch(given), weight, two_hop
    ).run()


class NoTargets(DataError):
    """A step without a target on any rank, so that it has no mean loss."""


class AccumulationStep:
    """Weights of a step's micro-batches, and flags for their synchronization."""

    def __init__(
        self, model: nn.Module, micro_batches: list, weight: Callable | None, two_hop: bool
    ):
        self.model, self.micro_batches, self.two_hop = model, micro_batches, two_hop
        self.state = state = model_state(model)
        assert state.runtime is not None
        self.count_by_user = weight
        self.predicted = [self._predict(batch) for batch in micro_batches]
        self.counts = [each.count for each in self.predicted]
        self.measurement = self._measurement()
        self.targets = _global_targets(state.runtime, self.counts)
        """Expected targets of the step on all ranks, the divisor of the weights."""
        if self.targets <= 0:
            if self.measurement is None or all(each.by_rule for each in self.predicted):
                raise _no_targets()
            self.targets = 1.0
        self.position = 0
        self.backwards = 0
        self.hook: torch.utils.hooks.RemovableHandle | None = None

    def _predict(self, batch: Any) -> Prediction:
        if self.count_by_user is not None:
            return Prediction(self.count_by_user(batch), by_rule=True)
        return predict_targets(self.model, batch)

    def _measurement(self) -> TargetMeasurement | None:
        """Return a new measurement unless the number of targets is known for sure.

        Ranks that compute one loss together cannot measure it. Their loss is that of `CausalLoss`,
        or of the last stage, and must have a rule.
        """
        layout, by_rule = self.state.layout, all(each.by_rule for each in self.predicted)
        if self.count_by_user is not None or (by_rule and self.state.target_rule_verified):
            return None
        if self.state.pipeline is None and not {"tensor", "context"} & layout.axes:
            return TargetMeasurement(self.model)
        if any(each.needs_measurement for each in self.predicted):
            raise unknown_targets(self.model)
        return None

    def run(self) -> Generator[Any, None, None]:
        """Yield the micro-batches; see `accumulate`."""
        state = self.state
        if state.accumulation is not None:
            state.accumulation.leave()
        total = len(self.micro_batches)
        state.accumulation = self
        self.hook = self.model.register_forward_hook(self._weight_outputs)
        if state.loss_scaler is not None:
            state.loss_scaler.begin(self.model)
        for reducer in state.partial_gradients:
            reducer.begin()
        refuse_optimizer_steps(self.model, _unfinished(0, total))
        try:
            for position, batch in enumerate(self.micro_batches):
                self.position, self.backwards = position, 0
                self._set_synchronization(last=position == total - 1)
                yield batch
                self._check_one_backward(position, total)
                refuse_optimizer_steps(self.model, _unfinished(position + 1, total))
            self.leave(done=True)
        finally:
            self.leave()

    def leave(self, done: bool = False) -> None:
        """End the step: finish it, or drop its sums. Later calls do nothing."""
        if self.hook is None:
            return
        self.hook.remove()
        self.hook = None
        state = self.state
        state.accumulation = None
        self._set_synchronization(last=True)
        if done:
            for reducer in state.partial_gradients:
                reducer.reduce()
            self._free_gathered()
            self._conclude_measurement()
            if state.loss_scaler is not None:
                state.loss_scaler.finish(self.model)
            allow_optimizer_steps(self.model)
            return
        finished = self.position + (self.backwards > 0)
        refuse_optimizer_steps(self.model, _unfinished(finished, len(self.micro_batches)))
        try:
            for root in fsdp_roots(self.model):
                _torch.abandon_backward(root)
        except RuntimeError as error:  # an all-gather in flight, whose peers are gone
            log.debug("while dropping an unfinished step: %s", error)
        if state.reduction is not None:
            state.reduction.abandon()
        if state.optimizer_slices is not None:
            state.optimizer_slices.abandon()
        for reducer in state.partial_gradients:
            reducer.abandon()
        self._free_gathered()
        self.model.zero_grad(set_to_none=True)

    def _conclude_measurement(self) -> None:
        """Divide the gradients by the measured instead of the expected number of targets."""
        if self.measurement is None:
            return
        runtime = self.state.runtime
        assert runtime is not None
        own = [sum(self.counts), *self.measurement.summary()]
        totals = torch.tensor(own, dtype=torch.float64, device=runtime.device)
        runtime.all_reduce(totals)
        targets, *summary = totals.tolist()
        self.measurement.conclude(*summary)
        if targets <= 0:
            raise _no_targets()
        if targets != self.targets:
            parameters = map(optimizer_parameter, self.model.parameters())
            gradients = [local_tensor(p.grad) for p in parameters if p.grad is not None]
            torch._foreach_mul_(gradients, self.targets / targets)

    def targets_of(self, batch: Any) -> float | None:
        """Return the number of targets of ``batch`` if the step knows it."""
        if batch is self.micro_batches[self.position]:
            return self.counts[self.position]
        return None if self.count_by_user is None else self.count_by_user(batch)

    def _free_gathered(self) -> None:
        if self.state.pipeline is not None:
            self.state.pipeline.reshard()
        if self.state.prefetch is not None:
            self.state.prefetch.end_step()

    def _set_synchronization(self, last: bool) -> None:
        """Set how far the next backward pass reduces, and which units stay gathered after it."""
        state = self.state
        across_replicas = last or not self.two_hop
        if state.optimizer_slices is not None:
            state.optimizer_slices.last = across_replicas
        if state.pipeline is not None:  # the schedule does the rest
            state.pipeline.reduce_replicas = across_replicas
            return
        if state.reduction is not None:
            # With slices no sum of full gradients is kept: each slice is added to the one before.
            state.reduction.last = last if state.optimizer_slices is None else across_replicas
            state.reduction.two_hop = self.two_hop
        root = self.model
        assert isinstance(root, FSDPModule)
        root.set_requires_all_reduce(across_replicas)  # for reductions of FSDP2's own
        root.set_is_last_backward(last)
        if state.prefetch is not None:
            state.prefetch.begin_micro_batch(last, self.two_hop)

    @property
    def weight(self) -> float:
        """Factor of the gradients of the current micro-batch."""
        runtime, scaler = self.state.runtime, self.state.loss_scaler
        assert runtime is not None
        # FSDP2 averages over the ranks, which cancels their number
        weight = self.counts[self.position] * runtime.mesh.world / self.targets
        return weight * (1.0 if scaler is None else scaler.loss_scale)

    def count_backward(self) -> None:
        """Count the backward pass that a pipeline ran for the current micro-batch."""
        self.backwards += 1

    def _check_one_backward(self, position: int, total: int) -> None:
        if self.hook is None:
            raise NearlinearError(
                "this nl.accumulate loop was left and another one has begun: finish one loop "
                "before you begin the next"
            )
        if self.backwards != 1:
            raise NearlinearError(
                f"micro-batch {position + 1} of {total} was followed by {self.backwards} backward "
                "passes: the body of nl.accumulate's loop runs one forward of the model and one "
                "backward from its outputs (tensors, tuples, dicts or Hugging Face outputs); of a "
                "pipeline one pipe.step(batch)"
            )

    def _weight_outputs(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Forward hook: weight the gradients of the outputs, and count backward passes."""
        seen = []

        def count_once() -> None:
            self.backwards += not seen
            if not seen and self.position < len(self.micro_batches) - 1:
                schedule = self.state.prefetch
                if schedule is not None:
                    _torch.after_backward(schedule.hold_gradients)
            seen.append(True)

        def weight_tensor(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad:
                return tensor
            return transform_grad(tensor, _WeightOnce(self.weight, count_once))

        position = self.position
        if self.measurement is not None and torch.is_grad_enabled():
            self.counts[position] = self.measurement.observe(
                self.micro_batches[position], output, self.predicted[position]
            )
        if self.state.loss_scaler is not None:
            output = loss_scaler.widen_output(output)
        return _torch.map_tensors(weight_tensor, output)


class _WeightOnce:
    """Multiplies a gradient by ``weight``, once.

    The loss depends on the logits. A gradient that flows through both outputs must be weighted
    once, so each output is a new tensor with a transform of its own.
    """

    def __init__(self, weight: float, count: Callable[[], None]):
        self.weight = weight
        self.count: Callable[[], None] | None = count

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        if self.count is None:
            raise NearlinearError(
                "a second backward pass through one forward pass inside nl.accumulate: add the "
                "losses and call backward once"
            )
        self.count()
        self.count = None
        return gradient * self.weight


def _unfinished(done: int, total: int) -> str:
    return (
        f"optimizer.step() after {done} of {total} micro-batches: gradients are not synchronized "
        "across replicas until nl.accumulate's loop has run to its end"
    )


def _global_targets(runtime: Runtime, counts: list[float]) -> float:
    """Return the number of targets of the step on all ranks.

    One all-reduce of three numbers, which also detects ranks that would wait for each other
    forever.
    """
    number = len(counts)
    values = [sum(counts), number, number**2]
    totals = torch.tensor(values, dtype=torch.float64, device=runtime.device)
    runtime.all_reduce(totals)
    targets, numbers, squares = totals.tolist()
    if runtime.mesh.world * squares != numbers**2:
        raise NearlinearError(
            f"this rank has {number} micro-batches and other ranks have other numbers: give every "
            "rank equally many, with labels -100 where there is no data"
        )
    if number == 0:
        raise DataError("nl.accumulate got no micro-batches: is the data exhausted?")
    return targets


def _no_targets() -> NoTargets:
    return NoTargets(
        "this step has no target token on any rank, so that the mean loss is undefined: check the "
        "labels, or use longer sequences"
    )


_unfinished_models: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_guard_installed = False


def guard_optimizers() -> None:
    """Install the hook that refuses steps without gradients, once per process."""
    global _guard_installed
    with _lock:
        if not _guard_installed:
            register_optimizer_step_pre_hook(_check_optimizer)
            _guard_installed = True


def refuse_optimizer_steps(model: nn.Module, message: str) -> None:
    """Make steps over ``model``'s parameters raise RuntimeError(``message``)."""
    with _lock:
        _unfinished_models[model] = message


def allow_optimizer_steps(model: nn.Module) -> None:
    """Undo `refuse_optimizer_steps`."""
    with _lock:
        _unfinished_models.pop(model, None)


@contextlib.contextmanager
def marking_replaced_parameters(model: nn.Module) -> Iterator[None]:
    """Make steps over parameters that ``model`` loses inside the block an error.

    The old parameters are not kept alive: they are freed as one unit after the other is sharded.
    """
    for parameter in model.parameters():
        parameter_state(parameter).replaced = True
    try:
        yield
    finally:
        for parameter in model.parameters():
            parameter_state(parameter).replaced = False


def check_gradients_complete(parameters: Iterable[nn.Parameter]) -> None:
    """Raise RuntimeError if one of ``parameters`` belongs to a model with an unfinished step."""
    with _lock:
        unfinished = list(_unfinished_models.items())
    if unfinished:
        given = {id(parameter) for parameter in parameters}
        for model, message in unfinished:
            if any(id(parameter) in given for parameter in _all_parameters(model)):
                raise RuntimeError(message)


def _all_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the visible parameters, the sharded ones of gathered units, and slices."""
    yield from model.parameters()
    for root in fsdp_roots(model):
        for unit in root.modules():
            if isinstance(unit, FSDPModule):
                sharded = _torch.sharded_parameters(unit)
                yield from sharded
                yield from map(optimizer_parameter, sharded)


def _check_optimizer(optimizer: torch.optim.Optimizer, args, kwargs) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(parameter_state(parameter).replaced for parameter in parameters):
        raise RuntimeError(
            "the optimizer was built before nl.shard, which replaced the model's parameters: build "
            "it after, from the sharded model's parameters()"
        )
    if any(optimizer_parameter(parameter) is not parameter for parameter in parameters):
        raise RuntimeError(
            "shard_optimizer_state = true, but this optimizer holds the model's parameters, whose "
            "gradients are divided among replicas: wrap it, nl.shard_optimizer(optimizer, model)"
        )
    check_gradients_complete(parameters)
