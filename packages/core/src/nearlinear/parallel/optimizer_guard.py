"""Refuse an optimizer step on gradients that are not there.

Under two-hop synchronisation the gradients exist only after the last micro-batch. An optimizer
stepping before that finds ``grad is None`` everywhere and does nothing, without a word. One hook on
all optimizers turns that into an error.
"""

import weakref

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

_unfinished: "weakref.WeakKeyDictionary[torch.nn.Module, str]" = weakref.WeakKeyDictionary()
_watching = False


def watch_optimizers() -> None:
    """Install the check, once per process."""
    global _watching
    if not _watching:
        register_optimizer_step_pre_hook(_refuse_unfinished)
        _watching = True


def begin(model: torch.nn.Module, why: str) -> None:
    """From now until `finish`, a step over ``model``'s parameters raises RuntimeError(``why``)."""
    _unfinished[model] = why


def finish(model: torch.nn.Module) -> None:
    _unfinished.pop(model, None)


def check(parameters) -> None:
    """RuntimeError if any of ``parameters`` belongs to a model between `begin` and `finish`."""
    if not _unfinished:
        return
    asked = {id(parameter) for parameter in parameters}
    for model, why in list(_unfinished.items()):
        if any(id(parameter) in asked for parameter in model.parameters()):
            raise RuntimeError(why)


def _refuse_unfinished(optimizer, args, kwargs) -> None:
    check(p for group in optimizer.param_groups for p in group["params"])
