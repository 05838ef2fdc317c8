"""Log of every storage of a step on fake tensors, and the peak found in it.

Floating-point tensors are fake (FakeTensorMode); integer tensors are real: token ids, positions
and masks are small, and model code reads them. The log records when each storage is allocated and
freed; `find_peak` categorizes storages afterwards, when their lifetimes are known.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import Counter
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from ... import _torch
from ..memory.report import CATEGORIES, PERSISTENT, MemoryEstimate, reserve_bytes

READS_VALUE = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
"""Operators that read the value of a tensor."""

BETWEEN, REDUCING = "between stages", "the reduction of gradients"
"""Places in a pipeline rank's step outside the parts of a model."""

PASSES = {
    "forward": "in the forward pass",
    "again": "in the backward pass, in recomputation",
    "backward": "in the backward pass",
}


@dataclass(eq=False, slots=True)
class StorageRecord:
    """Lifetime of one storage."""

    bytes: int
    kind: str
    """A category of `MemoryEstimate`, or "" if it follows from the lifetime."""
    phase: str
    """Phase of its allocation: forward, again (recomputation), backward or update."""
    where: str
    """Part of the model that allocated it."""
    maker: str
    """Operator that returned it."""
    turn: int
    """Changes between forward and backward before its allocation."""
    ended: tuple[float, str] = (math.inf, "")
    """Turn and part of the model in which it was freed."""

    @property
    def outlived(self) -> bool:
        """True if it outlived the pass that allocated it."""
        return self.ended[0] > self.turn


@dataclass(frozen=True)
class StorageEvent:
    """Allocation, release or resize of a storage."""

    storage: StorageRecord
    bytes: int
    """Change of allocated bytes."""
    moment: tuple[str, str]
    """Phase and part of the model."""


class StorageTracker(_torch.TorchDispatchMode):
    """Runs operators on fake tensors while it is active, and logs their storages."""

    def __init__(self):
        super().__init__()
        self.events: list[StorageEvent] = []
        self.updating = False
        self.where = ""
        self._turn, self._backwards = 0, False
        self._fake = _torch.fake_tensors()
        self._known: dict[int, tuple[StorageRecord, weakref.ref]] = {}
        self._open = contextlib.ExitStack()

    def __enter__(self) -> StorageTracker:
        self._open.enter_context(self._fake)
        self._open.enter_context(_torch.watching_resizes(self._resized))
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._open.close()

    @property
    def phase(self) -> str:
        if self.updating:
            return "update"
        if not _torch.in_backward():
            return "forward"
        return "again" if torch.is_grad_enabled() else "backward"

    @property
    def turn(self) -> int:
        if _torch.in_backward() != self._backwards:
            self._turn, self._backwards = self._turn + 1, not self._backwards
        return self._turn

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # dispatched again for this rank's local tensor
        kwargs = kwargs or {}
        given = _torch.tensors_in([args, kwargs])
        fake = any(map(_torch.is_fake, given))
        if fake and operator is torch.ops.aten.equal.default:
            return True  # a split model passes over parameters it does not hold
        if fake and operator in READS_VALUE:
            return 0.0 if args[0].is_floating_point() else 0
        if fake or not _returns_integers(operator, given, args, kwargs):
            output = operator(*args, **kwargs)
        else:
            with _torch.unset_fake():
                output = operator(*args, **kwargs)
        for tensor in [output] if isinstance(output, torch.Tensor) else _torch.tensors_in(output):
            self.record(tensor, maker=operator)
        return output

    def record(self, tensor: torch.Tensor, kind: str = "", maker: object = "") -> None:
        """Log the storage of ``tensor`` if it is new, and set its ``kind``."""
        held, identity = tensor.untyped_storage(), _torch.storage_of(tensor)
        known = self._known.get(identity)
        if known is None or known[1]() is not held:
            size = held.nbytes()
            storage = StorageRecord(size, kind, self.phase, self.where, str(maker), self.turn)
            gone = weakref.ref(held, lambda _: self._freed(identity, storage))
            self._known[identity] = storage, gone
            self._log(storage, size)
        elif kind:
            known[0].kind = kind

    def _log(self, storage: StorageRecord, size: int) -> None:
        self.events.append(StorageEvent(storage, size, (self.phase, self.where)))

    def _freed(self, identity: int, storage: StorageRecord) -> None:
        storage.ended = self.turn, self.where
        self._log(storage, -storage.bytes)
        known = self._known.get(identity)
        if known is not None and known[0] is storage:
            del self._known[identity]

    def _resized(self, identity: int, size: int) -> None:
        """Log a resize: FSDP2 frees and allocates gathered parameters without new tensors."""
        known = self._known.get(identity)
        if known is not None:
            storage, _ = known
            storage.kind = "gathered"
            self._log(storage, size - storage.bytes)
            storage.bytes = size


def _returns_integers(operator, given: list[torch.Tensor], args, kwargs) -> bool:
    """True if an operator without fake inputs returns integers only."""
    if given:
        return True
    dtype = kwargs.get("dtype")
    if dtype is not None:
        return not dtype.is_floating_point
    counts = operator.overloadpacket is torch.ops.aten.arange
    return counts and not any(isinstance(value, float) for value in args)


class SharedChunks(TorchFunctionMode):
    """Lets ``torch.chunk`` return the same view for all chunks of equal size.

    FSDP2 chunks every parameter for all ranks, but uses only its own chunk and the size of the
    first. Tens of thousands of views took half the time of a dry run.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return (_chunk if function is torch.chunk else function)(*args, **(kwargs or {}))


def _chunk(whole: torch.Tensor, chunks: int, dim: int = 0) -> list[torch.Tensor]:
    length = whole.size(dim)
    each = -(-length // chunks)
    if each == 0:
        return [whole]
    pieces, rest = divmod(length, each)
    found = [whole.narrow(dim, 0, each)] * pieces
    return [*found, whole.narrow(dim, length - rest, rest)] if rest else found


def find_peak(events: list[StorageEvent], begin: int) -> MemoryEstimate:
    """Return the peak of the step whose events start at ``begin``."""
    at = _peak_index(events, begin)
    allocated: Counter[StorageRecord] = Counter()
    for event in events[: at + 1]:
        allocated[event.storage] += event.bytes
    parts = dict.fromkeys(CATEGORIES, 0)
    for storage, size in allocated.items():
        if size:
            parts[category(storage)] += size
    after: Counter[str] = Counter()
    for event in events:
        after[event.storage.kind] += event.bytes
    reduced = sum(
        event.bytes
        for event in events
        if event.moment[0] != "update" and category(event.storage) == "gradients"
    )
    reserve = reserve_bytes(sum(parts.values()), max(0, reduced - parts["gradients"]))
    persistent = sum(after[kind] for kind in PERSISTENT)
    moment = describe_moment(*events[at].moment)
    return MemoryEstimate(parts, persistent, moment, reserve)


def category(storage: StorageRecord) -> str:
    """Return the category of ``storage``: its mark, or the one implied by its lifetime."""
    if storage.kind:
        return storage.kind
    if storage.phase == "update":
        return "update"
    if storage.where == "head" and (storage.phase == "forward" or storage.ended[1] == "head"):
        return "logits"
    if not storage.outlived:
        return "working"
    return "kept" if storage.phase == "forward" else "gradients"


def describe_moment(phase: str, where: str) -> str:
    """Describe a moment in the words of `MemoryEstimate.moment`."""
    if phase == "update":
        return "in the optimizer update"
    if where == REDUCING:
        return "in the reduction of gradients"
    part = "the loss" if where == "head" else where
    return f"{PASSES[phase]}: {part}"


def _peak_index(events: list[StorageEvent], begin: int) -> int:
    """Return the index of the event with the most allocated bytes after it."""
    now = most = 0
    at = begin
    for place, event in enumerate(events):
        now += event.bytes
        if place >= begin and now > most:
            most, at = now, place
    return at
