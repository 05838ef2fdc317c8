"""Tensor-parallel forward functions and the rows of tokens between them (sequence parallelism).

Each function is set as the ``forward`` of a module of the model, so that the module keeps its
class, names and initialization. Column-parallel layers need none: `torch.nn.Linear` computes a part
of the outputs from a part of the weight.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from .._torch import all_gather
from ..distributed.collectives import all_gather_rows, reduce_scatter_rows, sum_over_ranks
from ..distributed.runtime import Runtime
from ..fsdp.model_state import PartialGradients, ShardingExtension, parameter_state
from ..fsdp.partial_gradients import PartialGradientReducer
from .loss import out_of_vocabulary


class TokenRows:
    """This rank's rows of the hidden states between two layers.

    Hidden states (B, S, E) are B x S rows, padded with zeros to a multiple of the ranks; a rank has
    (1, rows, E). Rows are contiguous in memory, so gathering them needs no permutation, and batches
    of any shape work. There is one object per model; it keeps the shape of the current batch.

    Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
    Models", section 4.2.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.rank, self.ranks = group, group.rank(), group.size()
        self.batch = self.tokens = 0
        self.gathers_logits = False  # for the current batch

    def set_shape(self, batch: int, tokens: int) -> None:
        """Set the shape (B, S) of the current batch."""
        self.batch, self.tokens = batch, tokens

    @property
    def rows_per_rank(self) -> int:
        """Number of rows of one rank, padding included."""
        return -(-self.batch * self.tokens // self.ranks)

    def take(self, x_BSE: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows (1, rows, E), without communication in either direction."""
        self.set_shape(*x_BSE.shape[:2])
        first = self.rank * self.rows_per_rank
        return self._padded(x_BSE)[first : first + self.rows_per_rank].unsqueeze(0)

    def place(self, x_1RE: torch.Tensor) -> torch.Tensor:
        """Return (B, S, E) with this rank's rows at their positions and zeros elsewhere."""
        before = self.rank * self.rows_per_rank
        after = (self.ranks - 1 - self.rank) * self.rows_per_rank
        return self._unpadded(functional.pad(x_1RE.squeeze(0), (0, 0, before, after)))

    def gather(self, x_1RE: torch.Tensor) -> torch.Tensor:
        """All-gather the rows of all ranks to (B, S, E). Reduce-scatters the gradient."""
        return self._unpadded(all_gather_rows(x_1RE.squeeze(0), self.group))

    def sum(self, x_BSE: torch.Tensor) -> torch.Tensor:
        """Reduce-scatter (B, S, E) to this rank's rows (1, rows, E). All-gathers the gradient."""
        self.set_shape(*x_BSE.shape[:2])
        return reduce_scatter_rows(self._padded(x_BSE), self.group).unsqueeze(0)

    def _padded(self, x_BSE: torch.Tensor) -> torch.Tensor:
        rows = x_BSE.flatten(0, 1)
        missing = self.rows_per_rank * self.ranks - rows.shape[0]
        return functional.pad(rows, (0, 0, 0, missing)) if missing else rows

    def _unpadded(self, rows: torch.Tensor) -> torch.Tensor:
        rows = rows[: self.batch * self.tokens]
        return rows.view(self.batch, self.tokens, rows.shape[-1])


class TensorParallel(ShardingExtension):
    """Sum the gradients of parameters that are replicated on the tensor ranks.

    Each rank computes their gradients from its own rows of the tokens, or with whole hidden states
    from its own part of the split layers.
    """

    def __init__(self, rows: TokenRows, whole_states: bool = False):
        """``whole_states``: hidden states are whole on every rank, which does not use ``rows``."""
        self.rows, self.whole_states = rows, whole_states

    def partial_gradients(self, model: nn.Module, runtime: Runtime) -> list[PartialGradients]:
        whole = [
            parameter
            for parameter in model.parameters()
            if all(split.axis != "tensor" for split in parameter_state(parameter).splits)
        ]
        return [PartialGradientReducer(runtime.group("tensor"), whole, runtime.device)]


class GatheredColumnLinear:
    """``forward`` of a linear layer with a part of the outputs; all-gathers the others."""

    def __init__(self, layer: nn.Linear, rows: TokenRows):
        self.layer, self.rows = layer, rows

    def __call__(self, x_BSE: torch.Tensor) -> torch.Tensor:
        layer = self.layer
        mine_FBS = functional.linear(x_BSE, layer.weight, layer.bias).movedim(-1, 0)
        return all_gather_rows(mine_FBS, self.rows.group).movedim(0, -1).contiguous()


class RowParallelLinear:
    """``forward`` of a linear layer with a part of the inputs.

    Outputs are reduce-scattered to each rank's rows, to which the rank adds the bias. With
    ``split_inputs`` the inputs are unsplit, and this rank takes its part of them. ``output``
    replaces the reduce-scatter: ``"whole"`` is an all-reduce, and with ``"partial"`` the outputs
    stay partial sums, for a module around that adds and sums them.
    """

    def __init__(
        self,
        layer: nn.Linear,
        rows: TokenRows,
        split_inputs: bool = False,
        output: str = "rows",
    ):
        self.layer, self.rows, self.split_inputs, self.output = layer, rows, split_inputs, output

    def __call__(self, x_BSF: torch.Tensor) -> torch.Tensor:
        layer = self.layer
        if self.split_inputs:
            x_BSF = x_BSF.chunk(self.rows.ranks, -1)[self.rows.rank]
        y_BSE = functional.linear(x_BSF, layer.weight)
        if self.output == "partial":
            return y_BSE if layer.bias is None else y_BSE + layer.bias / self.rows.ranks
        whole = self.output == "whole"
        y_BSE = sum_over_ranks(y_BSE, self.rows.group) if whole else self.rows.sum(y_BSE)
        return y_BSE if layer.bias is None else y_BSE + layer.bias


class SharedBias:
    """``forward`` of experts whose outputs are partial sums: every rank adds a share of a bias."""

    def __init__(self, experts: nn.Module, name: str, rows: TokenRows):
        self.experts, self.name, self.rows = experts, name, rows

    def __call__(self, *args, **kwargs):
        experts, name = self.experts, self.name
        vars(experts)[name] = experts.get_parameter(name) / self.rows.ranks  # hides the parameter
        try:
            return type(experts).forward(experts, *args, **kwargs)
        finally:
            del vars(experts)[name]


class RowParallelConv1D:
    """`RowParallelLinear` for GPT-2's Conv1D, whose weight is transposed."""

    def __init__(self, layer: Any, rows: TokenRows):
        self.layer, self.rows = layer, rows

    def __call__(self, x_BSF: torch.Tensor) -> torch.Tensor:
        return self.rows.sum(x_BSF @ self.layer.weight) + self.layer.bias


class VocabularyParallelEmbedding:
    """``forward`` of an embedding with a part of the vocabulary, from id ``first`` on.

    Fills only this rank's rows of the output (B, S, E): the first block takes no others, and the
    operations before it work token by token. With ``whole_states`` it fills all of them. A subclass
    may change the rows that it looks up, as by a factor.
    """

    def __init__(
        self, embedding: nn.Embedding, rows: TokenRows, first: int, whole_states: bool = False
    ):
        self.embedding, self.rows, self.first = embedding, rows, first
        self.whole_states = whole_states

    def __call__(self, ids_BS: torch.Tensor) -> torch.Tensor:
        embedding = self.embedding
        here = ids_BS - self.first
        is_local = (here >= 0) & (here < embedding.weight.shape[0])
        padding = embedding.padding_idx
        padding = None if padding is None else padding - self.first
        if padding is not None and not 0 <= padding < embedding.weight.shape[0]:
            padding = None
        whole_padding = embedding.padding_idx
        try:
            embedding.padding_idx = padding
            x_BSE = type(embedding).forward(embedding, here.where(is_local, 0))
        finally:
            embedding.padding_idx = whole_padding
        others_BS = x_BSE.new_zeros(ids_BS.shape)
        others_BS.masked_fill_(out_of_vocabulary(ids_BS, embedding.num_embeddings), torch.nan)
        x_BSE = x_BSE.where(is_local.unsqueeze(-1), others_BS.unsqueeze(-1))
        if self.whole_states:
            return sum_over_ranks(x_BSE, self.rows.group)
        return self.rows.place(self.rows.sum(x_BSE))


class VocabularyParallelHead:
    """``forward`` of a head with a part of the vocabulary; all-gathers the logits without labels.

    ``counts``: number of ids of every rank.
    """

    def __init__(self, head: nn.Linear, rows: TokenRows, counts: list[int]):
        self.head, self.rows, self.counts = head, rows, counts

    def __call__(self, x_BSE: torch.Tensor) -> torch.Tensor:
        logits = functional.linear(x_BSE, self.head.weight, self.head.bias)
        if not self.rows.gathers_logits:
            return logits
        return _AllLogits.apply(logits, self.counts, self.rows)


class _AllLogits(torch.autograd.Function):
    """All-gather logits (B, S, V of a rank) to (B, S, V), used identically on all ranks."""

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
