"""Interception of calls of a sharded model, for functions under `compat.smp.step`.

Inside such a function ``model(...)`` and ``model.backward(loss)`` are handled by a
`CallInterceptor`. Everywhere else the model behaves as before.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn

_thread = threading.local()


class CallInterceptor(Protocol):
    """Handles the calls of a model while a function under `compat.smp.step` runs."""

    def on_forward(self, model: nn.Module, args: tuple, kwargs: dict) -> object:
        """Return the result of ``model(*args, **kwargs)``, or raise."""

    def on_backward(self, loss: torch.Tensor) -> None:
        """Handle ``model.backward(loss)``."""


def current_interceptor() -> CallInterceptor | None:
    """Return the interceptor of this thread."""
    return getattr(_thread, "interceptor", None)


@contextmanager
def intercept_calls(interceptor: CallInterceptor | None) -> Iterator[None]:
    """Let ``interceptor`` handle calls of models in this block, on this thread; None: nobody."""
    before = current_interceptor()
    _thread.interceptor = interceptor
    try:
        yield
    finally:
        _thread.interceptor = before


def make_interceptable(model: nn.Module) -> None:
    """Let interceptors see the calls of ``model``, and give it ``backward``."""
    model.register_forward_pre_hook(_announce_call, prepend=True, with_kwargs=True)
    vars(model)["backward"] = functools.partial(_backward, model)


def _announce_call(model: nn.Module, args: tuple, kwargs: dict) -> None:
    """Forward pre-hook that runs before FSDP2's."""
    interceptor = current_interceptor()
    if interceptor is not None:
        interceptor.on_forward(model, args, kwargs)


def _backward(model: nn.Module, loss: torch.Tensor) -> None:
    """Run the backward pass of ``loss``, under `compat.smp.step` through its interceptor."""
    interceptor = current_interceptor()
    if interceptor is None:
        loss.backward()
    else:
        interceptor.on_backward(loss)


def forward_arguments(model: nn.Module, args: tuple, kwargs: dict) -> dict:
    """Return the arguments of the model's forward pass by name."""
    named = getattr(model, "arguments", None)  # a pipeline's own forward raises
    return arguments_by_name(model.forward, args, kwargs) if named is None else named(args, kwargs)


def arguments_by_name(forward: Callable, args: tuple, kwargs: dict) -> dict:
    """Return the arguments of ``forward`` by name, with ``**kwargs`` merged in."""
    signature = inspect.signature(forward)
    named = dict(signature.bind(*args, **kwargs).arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named |= named.pop(parameter.name, {})
    return named
