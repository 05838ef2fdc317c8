"""Exact attention over a sequence that is split over context ranks in zig-zag chunks.

Every rank has the queries, keys and values of its own rows (`batch`). `RingExchange` or
`AllGatherExchange` provide the keys and values of the other ranks, one rank at a time, and
`kernels` computes the score blocks that the mask leaves. Forward saves the output and the log of
the softmax denominator, from which backward recomputes every block. Grouped-query heads are
exchanged ungrouped, without repetition.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .._torch import all_gather, reduce_scatter
from . import batch, kernels
from .kernels import Dropout, Mask
from .masks import CAUSAL, SequenceMask


class AllGatherExchange:
    """Exchange of keys and values by collectives: ``cp_comm_type="all_gather"``.

    One all-gather in forward and one reduce-scatter in backward, for keys and values together. The
    gathered tensors are kept until backward: fewer and larger messages than `RingExchange`, but
    memory that does not shrink with the context degree.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), group.size()

    def hold(self, kv: torch.Tensor) -> torch.Tensor:
        """Return the tensor to save for backward: those of all ranks, in rank order."""
        if self.ranks == 1:
            return kv[None]
        gathered = kv.new_empty((self.ranks, *kv.shape))
        all_gather(gathered.flatten(0, 1), kv, group=self.group)
        return gathered

    def visit(self, held: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (rank, keys and values) of every rank."""
        return enumerate(held)

    def gradients(self) -> _ReduceScatterGradients:
        """Return an accumulator of gradients, filled in the order of `visit`."""
        return _ReduceScatterGradients(self)


class _ReduceScatterGradients:
    """Gradients of the keys and values of all ranks, reduce-scattered at the end."""

    def __init__(self, exchange: AllGatherExchange):
        self.exchange = exchange
        self.gradients: list[torch.Tensor] = []

    def add(self, source: int, gradient: torch.Tensor) -> None:
        self.gradients.append(gradient)

    def result(self) -> torch.Tensor:
        """Return the gradient of this rank's keys and values."""
        if self.exchange.ranks == 1:
            return self.gradients[0]
        own = torch.empty_like(self.gradients[0])
        reduce_scatter(own, torch.cat(self.gradients), group=self.exchange.group)
        return own


class RingExchange:
    """Exchange of keys and values round a ring of ranks, point to point: ``cp_comm_type="p2p"``.

    Each exchange overlaps with the computation on the previous keys and values. Forward takes C-1
    exchanges among C ranks. Backward sends keys and values round again, C-1 exchanges, and their
    gradients follow one step behind to the rank they belong to, another C-1. Memory does not grow
    with C: a rank holds its own keys and values, the current ones and the next ones. Gradients are
    sent in float32.

    Source: Ring Attention (Liu et al. 2023).
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), group.size()

    def hold(self, kv: torch.Tensor) -> torch.Tensor:
        """Return the tensor to save for backward: that of this rank."""
        return kv

    def visit(self, held: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (rank, keys and values) of every rank, from this rank backwards."""
        kv = held
        for step in range(self.ranks):
            arrival = self.send(kv) if step < self.ranks - 1 else None
            yield (self.rank - step) % self.ranks, kv
            if arrival is not None:
                kv = arrival.wait()

    def gradients(self) -> _RingGradients:
        """Return an accumulator of gradients, filled in the order of `visit`."""
        return _RingGradients(self)

    def send(self, tensor: torch.Tensor) -> _Transfer:
        """Start to send ``tensor`` to the next rank and to receive from the previous one."""
        received = torch.empty_like(tensor)
        following, previous = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        send = dist.P2POp(dist.isend, tensor, group=self.group, group_peer=following)
        receive = dist.P2POp(dist.irecv, received, group=self.group, group_peer=previous)
        return _Transfer(received, tensor, dist.batch_isend_irecv([send, receive]))


class _Transfer:
    """An exchange in flight; keeps a reference to the tensor being sent."""

    def __init__(self, received: torch.Tensor, sent: torch.Tensor, works: list):
        self.received, self.sent, self.works = received, sent, works

    def wait(self) -> torch.Tensor:
        for work in self.works:
            work.wait()
        return self.received


class _RingGradients:
    """Gradients that follow their keys and values: each rank adds its part and sends them on."""

    def __init__(self, ring: RingExchange):
        self.ring = ring
        self.own: torch.Tensor | None = None
        self.arrival: _Transfer | None = None

    def add(self, source: int, gradient: torch.Tensor) -> None:
        if source == self.ring.rank:
            self.own = gradient
            return
        if self.arrival is not None:
            gradient += self.arrival.wait()
        self.arrival = self.ring.send(gradient)

    def result(self) -> torch.Tensor:
        """Return the gradient of this rank's keys and values."""
        assert self.own is not None  # visit() begins with this rank
        if self.arrival is not None:
            self.own += self.arrival.wait()
        return self.own


EXCHANGES = {"p2p": RingExchange, "all_gather": AllGatherExchange}
"""Exchanges by the values of the config key ``cp_comm_type``."""


def attention(
    q_BHQD: torch.Tensor,
    k_BKQD: torch.Tensor,
    v_BKQD: torch.Tensor,
    exchange: RingExchange | AllGatherExchange,
    *,
    mask: SequenceMask = CAUSAL,
    scale: float | None = None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attention of this rank's queries over the keys of all ranks. A collective call.

    Args:
        q_BHQD: Queries of this rank; H is a multiple of K, Q is even, S = Q x ranks.
        k_BKQD: Keys of this rank.
        v_BKQD: Values of this rank.
        exchange: Exchange of keys and values between the ranks.
        mask: Visibility of keys to queries, causal by default. A row that sees no key gives zeros.
        scale: Scale of the scores, 1/sqrt(D) by default.
        softcap: Largest absolute value of the scores, reached by a tanh.
        sinks_H: A score of every head that adds to the softmax denominator only.
        dropout: Dropout probability of the weights. One seed is drawn from the CPU's generator, so
            that activation recomputation repeats it.

    Returns:
        Output (B, H, Q, D) in the dtype of ``q``.
    """
    if scale is None:
        scale = float(q_BHQD.shape[-1] ** -0.5)
    seed = int(torch.randint(1 << 62, ())) if dropout else 0
    call = _AttentionCall(exchange, q_BHQD.shape[2] // 2, mask, scale, softcap, dropout, seed)
    return _Attention.apply(q_BHQD, k_BKQD, v_BKQD, sinks_H, call)


@dataclass(frozen=True)
class _AttentionCall:
    """Arguments of one call of `attention` except for its tensors."""

    exchange: RingExchange | AllGatherExchange
    chunk: int
    mask: SequenceMask
    scale: float
    softcap: float | None
    dropout: float
    seed: int

    def blocks(self, source: int, device) -> Iterator[tuple[batch.ScoreBlock, dict]]:
        """Yield the score blocks with the keys of ``source``, with arguments for `kernels`."""
        rank, ranks = self.exchange.rank, self.exchange.ranks
        blocks = self.mask.blocks(rank, source, ranks, self.chunk, device)
        for number, block in enumerate(blocks):
            mask = dropout = None
            if block.masked:
                mask = self._mask(block, source, device)
            if self.dropout:
                # one seed per block; there are at most four blocks per source
                dropout = Dropout(self.dropout, self.seed + 4 * source + number)
            kind = {"causal": block.causal, "mask": mask, "dropout": dropout}
            yield block, kind | {"softcap": self.softcap}

    def _mask(self, block: batch.ScoreBlock, source: int, device) -> Mask:
        rank, ranks = self.exchange.rank, self.exchange.ranks
        query_rows = batch.positions(rank, ranks, self.chunk, device)[block.queries]
        key_rows = batch.positions(source, ranks, self.chunk, device)[block.keys]
        return Mask(lambda rows: self.mask.visible(query_rows[rows], key_rows)[:, :, None])


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks_H, call: _AttentionCall):
        held = call.exchange.hold(torch.cat([k, v], -1))
        total = kernels.BlockSum(q, v.shape[-1])
        for source, kv in call.exchange.visit(held):
            k_there, v_there = kv.split([k.shape[-1], v.shape[-1]], -1)
            for block, kind in call.blocks(source, q.device):
                part = kernels.forward(
                    q[:, :, block.queries],
                    k_there[:, :, block.keys],
                    v_there[:, :, block.keys],
                    call.scale,
                    **kind,
                )
                total.add(block.queries, *part)
        if sinks_H is not None:
            total.add_sinks(sinks_H)
        out = total.out.to(q.dtype)
        ctx.save_for_backward(q, held, out, total.lse, sinks_H)
        ctx.call, ctx.sizes = call, (k.shape[-1], v.shape[-1])
        return out

    @staticmethod
    def backward(ctx, grad):
        q, held, out, lse, sinks_H = ctx.saved_tensors
        call, grad = ctx.call, grad.contiguous()
        dq = torch.zeros_like(q, dtype=torch.float32)
        gradients = call.exchange.gradients()
        for source, kv in call.exchange.visit(held):
            k_there, v_there = kv.split(ctx.sizes, -1)
            dkv = torch.zeros_like(kv, dtype=torch.float32)
            for block, kind in call.blocks(source, q.device):
                rows = block.queries
                parts = kernels.backward(
                    grad[:, :, rows],
                    q[:, :, rows],
                    k_there[:, :, block.keys],
                    v_there[:, :, block.keys],
                    out[:, :, rows],
                    lse[:, :, rows],
                    call.scale,
                    **kind,
                )
                dq[:, :, rows] += parts[0]
                dkv[:, :, block.keys] += torch.cat(parts[1:], -1)
            gradients.add(source, dkv)
        dk, dv = gradients.result().to(q.dtype).split(ctx.sizes, -1)
        dsinks = None
        if sinks_H is not None:
            weights = (sinks_H.float()[:, None] - lse).exp()
            dsinks = -(weights * (grad.float() * out.float()).sum(-1)).sum((0, 2)).to(sinks_H.dtype)
        return dq.to(q.dtype), dk, dv, dsinks, None
