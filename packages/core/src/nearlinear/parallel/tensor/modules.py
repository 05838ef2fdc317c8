"""Modules that compute with their rank's part of a matrix.

They take the place of a model's own by ``module.__class__``, so that names, initialisation and
``isinstance`` stay as they were. Column-parallel layers need no class: with a part of their
outputs, `torch.nn.Linear` and the like do what they always did.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import nn
from torch.nn import functional

from ...c10d_names import all_gather
from ..exchange import gather_rows
from ..loss import outside
from .rows import Rows


class GatheredColumnLinear(nn.Linear):
    """Has a part of the outputs and gathers the others: what comes next needs them all."""

    rows: Rows

    def forward(self, x_BSE: torch.Tensor) -> torch.Tensor:
        mine_FBS = super().forward(x_BSE).movedim(-1, 0)
        return gather_rows(mine_FBS, self.rows.group).movedim(0, -1).contiguous()


class RowParallelLinear(nn.Linear):
    """Has a part of the inputs; outputs are summed over ranks, each keeps its rows of them.

    The bias is added afterwards, by every rank to its own rows.
    """

    rows: Rows
    takes_all = False  # inputs come whole, and are split here

    def forward(self, x_BSF: torch.Tensor) -> torch.Tensor:
        if self.takes_all:
            x_BSF = x_BSF.chunk(self.rows.ranks, -1)[self.rows.rank]
        y_1RE = self.rows.sum(functional.linear(x_BSF, self.weight))
        return y_1RE if self.bias is None else y_1RE + self.bias


@cache
def row_parallel_conv1d() -> type:
    """`RowParallelLinear` for GPT-2's layer, which keeps its weight transposed."""
    from transformers.pytorch_utils import Conv1D

    class RowParallelConv1D(Conv1D):
        rows: Rows

        def forward(self, x_BSF: torch.Tensor) -> torch.Tensor:
            return self.rows.sum(x_BSF @ self.weight) + self.bias

    return RowParallelConv1D


class VocabularyParallelEmbedding(nn.Embedding):
    """Has the vectors of a part of the vocabulary.

    Of its output (B, S, E) only this rank's rows are filled: whatever a model does to the tokens
    one by one before its first block, it does rightly to those, which are all that the block takes.
    """

    rows: Rows
    first: int  # id of the first vector

    def forward(self, ids_BS: torch.Tensor) -> torch.Tensor:
        here = ids_BS - self.first
        mine = (here >= 0) & (here < self.weight.shape[0])
        padding = None if self.padding_idx is None else self.padding_idx - self.first
        if padding is not None and not 0 <= padding < self.weight.shape[0]:
            padding = None
        x_BSE = functional.embedding(here.where(mine, 0), self.weight, padding)
        others_BS = x_BSE.new_zeros(ids_BS.shape)
        others_BS.masked_fill_(outside(ids_BS, self.num_embeddings), torch.nan)
        summed = self.rows.sum(x_BSE.where(mine.unsqueeze(-1), others_BS.unsqueeze(-1)))
        return self.rows.back_in_place(summed)


class VocabularyParallelHead(nn.Linear):
    """Has the logits of a part of the vocabulary; where there are no labels, gathers them all."""

    rows: Rows
    counts: list[int]  # ids of every rank

    def forward(self, x_BSE: torch.Tensor) -> torch.Tensor:
        logits = super().forward(x_BSE)
        if not self.rows.gathers_logits:
            return logits
        return _AllLogits.apply(logits, self.counts, self.rows)


class _AllLogits(torch.autograd.Function):
    """(B, S, V) from the parts (B, S, V of a rank); all ranks then do the same with them."""

    @staticmethod
    def forward(ctx, logits, counts, rows):
        ctx.counts, ctx.rank = counts, rows.rank
        widest = max(counts)
        mine = functional.pad(logits, (0, widest - logits.shape[-1])).contiguous()
        everyones = mine.new_empty(rows.ranks, *mine.shape)
        all_gather(everyones.view(-1), mine.view(-1), group=rows.group)
        parts = [part[..., :n] for part, n in zip(everyones.unbind(0), counts, strict=True)]
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.split(ctx.counts, -1)[ctx.rank], None, None
