"""Gradients to which several ranks contribute, summed once per step.

Under sequence parallelism norms, position embeddings and biases added after a sum are whole on
every tensor rank, and each rank's gradient covers its own tokens. A table tied across pipeline
stages gets one contribution at each end. All of them share one all-reduce at the end of
`accumulate`, or of a backward pass outside of it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from .. import _torch
from ..distributed.runtime import Runtime
from .model_state import local_tensor, model_state, optimizer_parameter


class PartialGradientReducer:
    """Sums the gradients of ``parameters``, or of their slices, over ``group``.

    The order of the parameters must be the same on all ranks of the group.
    """

    def __init__(
        self, group: dist.ProcessGroup, parameters: Iterable[nn.Parameter], device: torch.device
    ):
        self.group, self.device = group, device
        self.parameters = [optimizer_parameter(p) for p in parameters]
        self._before: list[torch.Tensor | None] | None = None  # None: no step is open

    def begin(self) -> None:
        """Record the gradients that exist before a backward pass adds to them."""
        grads = (parameter.grad for parameter in self.parameters)
        self._before = [None if grad is None else local_tensor(grad).clone() for grad in grads]

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum the contributions since `begin`. A collective call of the group."""
        before, self._before = self._before, None
        if before is None:
            return
        contributions, targets = [], []
        for parameter, old in zip(self.parameters, before, strict=True):
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:  # other ranks may contribute
                parameter.grad = torch.zeros_like(parameter)
            grad = local_tensor(parameter.grad)
            contributions.append(grad if old is None else grad - old)
            targets.append((grad, old))
        if not contributions:
            return
        flat = torch.cat([part.reshape(-1) for part in contributions]).to(self.device)
        dist.all_reduce(flat, group=self.group)
        sums = flat.split([part.numel() for part in contributions])
        for (grad, old), total in zip(targets, sums, strict=True):
            grad.copy_(total.view_as(grad))
            if old is not None:
                grad.add_(old)

    def abandon(self) -> None:
        """Forget an unfinished step."""
        self._before = None


def install_partial_gradients(model: nn.Module, runtime: Runtime) -> None:
    """Collect the reducers of all extensions of ``model``, whose units are sharded.

    A collective call.
    """
    state = model_state(model)
    state.partial_gradients = [
        reducer
        for extension in state.extensions
        for reducer in extension.partial_gradients(model, runtime)
    ]
    if state.partial_gradients:
        model.register_forward_hook(_reduce_after_backward)


def _reduce_after_backward(model: nn.Module, args, output) -> None:
    """Forward hook: outside `accumulate`, reduce at the end of every backward pass."""
    state = model_state(model)
    if state.accumulation is not None or not torch.is_grad_enabled():
        return
    begun = []

    def reduce() -> None:
        for reducer in state.partial_gradients:
            reducer.reduce()

    def backward_begins(gradient: torch.Tensor) -> None:
        if not begun:
            begun.append(True)
            for reducer in state.partial_gradients:
                reducer.begin()
            # Queued twice to run last: FSDP2 and `unit_collectives` queue theirs during the pass.
            _torch.after_backward(lambda: _torch.after_backward(reduce))

    for tensor in _torch.tensors_in(output):
        if tensor.requires_grad:
            tensor.register_hook(backward_begins)
