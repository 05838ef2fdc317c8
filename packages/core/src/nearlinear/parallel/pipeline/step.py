"""`nl.step`: SMP v1's way to write a step, for one micro-batch, which is then run for all of them.

::

    @nl.step
    def train_step(model, ids, labels):
        loss = model(ids, labels=labels).loss
        model.backward(loss)
        return loss

The function runs up to ``model(...)`` once per micro-batch to learn what the model is called with.
Then, without a pipeline, it runs whole; with one the model runs on all stages, and the rest of the
function on the last, where ``model(...)`` returns what came out.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping

import torch

from ... import _torch, runtime
from ...errors import ConfigError, NearlinearError
from ..accumulate import accumulate, count_targets
from ..on_backward import on_backward
from . import pieces
from .calls import listening
from .everywhere import everywhere
from .losses import Losses
from .outputs import gathered

_EXAMPLE = (
    "write `loss = model(x, labels=y).loss; model.backward(loss); return loss`, for one micro-batch"
)


def step(
    function: Callable | None = None,
    *,
    non_split_inputs: Collection[str] = (),
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
) -> Callable:
    """Decorate a function of one micro-batch; called with a batch, it runs for ``microbatches``.

    Tensors among its arguments, also in dicts and lists, are cut along dim 0, or
    ``input_split_axes[name]``; objects with ``smp_slice(count, i, axis)`` cut themselves; those
    named in ``non_split_inputs`` and all others go to every micro-batch. Every value it returns
    comes back as a `StepOutput`, on all pipeline ranks.

    Gradients are as after `nearlinear.accumulate` over the micro-batches. Under ``torch.no_grad()``
    or with ``model.eval()`` nothing is differentiated, and ``model.backward`` is not called.
    ``detach_outputs = False`` keeps outputs' graphs, but on a pipeline, where they are used up.
    Code before ``model(...)`` runs more than once. Raises NearlinearError, DataError.
    """
    if function is None:
        return functools.partial(
            step,
            non_split_inputs=non_split_inputs,
            input_split_axes=input_split_axes,
            detach_outputs=detach_outputs,
        )
    axes, signature = dict(input_split_axes or {}), inspect.signature(function)
    _check_names(function, signature, {*non_split_inputs, *axes})

    @functools.wraps(function)
    def run(*args, **kwargs):
        now = runtime.current()
        given, count = signature.bind(*args, **kwargs), now.config.microbatches
        parts = []
        for i in range(count):
            cut = pieces.arguments(given, count, i, non_split_inputs, axes)
            parts.append(_torch.map_tensors(lambda t: t.to(now.device), cut))
        learned = [_learn(function, part) for part in parts]
        model = learned[0].model
        if getattr(model, "_nearlinear_step", None) is not None:
            raise NearlinearError(
                "a function under @nl.step accumulates micro-batches by itself: call it outside "
                "nl.accumulate, and raise microbatches instead"
            )
        calls = [each.call for each in learned]
        way = _on_stages if hasattr(model, "_nearlinear_pipeline") else _here
        return gathered(way(function, parts, model, calls), detach_outputs)

    return run


def _here(function: Callable, parts: list, model, calls: list[dict]) -> list:
    """Run ``function`` for all micro-batches; what each returned."""
    if not _training(model):
        return [_run(function, part, _Whole(function, trains=False)) for part in parts]
    return [
        _run(function, part, _Whole(function, trains=True))
        for part, _ in zip(parts, accumulate(model, calls), strict=True)
    ]


def _on_stages(function: Callable, parts: list, model, calls: list[dict]) -> list:
    """Run ``model`` on its stages and ``function`` on the last; what each micro-batch returned."""
    engine, results = model._nearlinear_pipeline, [None] * len(calls)
    counts, trains = [count_targets(call) for call in calls], _training(model)

    def make(i: int, output) -> torch.Tensor:
        listener = _Final(function, output, trains)
        results[i] = _run(function, parts[i], listener)
        return torch.zeros(()) if listener.loss is None else listener.loss

    if trains:
        for _ in accumulate(model, [calls], weight=lambda calls: sum(counts)):
            losses = Losses(model, counts)
            engine.run(model, calls, losses.of(make))
            losses.settle()
    else:
        losses = Losses(model, counts)
        engine.evaluate(model, calls, losses.of(make))
        losses.settle()
    now = engine.now
    if now.mesh.pipeline == 1:
        return results
    return everywhere(results, engine.source, now.group("pipeline"), now.device)


def _run(function: Callable, part: tuple, listener):
    with listening(listener):
        result = function(*part[0], **part[1])
    listener.finish()
    return result


def _training(model) -> bool:
    return torch.is_grad_enabled() and model.training


class _Learned(BaseException):
    """Ends a function at its call of the model; no Exception, which it might catch."""

    def __init__(self, model, call: dict):
        super().__init__()
        self.model, self.call = model, call


class _Learning:
    def __init__(self):
        self.autocast = _autocast()

    def called(self, model, args, kwargs):
        if hasattr(model, "_nearlinear_pipeline") and _autocast() != self.autocast:
            raise NearlinearError(
                "@nl.step: torch.autocast around model(...) does not reach the stages of a "
                'pipeline: leave it out, and shard with nl.shard(pipe, precision="bf16")'
            )
        raise _Learned(model, model.arguments(*args, **kwargs))

    def backward(self, loss):
        raise NearlinearError(f"model.backward(loss) before model(...) was called: {_EXAMPLE}")


def _autocast() -> tuple[bool, torch.dtype]:
    kind = runtime.current().device.type
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _learn(function: Callable, part: tuple) -> _Learned:
    """What ``function`` calls the model with."""
    try:
        with listening(_Learning()):
            function(*part[0], **part[1])
    except _Learned as learned:
        return learned
    raise NearlinearError(
        f"@nl.step: {function.__name__} did not call a model that nl.shard has sharded: {_EXAMPLE}"
    )


class _Whole:
    """Runs a model that is whole on this rank: one forward pass, one backward pass."""

    def __init__(self, function: Callable, trains: bool):
        self.name, self.trains, self.calls, self.loss = function.__name__, trains, 0, None

    def called(self, model, args, kwargs):
        self.calls += 1
        if self.calls > 1:
            raise NearlinearError(
                f"@nl.step: {self.name} called the model twice in one micro-batch: {_EXAMPLE}"
            )
        return self.answer(model, args, kwargs)

    def answer(self, model, args, kwargs):
        with listening(None):
            return model(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        if self.loss is not None:
            raise NearlinearError(
                f"@nl.step: {self.name} called model.backward twice in one micro-batch: add the "
                "losses up and call it once"
            )
        if not self.trains:
            raise NearlinearError(
                f"@nl.step: {self.name} called model.backward of a model in eval mode, or under "
                "torch.no_grad(): call model.train(), or leave backward out"
            )
        self.loss = loss
        self.differentiate(loss)

    def differentiate(self, loss: torch.Tensor) -> None:
        loss.backward()

    def finish(self) -> None:
        """The function has returned."""
        if self.trains and self.loss is None:
            raise NearlinearError(
                f"@nl.step: {self.name} returned without model.backward(loss): {_EXAMPLE}, or "
                "evaluate under torch.no_grad()"
            )


class _Final(_Whole):
    """Answers with what came out of the last stage; the schedule runs the backward pass."""

    def __init__(self, function: Callable, output, trains: bool):
        super().__init__(function, trains)
        self.finished = False
        self.output = _torch.map_tensors(
            lambda tensor: on_backward(tensor, self._guarded) if tensor.requires_grad else tensor,
            output,
        )

    def _guarded(self, gradient: torch.Tensor) -> torch.Tensor:
        """No backward pass goes through the output before the schedule's."""
        if not self.finished:
            raise NearlinearError(
                f"@nl.step: {self.name} called loss.backward(), which a pipeline runs in its turn: "
                "write model.backward(loss)"
            )
        return gradient

    def answer(self, model, args, kwargs):
        return self.output

    def differentiate(self, loss: torch.Tensor) -> None:
        """Later, in its turn."""

    def finish(self) -> None:
        super().finish()
        self.finished = True


def _check_names(function: Callable, signature: inspect.Signature, names: set[str]) -> None:
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    unknown = names - set(signature.parameters)
    if unknown and inspect.Parameter.VAR_KEYWORD not in kinds:
        raise ConfigError(
            f"@nl.step: {function.__name__} has no argument {sorted(unknown)[0]!r}; its arguments "
            f"are {', '.join(signature.parameters)}"
        )
