"""Activation offload: saved tensors in host memory between forward and backward pass.

Source of the idea: ``activation_loading_horizon`` of SageMaker's model parallel library; the code
is original. Saved-tensor hooks receive the tensors that a block saves. They are copied to the host
while the next blocks compute. When the backward pass reaches a block, the tensors of the
``horizon`` blocks before it are prefetched. So at most ``horizon`` + 1 blocks have tensors on the
device in either pass. Whole storages move: views of one storage move once and keep their strides,
so the backward pass computes bit-identical numbers.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule

from .. import _torch
from .host_buffer import HostBufferPool, HostCopier
from .saved_tensors import KeptTensor, changed_in_place, is_activation, parameter_storages


@dataclass(eq=False)
class ForwardPass:
    """One forward pass of a model, or of a pipeline stage, and its backward pass."""

    module: nn.Module | None
    newest: int = -1
    """Index of the latest block."""
    _blocks: list[weakref.ref[BlockActivations]] = field(default_factory=list)

    def add(self, saved: BlockActivations) -> None:
        self.newest = saved.number
        self._blocks.append(weakref.ref(saved))

    @property
    def blocks(self) -> list[BlockActivations]:
        """Blocks that a graph still needs, in the order of the forward pass."""
        return [saved for known in self._blocks if (saved := known()) is not None]


@dataclass(eq=False)
class BlockActivations:
    """Tensors that one block saved in one forward pass."""

    number: int
    forward_pass: ForwardPass
    moves: bool
    """False for blocks that stay on the device."""
    parameter_storages: Callable[[], set[int]]
    """Storages of its parameters and buffers."""
    storages: weakref.WeakSet[OffloadedStorage] = field(default_factory=weakref.WeakSet)
    on_device: int = 0
    """Number of storages on the device that only this block uses."""
    reached: bool = False
    """True once the backward pass has reached the block."""


class OffloadedStorage:
    """One storage, on the device or in host memory, while a saved tensor refers to it."""

    def __init__(self, manager: Offload, tensor: torch.Tensor):
        self.manager = manager
        self.owners: list[BlockActivations] = []
        self.storage = _torch.WeakStorage(tensor.untyped_storage())  # reserves its id
        self.source: KeptTensor | None = KeptTensor.from_tensor(tensor)
        self.changed = False
        self.bytes: torch.Tensor | None = _bytes_of(tensor)
        self.size = self.bytes.numel()
        self.part = self.host = self.offload_copy = self.prefetch_copy = None

    @property
    def is_on_device(self) -> bool:
        return self.bytes is not None

    def start_offload(self) -> None:
        """Start the copy to host memory."""
        assert self.bytes is not None
        self.part, self.host = self.manager.pool.allocate(self.size)
        self.offload_copy = self.manager.copier.offload(self.bytes, self.host)

    def finish_offload(self) -> None:
        """Wait for the copy to host memory and free the device memory."""
        if self.source is not None and self.offload_copy is not None:
            self.manager.copier.wait(self.offload_copy)
            self.changed = self.source.changed
            self._free()

    def prefetch(self) -> None:
        """Start the copy to the device unless the storage is there."""
        if not self.is_on_device:
            assert self.host is not None
            copier = self.manager.copier
            self.bytes, self.prefetch_copy = copier.prefetch(self.host, self.offload_copy)
            self.manager.observe(self.bytes)
            self.manager.count_arrival(self)

    def evict(self) -> None:
        """Free the device memory if there is a copy in host memory."""
        self.finish_offload()
        if self.offload_copy is not None:
            self._free()

    def _free(self) -> None:
        if self.is_on_device:
            self.manager.count_departure(self)
            if self.prefetch_copy is not None:
                self.manager.copier.discard(self.prefetch_copy)
            self.bytes = self.source = self.prefetch_copy = None

    def take(self) -> torch.UntypedStorage:
        """Return the storage on the device. Re-raises the exception of a failed copy."""
        self.prefetch()
        if self.prefetch_copy is not None:
            self.manager.copier.wait(self.prefetch_copy)
        if self.changed or (self.source is not None and self.source.changed):
            raise changed_in_place()
        assert self.bytes is not None
        return self.bytes.untyped_storage()

    def __del__(self):
        self._free()
        if self.part is not None:
            self.manager.pool.release(self.part)


@dataclass(frozen=True, eq=False)
class StorageRef:
    """Reference of the graph to a saved tensor: a view of an offloaded storage."""

    storage: OffloadedStorage
    owner: BlockActivations
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """View the whole storage of ``tensor`` as a flat uint8 tensor."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


Hooks = tuple[Callable[[torch.Tensor], object], Callable[[object], torch.Tensor]]
"""Pack and unpack hooks of saved tensors."""


@dataclass(frozen=True)
class OffloadStats:
    """Peaks of activation offload."""

    blocks: int = 0
    """Blocks (or groups that are recomputed as one) with saved tensors on the device."""
    nbytes: int = 0
    """Bytes on the device of saved tensors that move."""
    host_nbytes: int = 0
    """Bytes of host memory."""


class Offload:
    """Offload of the tensors saved by the blocks of one model on this rank."""

    def __init__(
        self,
        horizon: int,
        smallest: int,
        device: torch.device,
        copier: HostCopier,
        observe: Callable[[torch.Tensor], None],
    ):
        """Create the offload of a model.

        Args:
            horizon: Blocks to prefetch ahead of the backward pass.
            smallest: Bytes; smaller storages stay on the device.
            device: Device of the activations.
            copier: Copies between device and host.
            observe: Called with each tensor that is saved or returns to the device.
        """
        self.horizon, self.smallest, self.device, self.copier = horizon, smallest, device, copier
        self.observe = observe
        self.pool = HostBufferPool(pinned=device.type == "cuda")
        self.block_count: int | None = None
        """Blocks of a forward pass, if its backward pass follows directly; None in pipelines."""
        self._module: nn.Module | None = None
        self._current: ForwardPass | None = None
        self._passes: list[weakref.ref[ForwardPass]] = []  # those that a graph still needs
        self._known: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
        self._offloading: deque[BlockActivations] = deque()
        self._backward_block: BlockActivations | None = None
        self._blocks = self._nbytes = 0
        self._peak = OffloadStats()

    @property
    def stats(self) -> OffloadStats:
        """Peaks since the last `reset_stats`."""
        return OffloadStats(self._peak.blocks, self._peak.nbytes, self.pool.nbytes)

    def reset_stats(self) -> None:
        """Restart the peaks from the present values."""
        self._peak = OffloadStats(self._blocks, self._nbytes)

    def begin_pass(self, module: nn.Module) -> None:
        """Start a forward pass of ``module``."""
        self._module, self._current = module, None

    @contextlib.contextmanager
    def saving(self, number: int, modules: Iterable[nn.Module]) -> Iterator[Hooks]:
        """Install saved-tensor hooks around the forward pass of block ``number``; yield them."""
        saved = self._enter(number, modules)
        hooks = functools.partial(self._pack, saved), self._unpack
        with saved_tensors_hooks(*hooks):
            yield hooks
        if saved.moves:
            self._offloading.append(saved)

    def _enter(self, number: int, modules: Iterable[nn.Module]) -> BlockActivations:
        self._backward_block = None
        if self._current is None or number <= self._current.newest:
            self._current = ForwardPass(self._module)
            self._passes = [known for known in self._passes if known() is not None]
            self._passes.append(weakref.ref(self._current))
        count = self.block_count
        first_to_stay = number + 1 if count is None else count - 1 - self.horizon
        staying = max(0, number - max(0, first_to_stay))
        while len(self._offloading) + staying > self.horizon and self._offloading:
            self._finish([self._offloading.popleft()])
        storages = _parameter_storages(list(modules))
        saved = BlockActivations(number, self._current, number < first_to_stay, storages)
        self._current.add(saved)
        return saved

    def _pack(self, saved: BlockActivations, tensor: torch.Tensor):
        """Pack hook: return the object that the graph saves for ``tensor``."""
        if isinstance(tensor, nn.Parameter):
            return tensor
        self.observe(tensor)
        moves = tensor.device == self.device and is_activation(tensor, saved.parameter_storages())
        if not moves or tensor.untyped_storage().nbytes() < self.smallest:
            return KeptTensor.from_tensor(tensor)
        storage = self._storage(tensor, saved)
        offset = int(tensor.storage_offset())
        return StorageRef(storage, saved, tensor.dtype, tensor.size(), tensor.stride(), offset)

    def _storage(self, tensor: torch.Tensor, saved: BlockActivations) -> OffloadedStorage:
        key = _torch.storage_of(tensor), tensor._version
        storage = self._known.get(key)
        if storage is None:
            storage = self._known[key] = OffloadedStorage(self, tensor)
            self._add_owner(storage, saved)
            if saved.moves:
                storage.start_offload()
        elif saved not in storage.owners:
            storage.prefetch()
            self._add_owner(storage, saved)
        return storage

    def _add_owner(self, storage: OffloadedStorage, saved: BlockActivations) -> None:
        """Add a block to the owners of a storage on the device."""
        if storage.owners:
            self.count_departure(storage)
        storage.owners.append(saved)
        saved.storages.add(storage)
        self.count_arrival(storage)

    def _unpack(self, kept) -> torch.Tensor:
        if isinstance(kept, KeptTensor):
            return kept.take()
        if not isinstance(kept, StorageRef):
            return kept
        if kept.owner is not self._backward_block:
            self._reach(kept.owner)
        storage = self._safely(kept.storage.take)
        empty = torch.empty(0, dtype=kept.dtype, device=self.device)
        return empty.set_(storage, kept.offset, kept.size, kept.stride)

    def _reach(self, saved: BlockActivations) -> None:
        """Prefetch the blocks before ``saved``, which the backward pass has reached."""
        self._backward_block, saved.reached = saved, True
        blocks = saved.forward_pass.blocks
        at = blocks.index(saved)
        for later in blocks[at + 1 :]:  # zero-bubble schedules keep the graph of a block
            for storage in list(later.storages):
                if len(storage.owners) == 1:
                    storage.evict()
        coming = [*reversed(blocks[:at]), *self._next_pass(saved.forward_pass)]
        wanted = [saved, *coming[: self.horizon]]
        self._finish([each for each in self._offloading if each not in wanted])
        self._offloading.clear()
        for each in wanted:
            for storage in list(each.storages):
                self._safely(storage.prefetch)

    def _finish(self, offloading: Iterable[BlockActivations]) -> None:
        for saved in offloading:
            for storage in list(saved.storages):
                self._safely(storage.finish_offload)

    def _next_pass(self, current: ForwardPass) -> list[BlockActivations]:
        """Return the blocks of the pass whose backward follows, in a pipeline stage."""
        alive = [known for ref in self._passes if (known := ref()) is not None]
        for later in alive[alive.index(current) + 1 :] if current in alive else ():
            if later.module is current.module and not any(block.reached for block in later.blocks):
                return later.blocks[::-1]
        return []

    def _safely(self, do):
        """Call ``do()``; an error drops the copies in flight, since the step is lost."""
        try:
            return do()
        except BaseException:
            self._offloading.clear()
            self._current = self._backward_block = None
            raise

    def count_arrival(self, storage: OffloadedStorage) -> None:
        """Count ``storage`` as on the device."""
        self._count(storage, +1)

    def count_departure(self, storage: OffloadedStorage) -> None:
        """Count ``storage`` as no longer on the device."""
        self._count(storage, -1)

    def _count(self, storage: OffloadedStorage, change: int) -> None:
        self._nbytes += change * storage.size
        if len(storage.owners) == 1:  # shared storages do not count towards a block
            (owner,) = storage.owners
            before = owner.on_device > 0
            owner.on_device += change
            self._blocks += (owner.on_device > 0) - before
        most = self._peak
        self._peak = OffloadStats(max(most.blocks, self._blocks), max(most.nbytes, self._nbytes))


def _parameter_storages(modules: list[nn.Module]) -> Callable[[], set[int]]:
    """Evaluate `parameter_storages` once, or on each call if inner units are gathered later."""
    inner = [part for module in modules for part in module.modules() if part is not module]
    if any(isinstance(part, FSDPModule) for part in inner):
        return functools.partial(parameter_storages, modules)
    storages = parameter_storages(modules)
    return lambda: storages
