"""What `nearlinear.step` puts around a model: it learns what it is called with, and answers.

Inside a step's function ``model(...)`` and ``model.backward(loss)`` mean what the step says; other
calls of the model are its own.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import Protocol

import torch

from ...errors import NearlinearError

_here = threading.local()


class Listener(Protocol):
    """What a step's function talks to while it runs."""

    def called(self, model, args: tuple, kwargs: dict):
        """Answers ``model(*args, **kwargs)``."""

    def backward(self, loss: torch.Tensor) -> None:
        """Answers ``model.backward(loss)``."""


class Called:
    """In front of a model's class: inside a step's function a `Listener` answers its calls."""

    def __call__(self, *args, **kwargs):
        listener = getattr(_here, "listener", None)
        if listener is None:
            return super().__call__(*args, **kwargs)
        return listener.called(self, args, kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        """The backward pass of a micro-batch's ``loss``, inside a function under `nearlinear.step`.

        Elsewhere ``loss.backward()``.
        """
        listener = getattr(_here, "listener", None)
        if listener is not None:
            listener.backward(loss)
        elif hasattr(self, "_nearlinear_pipeline"):
            raise NearlinearError(
                "model.backward(loss) of a pipeline stands in a function under @nl.step; elsewhere "
                "pipe.step(batch) runs both passes"
            )
        else:
            loss.backward()

    def arguments(self, *args, **kwargs) -> dict:
        """What the model's forward is given, by name."""
        return by_name(self.forward, args, kwargs)


def by_name(forward: Callable, args: tuple, kwargs: dict) -> dict:
    signature = inspect.signature(forward)
    named = dict(signature.bind(*args, **kwargs).arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named |= named.pop(parameter.name, {})
    return named


@contextmanager
def listening(listener: Listener | None):
    """Have ``listener`` answer in this block, on this thread."""
    before = getattr(_here, "listener", None)
    _here.listener = listener
    try:
        yield
    finally:
        _here.listener = before


@functools.cache
def in_front(kind: type, mixin: type) -> type:
    """``mixin`` in front of ``kind``, under its name: checkpoints and logs speak of the model."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (mixin, kind), names)
