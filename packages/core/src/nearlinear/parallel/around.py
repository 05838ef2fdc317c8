"""What transforms do around a model's own forward pass: to its arguments, and to what it returns.

On a whole model hooks do it; a stage of a pipeline, whose arguments are those of the whole model
but for the hidden states it is handed, does it itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from torch import nn


class Around:
    """Functions to call before and after a model's forward pass, in the order they were added."""

    def __init__(self, model: nn.Module):
        self.names = list(inspect.signature(type(model).forward).parameters)[1:]
        self.before: list[Callable[[dict], dict]] = []
        """each takes the model's arguments by name, and returns those to go on with"""
        self.after: list[Callable] = []
        """each takes what the model returned, and returns what goes on"""

    def enter(self, args: tuple, kwargs: dict) -> dict:
        arguments = dict(zip(self.names, args, strict=False)) | kwargs
        for change in self.before:
            arguments = change(arguments)
        return arguments

    def leave(self, output):
        for change in self.after:
            output = change(output)
        return output


def around(model: nn.Module) -> Around:
    """Those of ``model``, made on first use."""
    if not hasattr(model, "_nearlinear_around"):
        found = model._nearlinear_around = Around(model)

        def enter(module, args, kwargs):
            return None if _is_stage(module) else ((), found.enter(args, kwargs))

        def leave(module, args, output):
            return None if _is_stage(module) else found.leave(output)

        model.register_forward_pre_hook(enter, with_kwargs=True)
        model.register_forward_hook(leave)
    return model._nearlinear_around


def _is_stage(module: nn.Module) -> bool:
    return hasattr(module, "_nearlinear_work")
