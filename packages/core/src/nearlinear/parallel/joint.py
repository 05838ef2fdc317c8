"""Gradients of which several ranks hold a part each: added up once per step.

Where tensor ranks split the tokens between two layers (sequence parallelism), norms, biases of what
was summed, and position embeddings are whole on all of them, and each rank's gradient is that of
its own tokens; a table that is tied across pipeline stages gets one part at each end. All of them
travel in one all-reduce, at the end of `accumulate`, or of a backward pass outside it.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from .. import _torch, runtime
from . import slices
from .layout import local


class Joint:
    """``parameters`` whose gradients, or those of their slices, are summed over ``group``, in this
    order on all its ranks."""

    def __init__(self, group: dist.ProcessGroup, parameters: Iterable[nn.Parameter]):
        self.group, self.parameters = group, [slices.of(p) for p in parameters]
        self.before: list[torch.Tensor | None] | None = None  # None: nothing is under way

    def begin(self) -> None:
        """Remember what is summed already, before a backward pass adds to it."""
        grads = (parameter.grad for parameter in self.parameters)
        self.before = [None if grad is None else local(grad).clone() for grad in grads]

    @torch.no_grad()
    def add_up(self) -> None:
        """Sum what has come since `begin`. A collective call of the group."""
        before, self.before = self.before, None
        if before is None:
            return
        parts, wanted = [], []
        for parameter, old in zip(self.parameters, before, strict=True):
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:  # another rank may have a part of it
                parameter.grad = torch.zeros_like(parameter)
            part = local(parameter.grad)
            parts.append(part if old is None else part - old)
            wanted.append((part, old))
        if not parts:
            return
        flat = torch.cat([part.reshape(-1) for part in parts]).to(runtime.current().device)
        dist.all_reduce(flat, group=self.group)
        for (part, old), new in zip(wanted, flat.split([p.numel() for p in parts]), strict=True):
            part.copy_(new.view_as(part))
            if old is not None:
                part.add_(old)


def install(model: nn.Module, joints: list[Joint]) -> None:
    """Have ``joints`` summed for ``model``, whose units are sharded already."""
    model._nearlinear_joints = joints
    if joints:
        model.register_forward_hook(_watch)


def of(model: nn.Module) -> list[Joint]:
    return getattr(model, "_nearlinear_joints", [])


def _watch(model: nn.Module, args, output):
    """Forward hook: outside `accumulate`, every backward pass is summed by itself."""
    if getattr(model, "_nearlinear_step", None) is None and torch.is_grad_enabled():
        begun = []

        def backward_begins(gradient):
            if not begun:
                begun.append(True)
                for joint in of(model):
                    joint.begin()
                # at the very end: FSDP2 and `reduction` put theirs there during the pass
                _torch.after_backward(lambda: _torch.after_backward(lambda: _add_up(model)))

        for tensor in _torch.tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(backward_begins)


def _add_up(model: nn.Module) -> None:
    for joint in of(model):
        joint.add_up()
