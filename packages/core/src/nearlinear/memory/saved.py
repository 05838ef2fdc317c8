"""Bytes that wait for a backward pass, as they come and go.

Counted are storages, each once however many tensors of it are saved, from when autograd saves one
until their memory is free, whoever holds them; those of parameters and buffers are not. What hooks
further inside keep (a selective checkpoint, an offload), or save while a block is computed again,
does not pass the hooks here: who has such hooks shows it to `SavedTensors.see`.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from .. import _torch
from ..parallel.layout import local


@dataclass(frozen=True)
class _Storage:
    kind: str
    bytes: int
    alive: weakref.ref[torch.UntypedStorage]


class SavedTensors:
    """Counts while it is open; ``peak``: the most bytes of each kind that were there at once."""

    def __init__(self, kind: Callable[[], str]):
        """``kind()`` names what is saved now."""
        self.kind, self.peak = kind, Counter()
        self._now = Counter()
        self._held: dict[int, _Storage] = {}
        self._left_out: set[int] = set()
        self._freed: deque[int] = deque()  # by whichever thread held them last
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    @property
    def now(self) -> Counter:
        """Bytes of each kind that are there."""
        while self._freed:
            storage = self._held.pop(self._freed.popleft())
            self._now[storage.kind] -= storage.bytes
        return self._now

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do not count these, or whatever lies in their storages later."""
        self._left_out |= {_torch.storage_of(local(tensor)) for tensor in tensors}

    def __enter__(self) -> SavedTensors:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self._hooks.__exit__(*error)

    def see(self, tensor: torch.Tensor) -> None:
        """``tensor`` is on the device, and waits for a backward pass."""
        storage, now = local(tensor).untyped_storage(), self.now
        identity = _torch.storage_of(local(tensor))
        if identity in self._held or identity in self._left_out:
            return
        freed, kind, size = self._freed, self.kind(), storage.nbytes()
        alive = weakref.ref(storage, lambda _: freed.append(identity))
        self._held[identity] = _Storage(kind, size, alive)
        now[kind] += size
        self.peak[kind] = max(self.peak[kind], now[kind])

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.see(tensor)
        return tensor
