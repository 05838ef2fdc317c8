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
from .call_interception import forward_arguments
from .model_state import (
    ModelState,
    fsdp_roots,
    local_tensor,
    model_state,
    optimizer_parameter,
    parameter_state,
    runtime_of,
)
from .targets import (
    Prediction,
    TargetMeasurement,
    loss_of,
    measure_targets,
    predict_targets,
    unknown_targets,
)

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
    step = AccumulationStep(model, None, two_hop)
    _refuse_parts_of_batches(model)
    given, pipe = list(micro_batches), model_state(model).pipeline
    return step.run(given if pipe is None else pipe.shared_batch(given), weight)


def accumulation(
    model: nn.Module, num_micro_batches: int | None = None, *, two_hop: bool = True
) -> AccumulationStep:
    """Begin an optimizer step whose micro-batches come one by one, in a loop that is not yours.

    ::

        with nl.accumulation(model, num_micro_batches=2) as step:
            for batch in micro_batches:
                with step.micro_batch(batch):
                    model(**batch).loss.backward()
        optimizer.step()

    The gradients are those of `accumulate`, as are the errors. They are complete when the last
    micro-batch has ended, also inside the outer ``with``. Leaving that earlier drops them. Targets
    are counted as micro-batches come, and the gradients are divided by their number at the end.

    Args:
        model: Model sharded by ``nl.shard``.
        num_micro_batches: Number of micro-batches of the step, equal on all ranks. None: unknown,
            then call ``step.micro_batch(batch, last=True)`` for the last one.
        two_hop: As in `accumulate`.

    Without ``with`` call `AccumulationStep.begin_micro_batch` and `end_micro_batch`.
    """
    if num_micro_batches is not None and num_micro_batches < 1:
        raise NearlinearError(
            f"nl.accumulation(num_micro_batches={num_micro_batches}): a step has at least 1 "
            "micro-batch; leave the number out if it is unknown"
        )
    step = AccumulationStep(model, num_micro_batches, two_hop)
    _refuse_parts_of_batches(model)
    if step.runtime.mesh.pipeline > 1 and step.runtime.config.pipeline_batch == "first_stage":
        raise ConfigError(
            "nl.accumulation with pipeline_batch = 'first_stage': micro-batches that come one by "
            "one are not sent to the other stages. Use nl.accumulate, or read on every rank."
        )
    return step


def _refuse_parts_of_batches(model: nn.Module) -> None:
    """Raise ConfigError if every tensor rank is given its part of a batch."""
    config = runtime_of(model).config
    if config.tensor_parallel_degree > 1 and not config.prescaled_batch:
        raise ConfigError(
            "prescaled_batch = false with tensor_parallel_degree > 1: only a function under "
            "@smp.step (nearlinear.compat.smp), after smp.init, gathers the batches of tensor "
            "ranks. Set it to true and read by data rank, as nl.data.Loader does."
        )


class NoTargets(DataError):
    """A step without a target on any rank, so that it has no mean loss."""


class AccumulationStep:
    """Weights of a step's micro-batches, and flags for their synchronization.

    `accumulate` and `accumulation` make it.
    """

    def __init__(self, model: nn.Module, num_micro_batches: int | None, two_hop: bool):
        if not all(isinstance(root, FSDPModule) for root in fsdp_roots(model)):
            raise NearlinearError(
                f"nl.accumulate and nl.accumulation need a sharded model, and this "
                f"{type(model).__name__} is not: call nl.shard(model) first"
            )
        self.model: nn.Module = model
        self.num_micro_batches: int | None = num_micro_batches
        self.two_hop: bool = two_hop
        self._state: ModelState = model_state(model)
        assert self._state.runtime is not None
        self.runtime: Runtime = self._state.runtime
        self.count_by_user: Callable[[Any], float] | None = None
        self.batches: list[Any] = []
        """Micro-batches of the step; None for one that is known by its model call only."""
        self.predicted: list[Prediction] = []
        self.counts: list[float] = []
        self.targets: float = 0.0
        """Expected targets of the step on all ranks, the divisor of the weights."""
        self._measurement: TargetMeasurement | None = TargetMeasurement(model)
        """None if the number of targets is known for sure before the step."""
        self.position: int = -1
        self.is_last: bool = False
        self.backwards: int = 0
        self.loss_outside: bool = False
        """True if the model's output for the micro-batch holds no loss."""
        self.earlier: list[tuple[nn.Parameter, torch.Tensor]] = []
        """Gradients from before the step."""
        self.hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.ended: bool = False

    def run(
        self,
        micro_batches: list[Any],
        weight: Callable[[Any], float] | None,
        only: int | None = None,
    ) -> Generator[Any, None, None]:
        """Yield the micro-batches; see `accumulate`.

        Args:
            micro_batches: Those of the step.
            weight: As in `accumulate`.
            only: Index of a single one to run, with its weight in the step.
        """
        self.count_by_user, self.batches = weight, micro_batches
        self.num_micro_batches = number = len(micro_batches)
        for batch in micro_batches:
            self._add_prediction(self._predict(batch))
        by_rule = all(each.by_rule for each in self.predicted)
        if not self._can_measure or (by_rule and (weight or self._state.target_rule_verified)):
            self._measurement = None
        self._agree_on_targets(number)
        if number == 0:
            raise DataError("nl.accumulate got no micro-batches: is the data exhausted?")
        known = self._measurement is None or by_rule
        if self.targets <= 0 and known and self.runtime.replicas == 1:
            raise _no_targets()

        if only is not None:
            self.batches, self.predicted = [micro_batches[only]], [self.predicted[only]]
            self.counts = [self.counts[only]]
            self.num_micro_batches, self._measurement = 1, None

        def loop() -> Generator[Any, None, None]:
            try:
                self._open()
                for batch in self.batches:
                    self.begin_micro_batch(batch)
                    yield batch
                    self.end_micro_batch()
            finally:
                self.leave()

        return loop()

    def __enter__(self) -> AccumulationStep:
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    @contextlib.contextmanager
    def micro_batch(
        self, batch: Any = None, *, targets: float | None = None, last: bool = False
    ) -> Iterator[None]:
        """Run the next micro-batch in this block: one forward and one backward pass.

        Args:
            batch: Arguments of the model, from which targets are counted as in `accumulate`.
                Default: those of the block's call of the model. A pipeline needs them.
            targets: Number of targets. Default: counted, or measured in the loss.
            last: True for the last micro-batch of a step of unknown length, or of one that is
                shorter than ``num_micro_batches``.
        """
        self.begin_micro_batch(batch, targets=targets, last=last)
        try:
            yield
        except BaseException:
            self.leave()
            raise
        self.end_micro_batch()

    def begin_micro_batch(
        self, batch: Any = None, *, targets: float | None = None, last: bool = False
    ) -> None:
        """Begin a micro-batch; arguments as in `micro_batch`."""
        if self.ended:
            raise NearlinearError(
                "this step has ended: begin the next one with nl.accumulation(model)"
            )
        if self.position >= 0:  # without an end_micro_batch only if that raised
            self._check_one_backward()
        self._open()
        self.position += 1
        self.backwards, self.loss_outside = 0, False
        self.is_last = last or self.position + 1 == self.num_micro_batches
        if len(self.batches) == self.position:
            self.batches.append(batch)
        if len(self.counts) == self.position and (batch is not None or targets is not None):
            self._add_prediction(
                self._predict(batch) if targets is None else Prediction(targets, given=True)
            )
            self._agree_once_on_targets()
        self._set_synchronization(self.is_last)
        if self._state.pipeline is not None and self.position == 0:
            self._set_earlier_aside()

    def end_micro_batch(self) -> None:
        """End a micro-batch, and with the last one the step: its gradients are complete."""
        self._check_one_backward()
        if self.is_last:
            self._finish()
        else:
            refuse_optimizer_steps(self.model, self._unfinished(self.position + 1))

    def backward(self, loss: torch.Tensor) -> None:
        """Run ``loss.backward()``; measure the targets of a loss outside of the model's output.

        A sum of several means has no such number: the targets are then those that were counted.
        """
        if self.loss_outside and self._measures(self.predicted[self.position]):
            found = measure_targets(loss)
            if len(found) == 1:
                self.counts[self.position] = found[0][0]
        loss.backward()

    def _predict(self, batch: Any) -> Prediction:
        if self.count_by_user is not None:
            return Prediction(self.count_by_user(batch), by_rule=True, given=True)
        return predict_targets(self.model, batch)

    def _add_prediction(self, prediction: Prediction) -> None:
        if prediction.needs_measurement and not self._can_measure:
            raise unknown_targets(self.model)
        self.predicted.append(prediction)
        self.counts.append(prediction.count)

    @property
    def _can_measure(self) -> bool:
        """Return False for ranks that compute one loss together.

        Their loss is that of `CausalLoss`, or of the last stage, and must have a rule.
        """
        return self._state.pipeline is None and not {"tensor", "context"} & self._state.layout.axes

    def _measures(self, prediction: Prediction) -> bool:
        return self._measurement is not None and self._can_measure and not prediction.given

    def _agree_once_on_targets(self) -> None:
        """Estimate the step's targets from the first micro-batch that has any on some rank."""
        if self.targets <= 0:
            self._agree_on_targets(self.num_micro_batches or 0)
            self.targets *= self.num_micro_batches or 1

    def _agree_on_targets(self, number: int, *summary: float) -> list[float]:
        """Sum the targets and ``summary`` over all ranks; return the sums of ``summary``.

        One all-reduce, which also detects ranks with other numbers of micro-batches, that would
        wait for each other forever.
        """
        values = [sum(self.counts), number, number**2, *summary]
        totals = torch.tensor(values, dtype=torch.float64, device=self.runtime.device)
        self.runtime.all_reduce(totals)
        self.targets, numbers, squares, *sums = totals.tolist()
        if self.runtime.mesh.world * squares != numbers**2:
            raise NearlinearError(
                f"this rank has {number} micro-batches and other ranks have other numbers: give "
                "every rank equally many, with labels -100 where there is no data"
            )
        return sums

    def _open(self) -> None:
        """Take over the model, unless that is done."""
        if self.hooks or self.ended:
            return
        state = self._state
        if state.accumulation is not None:
            state.accumulation.leave()
        state.accumulation = self
        self.hooks = [
            self.model.register_forward_pre_hook(self._note_call, prepend=True, with_kwargs=True),
            self.model.register_forward_hook(self._weight_outputs),
        ]
        refuse_optimizer_steps(self.model, self._unfinished(0))

    def _set_earlier_aside(self) -> None:
        """Take earlier gradients off the parameters, before the first backward pass.

        Not before the forward pass, since some loops zero gradients between the two.
        """
        found = dict.fromkeys(p for p in _all_parameters(self.model) if p.grad is not None)
        self.earlier = [(p, p.grad) for p in found if p.grad is not None]
        for parameter, _ in self.earlier:
            parameter.grad = None
        for reducer in self._state.partial_gradients:
            reducer.begin()

    def _close(self) -> None:
        """Give the model back."""
        for hook in self.hooks:
            hook.remove()
        self.hooks, self.ended = [], True
        self._state.accumulation = None
        self._set_synchronization(last=True)

    def _finish(self) -> None:
        """Complete the gradients of the step."""
        self._close()
        state = self._state
        for reducer in state.partial_gradients:
            reducer.reduce()
        self._free_gathered()
        self._conclude_targets()
        scaler = state.loss_scaler
        if scaler is not None and self.runtime.replicas == 1:  # else after the sum over replicas
            scaler.update(scaler.unscale(self.model))
        if scaler is None or not scaler.overflow:
            for parameter, gradient in self.earlier:
                new = parameter.grad
                parameter.grad = gradient if new is None else gradient.add_(new)
        self.earlier = []
        allow_optimizer_steps(self.model)

    def leave(self) -> None:
        """Drop the gradients of a step that has not ended. Later calls do nothing."""
        if not self.hooks:
            self.ended = True
            return
        self._close()
        self.earlier = []
        refuse_optimizer_steps(
            self.model, self._unfinished(max(self.position, 0) + (self.backwards > 0))
        )
        state = self._state
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

    def _conclude_targets(self) -> None:
        """Divide the gradients by the final instead of the expected number of targets."""
        if self._measurement is None:
            return
        expected = self.targets or 1.0
        summary = self._agree_on_targets(self.position + 1, *self._measurement.summary())
        self._measurement.conclude(*summary)
        if self.targets <= 0 and self.runtime.replicas == 1:
            raise _no_targets()
        if self.targets != expected and self.runtime.replicas > 1:
            raise NearlinearError(
                "elastic.replicas: the number of targets must be known before a step, and this "
                f"model's loss had {self.targets:g} where {expected:g} were expected"
            )
        if self.targets != expected:
            parameters = map(optimizer_parameter, self.model.parameters())
            gradients = [local_tensor(p.grad) for p in parameters if p.grad is not None]
            torch._foreach_mul_(gradients, expected / self.targets)

    def targets_of(self, batch: Any) -> float | None:
        """Return the number of targets of ``batch`` if the step knows it."""
        if batch is self.batches[self.position]:
            return self.counts[self.position]
        return None if self.count_by_user is None else self.count_by_user(batch)

    def _free_gathered(self) -> None:
        if self._state.pipeline is not None:
            self._state.pipeline.reshard()
        if self._state.prefetch is not None:
            self._state.prefetch.end_step()

    def _set_synchronization(self, last: bool) -> None:
        """Set how far the next backward pass reduces, and which units stay gathered after it."""
        state = self._state
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
        if len(self.counts) <= self.position:
            raise NearlinearError(
                "the targets of this micro-batch are unknown: pass its batch, "
                "step.micro_batch(batch), or step.micro_batch(targets=...)"
            )
        scaler = self._state.loss_scaler
        # FSDP2 averages over the ranks, which cancels their number
        weight = self.counts[self.position] * self.runtime.mesh.world / (self.targets or 1.0)
        return weight * (1.0 if scaler is None else scaler.loss_scale)

    def count_backward(self) -> None:
        """Count the backward pass that a pipeline ran for the current micro-batch."""
        self.backwards += 1

    def _check_one_backward(self) -> None:
        if self.ended:
            raise NearlinearError(
                "this nl.accumulate loop or nl.accumulation step was left and another one has "
                "begun: finish one before you begin the next"
            )
        if self.backwards != 1:
            raise NearlinearError(
                f"micro-batch {self._counted(self.position + 1)} was followed by {self.backwards} "
                "backward passes: the body of nl.accumulate's loop, or of step.micro_batch, runs "
                "one forward of the model and one backward from its outputs (tensors, tuples, "
                "dicts or Hugging Face outputs); of a pipeline one pipe.step(batch)"
            )

    def _counted(self, number: int) -> str:
        total = self.num_micro_batches
        return f"{number}" if total is None else f"{number} of {total}"

    def _unfinished(self, done: int) -> str:
        return (
            f"optimizer.step() after {self._counted(done)} micro-batches: gradients are not "
            "synchronized across replicas until nl.accumulate's loop has run to its end, or the "
            "last micro-batch of nl.accumulation has ended"
        )

    def _note_call(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Forward pre-hook: take the model's arguments for a micro-batch that was not given."""
        if torch.is_grad_enabled() and len(self.counts) == self.position:
            self.batches[self.position] = batch = forward_arguments(self.model, args, kwargs)
            self._add_prediction(self._predict(batch))
            self._agree_once_on_targets()

    def _weight_outputs(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Forward hook: weight the gradients of the outputs, and count backward passes."""
        seen = []

        def count_once() -> None:
            if self.position == 0 and not self.backwards:
                self._set_earlier_aside()
            self.backwards += not seen
            if not seen and not self.is_last:
                schedule = self._state.prefetch
                if schedule is not None:
                    _torch.after_backward(schedule.hold_gradients)
            seen.append(True)

        def weight_tensor(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad:
                return tensor
            return transform_grad(tensor, _WeightOnce(lambda: self.weight, count_once))

        position = self.position
        if torch.is_grad_enabled() and self._measures(self.predicted[position]):
            assert self._measurement is not None
            self.loss_outside = loss_of(output) is None
            self.counts[position] = self._measurement.observe(
                self.batches[position], output, self.predicted[position]
            )
        if self._state.loss_scaler is not None:
            output = loss_scaler.widen_output(output)
        return _torch.map_tensors(weight_tensor, output)


class _WeightOnce:
    """Multiplies a gradient by the result of ``weight``, once.

    The loss depends on the logits. A gradient that flows through both outputs must be weighted
    once, so each output is a new tensor with a transform of its own.
    """

    def __init__(self, weight: Callable[[], float], count: Callable[[], None]):
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
        return gradient * self.weight()


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
    """Raise RuntimeError if ranks have yet to sum the gradients of one of ``parameters``."""
    parameters = list(parameters)
    owners = (parameter_state(parameter).model for parameter in parameters)
    if any(owner is not None and owner.runtime is None for owner in owners):
        raise RuntimeError(
            "nl.transform split the model over ranks, whose gradients nothing sums: call "
            "nl.shard(model) after nl.transform, and build the optimizer from its parameters()"
        )
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


@contextlib.contextmanager
def defer_replica_reduction(model: nn.Module) -> Iterator[None]:
    """Do not all-reduce across replicas in the backward passes of this block.

    Outside of `accumulate`, for loops with a ``no_sync`` of their own: sums stay inside the shard
    groups until the next backward pass after the block, which all-reduces all of them.
    """
    set_replica_reduction(model, False)
    try:
        yield
    finally:
        set_replica_reduction(model, True)


def set_replica_reduction(model: nn.Module, last: bool) -> None:
    """Set whether the next backward pass all-reduces across replicas, outside of `accumulate`."""
    reduction = model_state(model).reduction
    if reduction is not None:
        reduction.last, reduction.two_hop = last, True
    for root in fsdp_roots(model):
        assert isinstance(root, FSDPModule)
        root.set_requires_all_reduce(last)
        root.set_is_last_backward(last)
