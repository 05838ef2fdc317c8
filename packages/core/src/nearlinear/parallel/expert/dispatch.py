"""Tokens on their way to the ranks that have their experts, and back.

Source: GShard (Lepikhin et al. 2020, section 3.2) without its capacity: sizes are exchanged first,
so that no token is dropped and no place stays empty. A token travels once for each of its experts.
What computes with the rows that come in is the model's own module, which sees fewer experts.

Shapes: T tokens, K experts of each, P = T x K pairs, R rows that came in, E hidden, N experts.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from ...c10d_names import all_gather
from ..exchange import gather_rows, gathered, sum_rows
from ..on_backward import on_backward


class ParallelExperts:
    """Before the model's own class in a module that has its rank's experts, next to one another."""

    group: dist.ProcessGroup  # of the ranks that have the others
    by_all_to_all: bool

    def forward(self, hidden_states, top_k_index, top_k_weights):
        """As the model's own: tokens (T, E), their experts (T, K) and weights (T, K) to (T, E)."""
        way = _there_and_back if self.by_all_to_all else _everywhere
        return way(self, hidden_states, top_k_index, top_k_weights)

    def compute(self, x_RE: torch.Tensor, expert_R: torch.Tensor) -> torch.Tensor:
        """What this rank's experts make of rows, each with one of them; none may have come.

        Experts' gradients are averaged over the ranks that have the same ones, those of anything
        else over all ranks that share states, `ParallelExperts.group` times as many, though the
        tokens of all came in here. So the gradient is divided on its way in, and restored on its
        way out: where FSDP2 averages, gloo knows no other factor.
        """
        ranks, rows = self.group.size(), len(x_RE)
        if rows == 0:  # a graph all the same: the backward exchange waits for every rank
            x_RE = functional.pad(x_RE, (0, 0, 0, 1))
            expert_R = functional.pad(expert_R, (0, 1))
        x_RE = scale_gradient(x_RE, ranks)
        ones_R1 = x_RE.new_ones(len(x_RE), 1)
        y_RE = super().forward(x_RE, expert_R.unsqueeze(1), ones_R1)
        return scale_gradient(y_RE, 1 / ranks)[:rows]


@cache
def parallel_class(kind: type) -> type:
    """``kind``, with the rank's experts only; its instances stay what they were."""
    return type(f"Parallel{kind.__name__}", (ParallelExperts, kind), {"__module__": __name__})


def divide(experts: nn.Module, group: dist.ProcessGroup, by_all_to_all: bool) -> None:
    """Have ``experts``, whose parameters are cut already, compute together with ``group``."""
    experts.num_experts //= group.size()
    experts.__class__ = parallel_class(type(experts))
    experts.group, experts.by_all_to_all = group, by_all_to_all


def _there_and_back(experts: ParallelExperts, x_TE, index_TK, weights_TK) -> torch.Tensor:
    """Pairs are sorted by expert, and so by rank; results come back in that order."""
    group, mine = experts.group, experts.num_experts
    expert_P = index_TK.flatten()
    order_P = expert_P.argsort(stable=True)
    sent = torch.bincount(expert_P, minlength=group.size() * mine)  # rows, by expert
    came = torch.empty_like(sent)
    dist.all_to_all_single(came, sent, group=group)  # by rank, and there by expert of this one
    sizes = sent.view(-1, mine).sum(1), came.view(-1, mine).sum(1)
    out, back = torch.stack(sizes).tolist()
    x_RE = _Exchange.apply(x_TE[order_P // index_TK.shape[1]], out, back, group)
    local = torch.arange(mine, device=came.device).repeat(group.size())
    y_RE = experts.compute(x_RE, local.repeat_interleave(came))
    y_PE = _Exchange.apply(y_RE, back, out, group)
    y_TKE = y_PE[order_P.argsort()].view(*index_TK.shape, -1)
    return (y_TKE * weights_TK.unsqueeze(-1)).sum(1).to(x_TE.dtype)


def _everywhere(experts: ParallelExperts, x_TE, index_TK, weights_TK) -> torch.Tensor:
    """Every rank gets all tokens and returns what its experts add; ranks' batches may differ."""
    group, mine = experts.group, experts.num_experts
    tokens = len(x_TE)
    sizes = torch.empty(group.size(), dtype=torch.int64, device=x_TE.device)
    all_gather(sizes, sizes.new_tensor([tokens]), group=group)
    missing = int(sizes.max()) - tokens
    index_AK = gathered(functional.pad(index_TK, (0, 0, 0, missing), value=-1), group)  # A: all
    weights_AK = gather_rows(functional.pad(weights_TK, (0, 0, 0, missing)), group)
    x_AE = gather_rows(functional.pad(x_TE, (0, 0, 0, missing)), group)
    first = group.rank() * mine
    token_R, slot_R = ((index_AK >= first) & (index_AK < first + mine)).nonzero(as_tuple=True)
    y_RE = experts.compute(x_AE[token_R], index_AK[token_R, slot_R] - first)
    y_RE = (y_RE * weights_AK[token_R, slot_R].unsqueeze(-1)).to(x_TE.dtype)
    y_AE = torch.zeros_like(x_AE).index_add(0, token_R, y_RE)
    y_TE = sum_rows(y_AE, group)
    return functional.pad(y_TE, (0, 0, 0, -missing)) if missing else y_TE


def scale_gradient(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """``tensor`` as it is; its gradient times ``factor``."""
    return on_backward(tensor, lambda gradient: gradient * factor)


def exchange(rows: torch.Tensor, out: list[int], back: list[int], group) -> torch.Tensor:
    """Send ``out[i]`` of ``rows``, in their order, to rank i; what all ranks sent to this one."""
    came = rows.new_empty(sum(back), *rows.shape[1:])
    dist.all_to_all_single(came, rows.contiguous(), back, out, group=group)
    return came


class _Exchange(torch.autograd.Function):
    """`exchange`; gradients travel the other way."""

    @staticmethod
    def forward(ctx, rows, out, back, group):
        ctx.way = (back, out, group)
        return exchange(rows, out, back, group)

    @staticmethod
    def backward(ctx, gradient):
        return exchange(gradient, *ctx.way), None, None, None
