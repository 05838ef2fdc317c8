"""Dispatch tokens to the ranks of their experts and combine the results.

Source: GShard (Lepikhin et al. 2020, section 3.2) without expert capacity: ranks exchange sizes
first, so no token is dropped and no slot is padded. A token is sent once for each of its experts.
The model's own module computes the received rows, with fewer experts.

Shapes: T tokens, K experts per token, P = T x K pairs, R received rows, E hidden, N experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from .._torch import all_gather
from ..distributed.collectives import (
    all_gather_detached,
    all_gather_rows,
    reduce_scatter_rows,
    transform_grad,
)


class ParallelExperts:
    """``forward`` of a module that holds the experts of this rank.

    Args:
        experts: Module of stacked experts, whose parameters are split.
        group: Ranks that hold the other experts.
        by_all_to_all: Dispatch tokens by all-to-all instead of all-gather.
    """

    def __init__(self, experts: Any, group: dist.ProcessGroup, by_all_to_all: bool):
        self.experts, self.group, self.by_all_to_all = experts, group, by_all_to_all

    @property
    def num_experts(self) -> int:
        return self.experts.num_experts

    def __call__(self, hidden_states, top_k_index, top_k_weights):
        """Compute (T, E) from tokens (T, E), their experts (T, K) and weights (T, K)."""
        dispatch = _by_all_to_all if self.by_all_to_all else _by_all_gather
        return dispatch(self, hidden_states, top_k_index, top_k_weights)

    def compute(self, x_RE: torch.Tensor, expert_R: torch.Tensor) -> torch.Tensor:
        """Compute rows, possibly none, each with one of this rank's experts.

        Gradients of experts are averaged over the ranks with the same experts, all other gradients
        over all ranks that share model states, which are ``group.size()`` times as many. The rows
        here come from all ranks of the group, so the gradient is divided before the experts and
        restored after them. FSDP2 on gloo supports averaging only, with no other factor.
        """
        ranks, rows = self.group.size(), len(x_RE)
        if rows == 0:  # keep a graph: the all-to-all of the backward pass needs every rank
            x_RE = functional.pad(x_RE, (0, 0, 0, 1))
            expert_R = functional.pad(expert_R, (0, 1))
        x_RE = scale_gradient(x_RE, ranks)
        ones_R1 = x_RE.new_ones(len(x_RE), 1)
        experts = self.experts
        y_RE = type(experts).forward(experts, x_RE, expert_R.unsqueeze(1), ones_R1)
        return scale_gradient(y_RE, 1 / ranks)[:rows]


def install_parallel_experts(experts: Any, group: dist.ProcessGroup, by_all_to_all: bool) -> None:
    """Replace the forward of ``experts``, whose parameters are split already."""
    experts.num_experts //= group.size()
    experts.forward = ParallelExperts(experts, group, by_all_to_all)


def _by_all_to_all(experts: ParallelExperts, x_TE, index_TK, weights_TK) -> torch.Tensor:
    """Send each (token, expert) pair to the rank of the expert, and the results back."""
    group, mine = experts.group, experts.num_experts
    expert_P = index_TK.flatten()
    order_P = expert_P.argsort(stable=True)
    sent = torch.bincount(expert_P, minlength=group.size() * mine)  # rows per expert
    received = torch.empty_like(sent)  # rows per sending rank and expert of this rank
    dist.all_to_all_single(received, sent, group=group)
    sizes = sent.view(-1, mine).sum(1), received.view(-1, mine).sum(1)
    out, back = torch.stack(sizes).tolist()
    x_RE = _Exchange.apply(x_TE[order_P // index_TK.shape[1]], out, back, group)
    local = torch.arange(mine, device=received.device).repeat(group.size())
    y_RE = experts.compute(x_RE, local.repeat_interleave(received))
    y_PE = _Exchange.apply(y_RE, back, out, group)
    y_TKE = y_PE[order_P.argsort()].view(*index_TK.shape, -1)
    return (y_TKE * weights_TK.unsqueeze(-1)).sum(1).to(x_TE.dtype)


def _by_all_gather(experts: ParallelExperts, x_TE, index_TK, weights_TK) -> torch.Tensor:
    """All-gather the tokens and reduce-scatter the outputs; batch sizes of ranks may differ."""
    group, mine = experts.group, experts.num_experts
    tokens = len(x_TE)
    sizes = torch.empty(group.size(), dtype=torch.int64, device=x_TE.device)
    all_gather(sizes, sizes.new_tensor([tokens]), group=group)
    missing = int(sizes.max()) - tokens
    index_AK = all_gather_detached(
        functional.pad(index_TK, (0, 0, 0, missing), value=-1), group
    )  # A: all
    weights_AK = all_gather_rows(functional.pad(weights_TK, (0, 0, 0, missing)), group)
    x_AE = all_gather_rows(functional.pad(x_TE, (0, 0, 0, missing)), group)
    first = group.rank() * mine
    token_R, slot_R = ((index_AK >= first) & (index_AK < first + mine)).nonzero(as_tuple=True)
    y_RE = experts.compute(x_AE[token_R], index_AK[token_R, slot_R] - first)
    y_RE = (y_RE * weights_AK[token_R, slot_R].unsqueeze(-1)).to(x_TE.dtype)
    y_AE = torch.zeros_like(x_AE).index_add(0, token_R, y_RE)
    y_TE = reduce_scatter_rows(y_AE, group)
    return functional.pad(y_TE, (0, 0, 0, -missing)) if missing else y_TE


def scale_gradient(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Return ``tensor``; multiply its gradient by ``factor``."""
    return transform_grad(tensor, lambda gradient: gradient * factor)


def exchange(rows: torch.Tensor, out: list[int], back: list[int], group) -> torch.Tensor:
    """All-to-all: send ``out[i]`` of ``rows`` to rank i, receive ``back[i]`` rows from it."""
    received = rows.new_empty(sum(back), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), back, out, group=group)
    return received


class _Exchange(torch.autograd.Function):
    """Differentiable `exchange`."""

    @staticmethod
    def forward(ctx, rows, out, back, group):
        ctx.reverse = (back, out, group)
        return exchange(rows, out, back, group)

    @staticmethod
    def backward(ctx, gradient):
        return exchange(gradient, *ctx.reverse), None, None, None
