"""Tokens between two layers: every tensor rank has its own rows of them (sequence parallelism).

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models",
section 4.2. Hidden states (B, S, E) are B x S rows in a row, padded with zeros to a multiple of the
ranks; a rank's share is (1, rows, E). Being neighbours in memory, rows are gathered without being
shuffled, and batches of any shape work. What one function does forwards another does backwards.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn import functional

from ..exchange import gather_rows, sum_rows


class Rows:
    """The rows of one model's hidden states, and which of them are this rank's.

    One per model: a batch's shape is learned where its rows are first taken, and holds until the
    next one's.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.rank, self.ranks = group, group.rank(), group.size()
        self.batch = self.tokens = 0
        self.gathers_logits = False  # of the batch at hand

    def see(self, batch: int, tokens: int) -> None:
        """The shape (B, S) of the batch whose hidden states come next."""
        self.batch, self.tokens = batch, tokens

    @property
    def each(self) -> int:
        """Rows of one rank."""
        return -(-self.batch * self.tokens // self.ranks)

    def mine(self, x_BSE: torch.Tensor) -> torch.Tensor:
        """This rank's rows (1, rows, E). Their gradient goes back as rows: nothing travels."""
        self.see(*x_BSE.shape[:2])
        first = self.rank * self.each
        return self._padded(x_BSE)[first : first + self.each].unsqueeze(0)

    def back_in_place(self, x_1RE: torch.Tensor) -> torch.Tensor:
        """(B, S, E) in which only this rank's rows are filled, the others zeros."""
        before = self.rank * self.each
        after = (self.ranks - 1 - self.rank) * self.each
        return self._unpadded(functional.pad(x_1RE.squeeze(0), (0, 0, before, after)))

    def gather(self, x_1RE: torch.Tensor) -> torch.Tensor:
        """All ranks' rows (B, S, E). Gradients, which are parts of sums, are reduce-scattered."""
        return self._unpadded(gather_rows(x_1RE.squeeze(0), self.group))

    def sum(self, x_BSE: torch.Tensor) -> torch.Tensor:
        """This rank's rows (1, rows, E) of the sum of all ranks'. Gradients are gathered."""
        self.see(*x_BSE.shape[:2])
        return sum_rows(self._padded(x_BSE), self.group).unsqueeze(0)

    def _padded(self, x_BSE: torch.Tensor) -> torch.Tensor:
        rows = x_BSE.flatten(0, 1)
        missing = self.each * self.ranks - rows.shape[0]
        return functional.pad(rows, (0, 0, 0, missing)) if missing else rows

    def _unpadded(self, rows: torch.Tensor) -> torch.Tensor:
        rows = rows[: self.batch * self.tokens]
        return rows.view(self.batch, self.tokens, rows.shape[-1])
