"""Rows that ranks gather from one another, and sums of rows that they share out: each the other's
backward pass. Sums travel as in `scatter`, whose bytes are the fewest on gloo too."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..c10d_names import all_gather
from .on_backward import on_backward
from .scatter import Scatter


def gather_rows(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All ranks' ``rows`` (R, ...) behind one another; what their gradients add up to comes back.

    Every rank has as many.
    """
    return _Gather.apply(rows, group)


def sum_rows(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part (R / ranks, ...) of all ranks' ``rows`` added up; gradients are gathered."""
    return _Sum.apply(rows, group)


def summed_back(tensor: torch.Tensor, group: dist.ProcessGroup, times: int = 1) -> torch.Tensor:
    """``tensor`` as it is; ``times`` its gradient is the sum of all ranks' parts."""

    def summed(gradient: torch.Tensor) -> torch.Tensor:
        total = (gradient / times).contiguous()
        dist.all_reduce(total, group=group)
        return total

    return on_backward(tensor, summed) if tensor.requires_grad else tensor


def gathered(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`gather_rows` without a graph."""
    everyones = rows.new_empty(group.size() * len(rows), *rows.shape[1:])
    all_gather(everyones, rows.contiguous(), group=group)
    return everyones


def _summed(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    mine = rows.new_empty(len(rows) // group.size(), *rows.shape[1:])
    Scatter(group)(mine.view(-1), rows.contiguous().view(-1), dist.ReduceOp.SUM)
    return mine


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, group):
        ctx.group = group
        return gathered(rows, group)

    @staticmethod
    def backward(ctx, gradient):
        return _summed(gradient, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, group):
        ctx.group = group
        return _summed(rows, group)

    @staticmethod
    def backward(ctx, gradient):
        return gathered(gradient, ctx.group), None
