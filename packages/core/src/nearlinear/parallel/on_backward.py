"""Have a say in the gradient that comes back to a tensor, and leave the tensor alone."""

from __future__ import annotations

from collections.abc import Callable

import torch

Change = Callable[[torch.Tensor], torch.Tensor]


def on_backward(tensor: torch.Tensor, change: Change) -> torch.Tensor:
    """``tensor`` as a new one, whose gradient goes on as ``change(gradient)``.

    A new tensor, not a hook on the old one: who else uses that one gets its gradient as it is.
    """
    return _OnBackward.apply(tensor, change)


class _OnBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, change):
        ctx.change = change
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.change(gradient), None
