"""A table that is embedding on the first stage and head on the last: one parameter, two copies.

Each end has part of its gradient. Both are added up once per step (`joint`), so that the copies,
equal to begin with, stay equal; of two copies on one rank, where a pipeline comes back to where it
began, the optimizer sees one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ...runtime import Runtime
from .. import joint, slices
from ..layout import local
from .parts import Parts


@dataclass(frozen=True)
class Tie:
    """The names of one parameter: on the first stage, and its copy's on the last."""

    name: str
    copy: str


def ties_of(model: nn.Module, parts: Parts) -> list[Tie]:
    """What the first and the last stage of the whole ``model`` share."""
    first = {parameter for module in parts.before(model) for parameter in module.parameters()}
    names: dict[nn.Parameter, str] = {}
    found = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter in first and parameter in names:
            found.append(Tie(names[parameter], name))
        names.setdefault(parameter, name)
    return found


def untie(model: nn.Module, ties: list[Tie]) -> None:
    """Make copies of what both ends of this rank share, so that each stage is sharded by itself."""
    for tie in ties:
        module, _, key = tie.copy.rpartition(".")
        old = model.get_parameter(tie.copy)
        new = nn.Parameter(old.detach().clone(), requires_grad=old.requires_grad)
        if hasattr(old, "_nearlinear_history"):
            new._nearlinear_history = old._nearlinear_history
        model.get_submodule(module)._parameters[key] = new


class OnOneRank:
    """Two copies on one rank: ``copies`` follow ``parameters``, which the optimizer updates.

    Has the interface of `joint.Joint`, which copies on two ranks have.
    """

    def __init__(self, parameters: list[nn.Parameter], copies: list[nn.Parameter]):
        self.pairs = list(zip(parameters, copies, strict=True))
        self.before: bool | None = None  # None: nothing is under way

    def begin(self) -> None:
        self.before = True
        self.follow()

    @torch.no_grad()
    def follow(self) -> None:
        """Take the values that the optimizer, or a checkpoint, has given the parameters."""
        for parameter, twin in self.pairs:
            local(twin.data).copy_(local(parameter.data))

    @torch.no_grad()
    def add_up(self) -> None:
        """Give what has come to the copies to the parameters."""
        if self.before is None:
            return
        self.before = None
        for parameter, twin in (map(slices.of, pair) for pair in self.pairs):
            part, twin.grad = twin.grad, None
            if part is not None:
                parameter.grad = part if parameter.grad is None else parameter.grad.add_(part)


def install(model: nn.Module, now: Runtime) -> list:
    """What sums the gradients of both ends of ``model``, whose stages are sharded.

    A collective call of all ranks.
    """
    engine = model._nearlinear_pipeline
    if not engine.ties:
        return []
    if engine.ends_here:
        copies = [model.get_parameter(tie.copy) for tie in engine.ties]
        return [OnOneRank([model.get_parameter(tie.name) for tie in engine.ties], copies)]
    first, last = now.mesh.group("pipeline", now.rank)[0], engine.source
    at_an_end = now.rank in (first, last)
    if first == last:
        return []
    # torch names such a group by how many there are, so that those between the ends make one, too
    group = dist.new_group(
        [first, last] if at_an_end else [now.rank], use_local_synchronization=True
    )
    if not at_an_end:
        return []
    names = [tie.name if now.rank == first else tie.copy for tie in engine.ties]
    parameters = [model.get_parameter(name) for name in names]
    for parameter in parameters if now.rank == last else ():
        slices.of(parameter)._nearlinear_copy = True
    return [joint.Joint(group, parameters)]
