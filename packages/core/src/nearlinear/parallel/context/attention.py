"""Exact causal attention over a sequence that is split among the ranks of a group, zig-zag.

Every rank has the queries, keys and values of its own rows (`zigzag`); `ring` or `gathered` bring
it the keys and values of the others, one rank's at a time, and `kernels` computes the blocks that
causality leaves. Forward keeps the output and the log of the softmax's denominator, from which
backward computes every block anew. Grouped-query heads travel as few as they are.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from . import kernels, zigzag
from .gathered import Gathered
from .kernels import Dropout, Mask
from .ring import Ring

TRAVELS = {"p2p": Ring, "all_gather": Gathered}
"""The config's words for `cp_comm_type`."""


def attention(
    q_BHQD: torch.Tensor,
    k_BKQD: torch.Tensor,
    v_BKQD: torch.Tensor,
    travel: Ring | Gathered,
    *,
    segments_BS: torch.Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Causal attention of this rank's queries over the keys of all: (B, H, Q, D), as ``q``.

    H is a multiple of K; Q is even, S = Q x ranks. ``scale``: of the scores, default 1/sqrt(D).
    ``window``: a query sees that many keys, itself the last. ``segments_BS``: integers for the
    WHOLE sequence, in order: 0 = a key that nobody sees (padding), and queries see only keys of
    their own number; a query of number 0 sees those of number 1, and a row that sees nothing gives
    zeros. ``dropout`` of the weights draws one seed from the CPU's generator, so that activation
    recomputation repeats it. A collective call of the group.
    """
    scale = q_BHQD.shape[-1] ** -0.5 if scale is None else scale
    seed = int(torch.randint(1 << 62, ())) if dropout else 0
    how = _How(travel, q_BHQD.shape[2] // 2, scale, window, dropout, seed)
    return _Attention.apply(q_BHQD, k_BKQD, v_BKQD, segments_BS, how)


@dataclass(frozen=True)
class _How:
    """What one call of `attention` was asked for, but for its tensors."""

    travel: Ring | Gathered
    chunk: int
    scale: float
    window: int | None
    dropout: float
    seed: int

    def blocks(self, source: int, segments_BS, device) -> Iterator[tuple[zigzag.Block, dict]]:
        """The blocks of ``source``'s keys, and what `kernels` is to do with each."""
        rank, ranks = self.travel.rank, self.travel.ranks
        there = zigzag.blocks(rank, source, ranks, self.chunk, self.window)
        for number, block in enumerate(there):
            mask = dropout = None
            if block.cut or segments_BS is not None:
                mask = self._mask(block, source, segments_BS, device)
            if self.dropout:
                # a seed for each block of the call: at most four for every source
                dropout = Dropout(self.dropout, self.seed + 4 * source + number)
            yield block, {"causal": block.causal, "mask": mask, "dropout": dropout}

    def _mask(self, block: zigzag.Block, source: int, segments_BS, device) -> Mask:
        rank, ranks = self.travel.rank, self.travel.ranks
        query_rows = zigzag.positions(rank, ranks, self.chunk, device)[block.queries]
        key_rows = zigzag.positions(source, ranks, self.chunk, device)[block.keys]
        if segments_BS is None:
            return Mask(query_rows, key_rows, self.window)
        of_queries = segments_BS[:, query_rows].clamp(min=1)
        return Mask(query_rows, key_rows, self.window, of_queries, segments_BS[:, key_rows])


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, segments_BS, how: _How):
        held = how.travel.hold(torch.cat([k, v], -1))
        total = kernels.Sum(q, v.shape[-1])
        for source, kv in how.travel.visit(held):
            k_there, v_there = kv.split([k.shape[-1], v.shape[-1]], -1)
            for block, kind in how.blocks(source, segments_BS, q.device):
                part = kernels.forward(
                    q[:, :, block.queries],
                    k_there[:, :, block.keys],
                    v_there[:, :, block.keys],
                    how.scale,
                    **kind,
                )
                total.add(block.queries, *part)
        out = total.out.to(q.dtype)
        ctx.save_for_backward(q, held, out, total.lse, segments_BS)
        ctx.how, ctx.sizes = how, (k.shape[-1], v.shape[-1])
        return out

    @staticmethod
    def backward(ctx, grad):
        q, held, out, lse, segments_BS = ctx.saved_tensors
        how, grad = ctx.how, grad.contiguous()
        dq = torch.zeros_like(q, dtype=torch.float32)
        homeward = how.travel.collect()
        for source, kv in how.travel.visit(held):
            k_there, v_there = kv.split(ctx.sizes, -1)
            dkv = torch.zeros_like(kv, dtype=torch.float32)
            for block, kind in how.blocks(source, segments_BS, q.device):
                rows = block.queries
                parts = kernels.backward(
                    grad[:, :, rows],
                    q[:, :, rows],
                    k_there[:, :, block.keys],
                    v_there[:, :, block.keys],
                    out[:, :, rows],
                    lse[:, :, rows],
                    how.scale,
                    **kind,
                )
                dq[:, :, rows] += parts[0]
                dkv[:, :, block.keys] += torch.cat(parts[1:], -1)
            homeward.give(source, dkv)
        dk, dv = homeward.result().to(q.dtype).split(ctx.sizes, -1)
        return dq.to(q.dtype), dk, dv, None, None
