"""Every storage of a step that has no memory: when it came, how large, when it went.

Tensors of numbers are fake (shapes without memory, FakeTensorMode), those of whole numbers real:
token ids, positions and masks are small, and the code of models looks into them. What operators
return is written into a log, and what becomes of it; `reading` finds the peak there afterwards,
when it is known of every storage how long it lived.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from ... import _torch

MUST_ANSWER = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
"""operators that ask a tensor for its value"""

BETWEEN, REDUCING = "between stages", "the reduction of gradients"
"""where a pipeline's rank may be, beside the parts of a model"""


@dataclass(eq=False, slots=True)
class Storage:
    """One piece of memory."""

    bytes: int
    kind: str
    """a category of `MemoryPlan`, or "" where its life tells"""
    phase: str
    """that it was made in: forward, again (computed again), backward or update"""
    where: str
    """the part of the model that made it"""
    maker: str
    """the operator that returned it"""
    turn: int
    """forward and backward passes before the one that made it, those of a kind in a row as one"""
    ended: tuple[float, str] = (math.inf, "")
    """the turn that it was freed in, and where"""

    @property
    def outlived(self) -> bool:
        """Whether it was there after the pass that made it."""
        return self.ended[0] > self.turn


@dataclass(frozen=True)
class Event:
    """A storage that came, went, or changed its size."""

    storage: Storage
    bytes: int
    """more, or less"""
    moment: tuple[str, str]
    """phase and place"""


class Tracker(_torch.TorchDispatchMode):
    """Runs tensors without memory while it is open, and keeps the log of their storages."""

    def __init__(self):
        super().__init__()
        self.events: list[Event] = []
        self.updating = False
        self.where = ""
        self._turn, self._backwards = 0, False
        self._fake = _torch.fake_tensors()
        self._known: dict[int, tuple[Storage, weakref.ref]] = {}
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Tracker:
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
            return NotImplemented  # comes back for what it does with this rank's part
        kwargs = kwargs or {}
        given = _torch.tensors_in([args, kwargs])
        fake = any(map(_torch.is_fake, given))
        if fake and operator is torch.ops.aten.equal.default:
            return True  # a rank's part of a model lets through what it has not
        if fake and operator in MUST_ANSWER:
            return 0.0 if args[0].is_floating_point() else 0
        if fake or not _of_whole_numbers(operator, given, args, kwargs):
            output = operator(*args, **kwargs)
        else:
            with _torch.unset_fake():
                output = operator(*args, **kwargs)
        for tensor in [output] if isinstance(output, torch.Tensor) else _torch.tensors_in(output):
            self.see(tensor, maker=operator)
        return output

    def see(self, tensor: torch.Tensor, kind: str = "", maker="") -> None:
        """Enter the storage of ``tensor`` into the log, if it is new, and what ``kind`` it is."""
        held, identity = tensor.untyped_storage(), _torch.storage_of(tensor)
        storage, alive = self._known.get(identity, (None, None))
        if storage is None or alive() is not held:
            size = held.nbytes()
            storage = Storage(size, kind, self.phase, self.where, str(maker), self.turn)
            gone = weakref.ref(held, lambda _: self._freed(identity, storage))
            self._known[identity] = storage, gone
            self._log(storage, size)
        elif kind:
            storage.kind = kind

    def _log(self, storage: Storage, size: int) -> None:
        self.events.append(Event(storage, size, (self.phase, self.where)))

    def _freed(self, identity: int, storage: Storage) -> None:
        storage.ended = self.turn, self.where
        self._log(storage, -storage.bytes)
        if self._known.get(identity, (None,))[0] is storage:
            del self._known[identity]

    def _resized(self, identity: int, size: int) -> None:
        """FSDP2 frees and takes the memory of gathered parameters without making new tensors."""
        storage, _ = self._known.get(identity, (None, None))
        if storage is not None:
            storage.kind = "gathered"
            self._log(storage, size - storage.bytes)
            storage.bytes = size


def _of_whole_numbers(operator, given: list[torch.Tensor], args, kwargs) -> bool:
    """Whether nothing but whole numbers comes out, where nothing fake goes in."""
    if given:
        return True
    dtype = kwargs.get("dtype")
    if dtype is not None:
        return not dtype.is_floating_point
    counts = operator.overloadpacket is torch.ops.aten.arange
    return counts and not any(isinstance(value, float) for value in args)


class FewPieces(TorchFunctionMode):
    """Of the equal pieces that a parameter is cut into for all ranks, one stands for all.

    FSDP2 takes one of them, and the first one's size: views by the ten thousand, which took half
    the time of a dry run.
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
