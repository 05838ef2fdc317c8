"""Refuse an optimizer step that would do nothing, without a word.

Two mistakes look alike: stepping before `accumulate` has synchronised the gradients, and an
optimizer built before `shard`, which holds parameters that the model no longer has. Either finds
``grad is None`` everywhere. One hook on all optimizers turns both into an error.
"""

import contextlib
import threading
import weakref
from collections.abc import Iterator

import torch
from torch.distributed.fsdp import FSDPModule
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import _torch
from . import slices
from .roots import roots_of

_unfinished: "weakref.WeakKeyDictionary[torch.nn.Module, str]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_watching = False


def watch_optimizers() -> None:
    """Install the check, once per process."""
    global _watching
    with _lock:
        if not _watching:
            register_optimizer_step_pre_hook(_refuse_step)
            _watching = True


def begin(model: torch.nn.Module, why: str) -> None:
    """From now until `finish`, a step over ``model``'s parameters raises RuntimeError(``why``)."""
    with _lock:
        _unfinished[model] = why


def finish(model: torch.nn.Module) -> None:
    """Steps over ``model``'s parameters are allowed again."""
    with _lock:
        _unfinished.pop(model, None)


@contextlib.contextmanager
def replacing(model: torch.nn.Module) -> Iterator[None]:
    """A step over parameters that ``model`` had before, and has no more, is an error afterwards.

    They are not held on to: as units are sharded one by one, their whole parameters are freed.
    """
    for parameter in model.parameters():
        parameter._nearlinear_replaced = True
    try:
        yield
    finally:
        for parameter in model.parameters():
            parameter._nearlinear_replaced = False


def check(parameters) -> None:
    """RuntimeError if any of ``parameters`` belongs to a model between `begin` and `finish`."""
    with _lock:
        unfinished = list(_unfinished.items())
    if unfinished:
        asked = {id(parameter) for parameter in parameters}
        for model, why in unfinished:
            if any(id(parameter) in asked for parameter in _parameters(model)):
                raise RuntimeError(why)


def _parameters(model: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Those the model shows now, those an optimizer holds while units stay gathered, slices."""
    yield from model.parameters()
    for root in roots_of(model):
        for unit in root.modules():
            if isinstance(unit, FSDPModule):
                sharded = _torch.sharded_parameters(unit)
                yield from sharded
                yield from map(slices.of, sharded)


def _refuse_step(optimizer, args, kwargs) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(getattr(parameter, "_nearlinear_replaced", False) for parameter in parameters):
        raise RuntimeError(
            "the optimizer was built before nl.shard, which replaced the model's parameters: build "
            "it after, from the sharded model's parameters()"
        )
    if any(slices.of(parameter) is not parameter for parameter in parameters):
        raise RuntimeError(
            "shard_optimizer_state = true, and this optimizer has the model's parameters, whose "
            "gradients replicas share out: wrap it, nl.shard_optimizer(optimizer, model)"
        )
    check(parameters)
