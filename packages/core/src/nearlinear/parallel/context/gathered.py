"""Keys and values of all context ranks gathered at once: SMP's ``cp_comm_type="all_gather"``.

One all-gather forward and one reduce-scatter backward (keys and values together), where `ring` has
3(C-1) exchanges that computation hides. What was gathered stays until backward: fewer, larger
messages for memory that does not shrink with the context degree.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist

from ...c10d_names import all_gather, reduce_scatter


class Gathered:
    """How keys and values of other context ranks come here, and their gradients home."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), group.size()

    def hold(self, kv: torch.Tensor) -> torch.Tensor:
        """What is kept from forward to backward: everybody's, one rank after the other."""
        if self.ranks == 1:
            return kv[None]
        everybody = kv.new_empty((self.ranks, *kv.shape))
        all_gather(everybody.flatten(0, 1), kv, group=self.group)
        return everybody

    def visit(self, held: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Every rank's keys and values, with the rank they are of."""
        return enumerate(held)

    def collect(self) -> "_Scattering":
        """Where gradients are given, in the order of `visit`."""
        return _Scattering(self)


class _Scattering:
    """Gradients of everybody's keys and values, summed over the ranks in the end."""

    def __init__(self, gathered: Gathered):
        self.gathered = gathered
        self.gradients: list[torch.Tensor] = []

    def give(self, source: int, gradient: torch.Tensor) -> None:
        self.gradients.append(gradient)

    def result(self) -> torch.Tensor:
        """The gradient of this rank's keys and values."""
        if self.gathered.ranks == 1:
            return self.gradients[0]
        own = torch.empty_like(self.gradients[0])
        reduce_scatter(own, torch.cat(self.gradients), group=self.gathered.group)
        return own
