"""What blocks save, as `offload` moves it: whole storages, and which block has which of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from ... import _torch
from .saved import Stays, changed_in_place

if TYPE_CHECKING:
    from .offload import Offload


@dataclass(eq=False)
class Pass:
    """One forward pass of a model, or of a pipeline's stage, and its backward pass."""

    of: nn.Module | None
    newest: int = -1
    """number of the block that came last"""
    _blocks: list[weakref.ref[Saved]] = field(default_factory=list)

    def add(self, saved: Saved) -> None:
        self.newest = saved.number
        self._blocks.append(weakref.ref(saved))

    @property
    def blocks(self) -> list[Saved]:
        """In the order of the forward pass, those that a graph still needs."""
        return [saved for known in self._blocks if (saved := known()) is not None]


@dataclass(eq=False)
class Saved:
    """What one block saved in one forward pass."""

    number: int
    of: Pass
    moves: bool
    held: Callable[[], set[int]]
    """storages of its parameters and buffers"""
    parcels: weakref.WeakSet[Parcel] = field(default_factory=weakref.WeakSet)
    here: int = 0
    """parcels on the device that only this block has"""
    reached: bool = False
    """by the backward pass"""


class Parcel:
    """One storage, on the device or in host memory, as long as a saved tensor lies in it."""

    def __init__(self, offload: Offload, tensor: torch.Tensor):
        self.offload = offload
        self.owners: list[Saved] = []
        self.storage = _torch.WeakStorage(tensor.untyped_storage())  # its number is not used again
        self.source, self.changed = Stays.of(tensor), False
        self.bytes = _bytes_of(tensor)
        self.size = self.bytes.numel()
        self.part = self.host = self.sent = self.coming = None

    @property
    def is_here(self) -> bool:
        return self.bytes is not None

    def send(self) -> None:
        """Start the copy to host memory."""
        self.part, self.host = self.offload.slab.take(self.size)
        self.sent = self.offload.copier.out(self.bytes, self.host)

    def settle(self) -> None:
        """Once it is in host memory, leave the device."""
        if self.source is not None and self.sent is not None:
            self.offload.copier.wait(self.sent)
            self.changed = self.source.changed
            self._leave()

    def fetch(self) -> None:
        """Start the copy back, if it is not here."""
        if not self.is_here:
            self.bytes, self.coming = self.offload.copier.back(self.host, self.sent)
            self.offload.see(self.bytes)
            self.offload.came(self)

    def free(self) -> None:
        """Leave the device, if it can come back."""
        self.settle()
        if self.sent is not None:
            self._leave()

    def _leave(self) -> None:
        if self.is_here:
            self.offload.left(self)
            if self.coming is not None:
                self.offload.copier.forget(self.coming)
            self.bytes = self.source = self.coming = None

    def take(self) -> torch.UntypedStorage:
        """The storage, on the device. Raises what a copy failed with, and NearlinearError."""
        self.fetch()
        if self.coming is not None:
            self.offload.copier.wait(self.coming)
        if self.changed or (self.source is not None and self.source.changed):
            raise changed_in_place()
        return self.bytes.untyped_storage()

    def __del__(self):
        self._leave()
        if self.part is not None:
            self.offload.slab.give_back(self.part)


@dataclass(frozen=True, eq=False)
class Claim:
    """Stands for a saved tensor in the graph: which part of which parcel."""

    parcel: Parcel
    by: Saved
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of ``tensor``, flat, as uint8."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
