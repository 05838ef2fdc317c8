"""Bytes that autograd keeps from forward to backward, as they come and go.

Counted are storages, each once however many tensors of it are saved; those of parameters, sharded
or gathered, are not. What a hook further inside takes away (a checkpointed block keeps its inputs
only, an offloaded one nothing here) is not seen, and is not there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from .. import _torch
from ..parallel.layout import local


@dataclass
class _Storage:
    kind: str
    bytes: int
    uses: int = 1


class SavedTensors:
    """Counts while it is open; ``peak``: the bytes of each kind when there were most of all."""

    def __init__(self, kind: Callable[[], str], seen: Callable[[], None]):
        """``kind()`` names what is saved now; ``seen()`` is called whenever a tensor is used."""
        self.kind, self.seen = kind, seen
        self.now, self.peak = Counter(), Counter()
        self._parameters: set[int] = set()
        self._held: dict[int, _Storage] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def leave_out(self, parameters: Iterable[torch.Tensor]) -> None:
        """Do not count these, or whatever lies in their storages later."""
        self._parameters |= {_torch.storage_of(local(p)) for p in parameters}

    def __enter__(self) -> SavedTensors:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self._hooks.__exit__(*error)

    def came(self, identity: int, size: int) -> None:
        """One more saved tensor has the storage ``identity`` of ``size`` bytes."""
        storage = self._held.get(identity)
        if storage is not None:
            storage.uses += 1
            return
        self._held[identity] = storage = _Storage(self.kind(), size)
        self.now[storage.kind] += size
        if self.now.total() > self.peak.total():
            self.peak = self.now.copy()

    def went(self, identity: int) -> None:
        """One saved tensor less has it."""
        storage = self._held[identity]
        storage.uses -= 1
        if not storage.uses:
            self.now[storage.kind] -= storage.bytes
            del self._held[identity]

    def _pack(self, tensor: torch.Tensor):
        self.seen()
        identity = _torch.storage_of(local(tensor))
        if identity in self._parameters:
            return tensor
        return _Saved(self, tensor, identity)

    def _unpack(self, packed) -> torch.Tensor:
        self.seen()
        return packed.tensor if isinstance(packed, _Saved) else packed


class _Saved:
    """A saved tensor, counted as long as it lives."""

    def __init__(self, counts: SavedTensors, tensor: torch.Tensor, identity: int):
        self.counts, self.tensor, self.identity = counts, tensor, identity
        counts.came(identity, local(tensor).untyped_storage().nbytes())

    def __del__(self):
        self.counts.went(self.identity)
