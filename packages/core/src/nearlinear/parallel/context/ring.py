"""Keys and values go round a ring of ranks, point to point, while each computes with what it has.

Source: Ring Attention (Liu et al. 2023). Forward: C-1 exchanges among C ranks. Backward: keys and
values go round again, C-1 exchanges, and the gradients of each rank's follow one step behind and
end where they belong, another C-1 (the first contribution never leaves). Memory does not grow with
C: a rank holds its own keys and values, those it computes with, and the next. Gradients travel in
float32.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist


class Ring:
    """How keys and values of other context ranks come here, and their gradients home."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), group.size()

    def hold(self, kv: torch.Tensor) -> torch.Tensor:
        """What is kept from forward to backward: this rank's own."""
        return kv

    def visit(self, held: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Every rank's keys and values, with the rank they are of: this one's, then backwards."""
        kv = held
        for step in range(self.ranks):
            arrival = self._exchange(kv) if step < self.ranks - 1 else None
            yield (self.rank - step) % self.ranks, kv
            if arrival is not None:
                kv = arrival.wait()

    def collect(self) -> "_Homeward":
        """Where gradients are given, in the order of `visit`."""
        return _Homeward(self)

    def _exchange(self, tensor: torch.Tensor) -> "_Arrival":
        came = torch.empty_like(tensor)
        following, previous = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        sending = dist.P2POp(dist.isend, tensor, group=self.group, group_peer=following)
        coming = dist.P2POp(dist.irecv, came, group=self.group, group_peer=previous)
        return _Arrival(came, tensor, dist.batch_isend_irecv([sending, coming]))


class _Arrival:
    """An exchange under way; it keeps what is being sent."""

    def __init__(self, came: torch.Tensor, sent: torch.Tensor, transfers: list):
        self.came, self.sent, self.transfers = came, sent, transfers

    def wait(self) -> torch.Tensor:
        for transfer in self.transfers:
            transfer.wait()
        return self.came


class _Homeward:
    """Gradients of keys and values, following them: every rank adds its part and sends them on."""

    def __init__(self, ring: Ring):
        self.ring = ring
        self.own: torch.Tensor | None = None
        self.arrival: _Arrival | None = None

    def give(self, source: int, gradient: torch.Tensor) -> None:
        if source == self.ring.rank:
            self.own = gradient
            return
        if self.arrival is not None:
            gradient += self.arrival.wait()
        self.arrival = self.ring._exchange(gradient)

    def result(self) -> torch.Tensor:
        """The gradient of this rank's keys and values."""
        if self.arrival is not None:
            self.own += self.arrival.wait()
        return self.own
