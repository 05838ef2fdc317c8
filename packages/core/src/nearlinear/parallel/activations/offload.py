"""Saved tensors in host memory between the forward and the backward pass, loaded ahead of use.

Source of the idea: SageMaker's model parallel library, ``activation_loading_horizon``; this is not
its code. Hooks on saved tensors hand over what a block saves. It is copied out while the next
blocks compute, and when the backward pass reaches a block, what the ``horizon`` blocks before it
saved starts to come back. So at most ``horizon`` + 1 blocks' tensors are on the device in either
pass. What moves is storages, whole: views of one move once and get back their strides, so that the
backward pass computes the very same numbers.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule

from ... import _torch
from .copies import Copier
from .parcels import Claim, Parcel, Pass, Saved
from .saved import Stays, held_by, is_activation
from .slab import Slab

Hooks = tuple[Callable[[torch.Tensor], object], Callable[[object], torch.Tensor]]
"""What becomes of a tensor that is saved, and the tensor again from that."""


@dataclass(frozen=True)
class Peak:
    """The most that was at one moment."""

    blocks: int = 0
    """blocks (or groups that are recomputed as one) with saved tensors of theirs on the device"""
    nbytes: int = 0
    """bytes of saved tensors on the device that were moved, or could have been"""
    host_nbytes: int = 0
    """bytes of host memory taken"""


class Offload:
    """Moves what the blocks of one model save on this rank."""

    def __init__(
        self,
        horizon: int,
        smallest: int,
        device: torch.device,
        copier: Copier,
        see: Callable[[torch.Tensor], None],
    ):
        """``smallest``: bytes of a storage; smaller ones stay on the device. ``see`` is shown every
        tensor as it is saved, or comes back."""
        self.horizon, self.smallest, self.device, self.copier = horizon, smallest, device, copier
        self.see = see
        self.slab = Slab(pinned=device.type == "cuda")
        self.last: int | None = None
        """blocks of a pass, where the one that has just ended is the first to come back"""
        self._of: nn.Module | None = None
        self._now: Pass | None = None
        self._passes: list[weakref.ref[Pass]] = []  # in order; those that a graph still needs
        self._known: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
        self._leaving: deque[Saved] = deque()
        self._at: Saved | None = None  # where the backward pass is
        self._blocks = self._nbytes = 0
        self._peak = Peak()

    @property
    def peak(self) -> Peak:
        """The most since the last `forget_peak`."""
        return Peak(self._peak.blocks, self._peak.nbytes, self.slab.nbytes)

    def forget_peak(self) -> None:
        self._peak = Peak(self._blocks, self._nbytes)

    def begin_pass(self, of: nn.Module) -> None:
        """A forward pass of ``of`` begins."""
        self._of, self._now = of, None

    @contextlib.contextmanager
    def saving(self, number: int, modules: Iterable[nn.Module]) -> Iterator[Hooks]:
        """Around the forward pass of block ``number``, which is ``modules``; the hooks in use."""
        saved = self._enter(number, modules)
        hooks = functools.partial(self._pack, saved), self._unpack
        with saved_tensors_hooks(*hooks):
            yield hooks
        if saved.moves:
            self._leaving.append(saved)

    def _enter(self, number: int, modules: Iterable[nn.Module]) -> Saved:
        self._at = None
        if self._now is None or number <= self._now.newest:
            self._now = Pass(self._of)
            self._passes = [known for known in self._passes if known() is not None]
            self._passes.append(weakref.ref(self._now))
        first_to_stay = number + 1 if self.last is None else self.last - 1 - self.horizon
        stay_already = max(0, number - max(0, first_to_stay))
        while len(self._leaving) + stay_already > self.horizon and self._leaving:
            self._settle([self._leaving.popleft()])
        saved = Saved(number, self._now, number < first_to_stay, _held(list(modules)))
        self._now.add(saved)
        return saved

    def _pack(self, saved: Saved, tensor: torch.Tensor):
        """What the graph keeps in place of ``tensor``."""
        if isinstance(tensor, nn.Parameter):
            return tensor
        self.see(tensor)
        moves = tensor.device == self.device and is_activation(tensor, saved.held())
        if not moves or tensor.untyped_storage().nbytes() < self.smallest:
            return Stays.of(tensor)
        parcel = self._parcel(tensor, saved)
        return Claim(
            parcel, saved, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()
        )

    def _parcel(self, tensor: torch.Tensor, saved: Saved) -> Parcel:
        key = _torch.storage_of(tensor), tensor._version
        parcel = self._known.get(key)
        if parcel is None:
            parcel = self._known[key] = Parcel(self, tensor)
            self._own(parcel, saved)
            if saved.moves:
                parcel.send()
        elif saved not in parcel.owners:
            parcel.fetch()
            self._own(parcel, saved)
        return parcel

    def _own(self, parcel: Parcel, saved: Saved) -> None:
        """``saved`` has ``parcel``, which is here, too."""
        if parcel.owners:
            self.left(parcel)
        parcel.owners.append(saved)
        saved.parcels.add(parcel)
        self.came(parcel)

    def _unpack(self, kept) -> torch.Tensor:
        if isinstance(kept, Stays):
            return kept.take()
        if not isinstance(kept, Claim):
            return kept
        if kept.by is not self._at:
            self._reach(kept.by)
        storage = self._safely(kept.parcel.take)
        empty = torch.empty(0, dtype=kept.dtype, device=self.device)
        return empty.set_(storage, kept.offset, kept.size, kept.stride)

    def _reach(self, saved: Saved) -> None:
        """The backward pass begins with block ``saved``: have those before it come back."""
        self._at, saved.reached = saved, True
        blocks = saved.of.blocks
        at = blocks.index(saved)
        for later in blocks[at + 1 :]:  # a schedule that comes twice to a block keeps its graph
            for parcel in list(later.parcels):
                if len(parcel.owners) == 1:
                    parcel.free()
        coming = [*reversed(blocks[:at]), *self._next_pass(saved.of)]
        wanted = [saved, *coming[: self.horizon]]
        self._settle([each for each in self._leaving if each not in wanted])
        self._leaving.clear()
        for each in wanted:
            for parcel in list(each.parcels):
                self._safely(parcel.fetch)

    def _settle(self, leaving: Iterable[Saved]) -> None:
        for saved in leaving:
            for parcel in list(saved.parcels):
                self._safely(parcel.settle)

    def _next_pass(self, of: Pass) -> list[Saved]:
        """Blocks of the pass whose backward comes after that of ``of``, in a pipeline's stage."""
        alive = [known for ref in self._passes if (known := ref()) is not None]
        for later in alive[alive.index(of) + 1 :] if of in alive else ():
            if later.of is of.of and not any(block.reached for block in later.blocks):
                return later.blocks[::-1]
        return []

    def _safely(self, do):
        """``do()``; after an error what is on its way belongs to a step that is lost."""
        try:
            return do()
        except BaseException:
            self._leaving.clear()
            self._now = self._at = None
            raise

    def came(self, parcel: Parcel) -> None:
        """Count ``parcel`` as on the device."""
        self._count(parcel, +1)

    def left(self, parcel: Parcel) -> None:
        """Count it as not there."""
        self._count(parcel, -1)

    def _count(self, parcel: Parcel, change: int) -> None:
        self._nbytes += change * parcel.size
        if len(parcel.owners) == 1:  # blocks are counted by what is theirs alone
            (owner,) = parcel.owners
            before = owner.here > 0
            owner.here += change
            self._blocks += (owner.here > 0) - before
        most = self._peak
        self._peak = Peak(max(most.blocks, self._blocks), max(most.nbytes, self._nbytes))


def _held(modules: list[nn.Module]) -> Callable[[], set[int]]:
    """`held_by`, looked up once, unless units inside a block are gathered while it runs."""
    inner = [part for module in modules for part in module.modules() if part is not module]
    if any(isinstance(part, FSDPModule) for part in inner):
        return functools.partial(held_by, modules)
    held = held_by(modules)
    return lambda: held
