"""SMP v1's ``@smp.step``: a training step written for one micro-batch and run for all of them.

::

    from nearlinear.compat import smp

    @smp.step
    def train_step(model, ids, labels):
        loss = model(ids, labels=labels).loss
        model.backward(loss)
        return loss

    loss = train_step(model, ids, labels).reduce_mean()

The function first runs up to ``model(...)`` once per micro-batch, to record the model's arguments.
Without a pipeline it then runs completely for each micro-batch. With a pipeline the model runs on
all stages and the function on the last one, where ``model(...)`` returns the output of the stages.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from ... import _torch
from ...distributed import runtime as runtimes
from ...distributed.collectives import transform_grad
from ...distributed.objects import broadcast_object
from ...errors import ConfigError, NearlinearError
from ...fsdp.accumulate import accumulate
from ...fsdp.call_interception import CallInterceptor, forward_arguments, intercept_calls
from ...fsdp.model_state import model_state
from ...fsdp.targets import count_targets
from ...pipeline_parallel.microbatch import slice_arguments
from ...pipeline_parallel.runtime import BatchLoss, pipeline_runtime
from .batch import share_batch
from .session import Passes, session_or_none

_EXAMPLE = (
    "Write `loss = model(x, labels=y).loss; model.backward(loss); return loss`, for one micro-batch"
)

CallArguments = tuple[tuple, dict[str, Any]]
"""(args, kwargs) of the user's function for one micro-batch."""


class StepOutput:
    """One returned value of a step function, once per micro-batch in ``outputs``."""

    def __init__(self, outputs: list[Any]):
        self.outputs = outputs

    def reduce_mean(self) -> Any:
        """Return the mean over micro-batches, not weighted by their numbers of targets."""
        return self.reduce_sum() / len(self.outputs)

    def reduce_sum(self) -> Any:
        """Return the sum over micro-batches."""
        return sum(self.outputs[1:], self.outputs[0])

    def concat(self) -> torch.Tensor:
        """Concatenate tensors along dim 0, which gives the whole batch."""
        return torch.cat(self.outputs)

    def stack(self) -> torch.Tensor:
        """Stack tensors of one shape to (micro-batches, ...)."""
        return torch.stack(self.outputs)

    def detach(self) -> StepOutput:
        """Return the outputs without their graphs."""
        return StepOutput([_detach(value) for value in self.outputs])

    def __repr__(self) -> str:
        return f"StepOutput({self.outputs!r})"


def step(
    function: Callable | None = None,
    *,
    non_split_inputs: Collection[str] = (),
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
) -> Callable:
    """Decorate a function of one micro-batch; called with a batch, it runs for ``microbatches``.

    Tensors among the arguments, also in dicts and lists, are split along dim 0. Objects with
    ``smp_slice(count, i, dim)`` split themselves. Other values go to every micro-batch. Each
    returned value becomes a `StepOutput` on all pipeline ranks.

    Gradients are those of `nearlinear.accumulate` over the micro-batches. With a `DistributedModel`
    micro-batches have equal weights, as in v1. The arguments may be those of the first pipeline
    rank (``pipeline_batch``). Under ``torch.no_grad()``
    or in eval mode there is no backward pass, and the function must not call ``model.backward``.
    Code before ``model(...)`` runs more than once.

    Args:
        function: Calls the model once, and ``model.backward(loss)`` once in training.
        non_split_inputs: Names of arguments to pass whole to every micro-batch.
        input_split_axes: Dim to split by name of the argument, where it is not 0.
        detach_outputs: Set to False to keep the graphs of outputs. A pipeline always frees them.

    Raises:
        ConfigError: An argument in ``non_split_inputs`` or ``input_split_axes`` does not exist.
        NearlinearError: The function does not call the model or ``backward`` exactly once.
        DataError: A tensor does not divide into ``microbatches`` equal parts.
    """
    if function is None:
        return functools.partial(
            step,
            non_split_inputs=non_split_inputs,
            input_split_axes=input_split_axes,
            detach_outputs=detach_outputs,
        )
    user_function: Callable = function
    dims, signature = dict(input_split_axes or {}), inspect.signature(user_function)
    _check_argument_names(user_function, signature, {*non_split_inputs, *dims})

    @functools.wraps(user_function)
    def run_step(*args, **kwargs):
        runtime, session = runtimes.current(), session_or_none()
        bound, count = signature.bind(*args, **kwargs), runtime.config.microbatches
        if session is not None:
            session.partition()
        shared = share_batch(bound.arguments, runtime, non_split_inputs, dims)
        bound.arguments.update(shared)
        micro_batches = []
        for i in range(count):
            sliced = slice_arguments(bound, count, i, non_split_inputs, dims)
            micro_batches.append(_torch.map_tensors(lambda t: t.to(runtime.device), sliced))
        recorded = [_record_model_call(user_function, each) for each in micro_batches]
        model = recorded[0].model
        passes = None if session is None else session.passes(model)
        if passes is None and model_state(model).accumulation is not None:
            raise NearlinearError(
                "a function under @smp.step accumulates micro-batches by itself: call it outside "
                "nl.accumulate, and raise microbatches instead"
            )
        model_calls = [each.arguments for each in recorded]
        run = _run_locally if model_state(model).pipeline is None else _run_on_stages
        results = run(user_function, micro_batches, model, model_calls, passes)
        if session is not None and _is_training(model):
            session.run_step_hooks()
        return collect_outputs(results, detach_outputs)

    return run_step


def collect_outputs(results: list[Any], detach: bool = True) -> Any:
    """Merge the results of the micro-batches: one `StepOutput` for each value in them.

    Dicts, lists and tuples keep their structure; model outputs become dicts.
    """
    first = results[0]
    if isinstance(first, Mapping):
        return {key: collect_outputs([each[key] for each in results], detach) for key in first}
    if isinstance(first, list | tuple):
        items = [collect_outputs(list(each), detach) for each in zip(*results, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    return StepOutput([_detach(value) if detach else value for value in results])


def _detach(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _check_argument_names(
    function: Callable, signature: inspect.Signature, names: set[str]
) -> None:
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    unknown = names - set(signature.parameters)
    if unknown and inspect.Parameter.VAR_KEYWORD not in kinds:
        raise ConfigError(
            f"@smp.step: {function.__name__} has no argument {sorted(unknown)[0]!r}. Its arguments "
            f"are {', '.join(signature.parameters)}."
        )


def _run_locally(
    function: Callable,
    micro_batches: list[CallArguments],
    model: nn.Module,
    model_calls: list[dict],
    passes: Passes | None,
) -> list[Any]:
    """Run ``function`` for all micro-batches of a model without stages; return its results."""
    if not _is_training(model):
        return [_call(function, each, _OneCall(function, training=False)) for each in micro_batches]
    if passes is None:
        steps, factor = accumulate(model, model_calls), 1.0
    else:
        steps, factor = passes.take(len(micro_batches)), passes.loss_factor
    with contextlib.closing(steps):  # a failed step ends at once
        return [
            _call(function, each, _OneCall(function, training=True, factor=factor))
            for each, _ in zip(micro_batches, steps, strict=True)
        ]


def _run_on_stages(
    function: Callable,
    micro_batches: list[CallArguments],
    model: nn.Module,
    model_calls: list[dict],
    passes: Passes | None,
) -> list[Any]:
    """Run ``model`` on its stages and ``function`` on the last one; return its results."""
    pipe, results = pipeline_runtime(model), [None] * len(model_calls)
    training = _is_training(model)
    if passes is None:
        targets, factor = [count_targets(model, call) for call in model_calls], 1.0
    else:
        targets, factor = [1.0] * len(model_calls), passes.loss_factor

    def compute_loss(i: int, output: Any) -> torch.Tensor:
        interceptor = _LastStageCall(function, output, training)
        results[i] = _call(function, micro_batches[i], interceptor)
        return torch.zeros(()) if interceptor.loss is None else interceptor.loss * factor

    if training:
        if passes is None:
            steps = accumulate(model, [model_calls], weight=lambda calls: sum(targets))
        else:
            steps = passes.take(1)
        with contextlib.closing(steps):
            for _ in steps:
                loss = BatchLoss(model, targets)
                pipe.run(model, model_calls, loss.weighted(compute_loss))
                loss.broadcast()
    else:
        loss = BatchLoss(model, targets)
        pipe.evaluate(model, model_calls, loss.weighted(compute_loss))
        loss.broadcast()
    runtime = pipe.runtime
    if runtime.mesh.pipeline == 1:
        return results
    group, source = runtime.group("pipeline"), pipe.last_stage_rank
    return broadcast_object(results, source, group, runtime.device, "@smp.step: the result")


def _call(function: Callable, arguments: CallArguments, interceptor: _OneCall) -> Any:
    with intercept_calls(interceptor):
        result = function(*arguments[0], **arguments[1])
    interceptor.finish()
    return result


def _is_training(model: nn.Module) -> bool:
    return torch.is_grad_enabled() and model.training


class _ModelCalled(BaseException):
    """Ends a function at its call of the model.

    Not an Exception, because the function could catch it.
    """

    def __init__(self, model: nn.Module, arguments: dict[str, Any]):
        super().__init__()
        self.model, self.arguments = model, arguments


class _CallRecorder(CallInterceptor):
    """Raises `_ModelCalled` with the arguments of the model."""

    def __init__(self):
        self.autocast = _autocast_state()

    def on_forward(self, model: nn.Module, args: tuple, kwargs: dict) -> object:
        if model_state(model).pipeline is not None and _autocast_state() != self.autocast:
            raise NearlinearError(
                "@smp.step: torch.autocast around model(...) does not reach the stages of a "
                'pipeline. Remove it, and shard with nl.shard(pipe, precision="bf16").'
            )
        raise _ModelCalled(model, forward_arguments(model, args, kwargs))

    def on_backward(self, loss: torch.Tensor) -> None:
        raise NearlinearError(
            f"@smp.step: model.backward(loss) was called before model(...). {_EXAMPLE}."
        )


def _autocast_state() -> tuple[bool, torch.dtype]:
    kind = runtimes.current().device.type
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _record_model_call(function: Callable, arguments: CallArguments) -> _ModelCalled:
    """Run ``function`` up to its call of the model; return the model and its arguments."""
    try:
        with intercept_calls(_CallRecorder()):
            function(*arguments[0], **arguments[1])
    except _ModelCalled as called:
        return called
    raise NearlinearError(
        f"@smp.step: {function.__name__} did not call a model that nl.shard has sharded. "
        f"{_EXAMPLE}."
    )


class _OneCall(CallInterceptor):
    """Checks that a function calls the model once and, in training, ``backward`` once.

    The model, which has no stages, computes by itself.
    """

    def __init__(self, function: Callable, training: bool, factor: float = 1.0):
        self.name, self.training, self.calls = function.__name__, training, 0
        self.factor = factor
        self.loss: torch.Tensor | None = None

    def on_forward(self, model: nn.Module, args: tuple, kwargs: dict) -> object:
        self.calls += 1
        if self.calls > 1:
            raise NearlinearError(
                f"@smp.step: {self.name} called the model twice in one micro-batch. {_EXAMPLE}."
            )
        return self.model_output()

    def model_output(self) -> object:
        """Return the model's output if the model itself does not compute it."""

    def on_backward(self, loss: torch.Tensor) -> None:
        if self.loss is not None:
            raise NearlinearError(
                f"@smp.step: {self.name} called model.backward twice in one micro-batch. Add the "
                "losses and call it once."
            )
        if not self.training:
            raise NearlinearError(
                f"@smp.step: {self.name} called model.backward of a model in eval mode or under "
                "torch.no_grad(). Call model.train(), or remove model.backward."
            )
        self.loss = loss
        self.differentiate(loss)

    def differentiate(self, loss: torch.Tensor) -> None:
        (loss * self.factor if self.factor != 1.0 else loss).backward()

    def finish(self) -> None:
        """Check the calls after the function has returned."""
        if self.training and self.loss is None:
            raise NearlinearError(
                f"@smp.step: {self.name} returned without model.backward(loss). {_EXAMPLE}, or "
                "evaluate under torch.no_grad()."
            )


class _LastStageCall(_OneCall):
    """Returns the output of the last stage as the model's; the schedule runs the backward pass."""

    def __init__(self, function: Callable, output: Any, training: bool):
        super().__init__(function, training)
        self.finished = False
        self.output = _torch.map_tensors(
            lambda tensor: (
                transform_grad(tensor, self._check_backward) if tensor.requires_grad else tensor
            ),
            output,
        )

    def _check_backward(self, gradient: torch.Tensor) -> torch.Tensor:
        """Raise if the function runs a backward pass through the output itself."""
        if not self.finished:
            raise NearlinearError(
                f"@smp.step: {self.name} called loss.backward(), but the schedule of a pipeline "
                "runs the backward pass. Call model.backward(loss) instead."
            )
        return gradient

    def model_output(self) -> object:
        return self.output

    def differentiate(self, loss: torch.Tensor) -> None:
        """Leave the backward pass to the schedule."""

    def finish(self) -> None:
        super().finish()
        self.finished = True
