"""Count the collectives that a block of code issues on this rank, and their bytes.

``with count_collectives() as counts: ...`` works on real process groups, whose ``c10d`` operators
pass torch's dispatcher, and on ranks that are threads, which call `report`. Bytes are those of the
larger side of the call: the output of an all-gather, the input of a reduce-scatter.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from typing import Any

import torch

from .._torch import TorchDispatchMode

_KINDS = {
    "reduce_scatter": "reduce_scatter",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "scatter": "scatter",
    "gather": "gather",
    "reduce": "reduce",
    "send": "send",
    "recv": "recv",
}
_active = threading.local()


class count_collectives:  # noqa: N801 (a context manager, named as the verb it is)
    """Count collectives while the context is open.

    Example::

        with nl.count_collectives() as counts:
            model(**batch).loss.backward()
        print(counts.calls["all_gather"], counts.bytes["all_gather"])
    """

    def __init__(self):
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._pending = []
        self._mode = _Operators(self)

    def __enter__(self) -> count_collectives:
        _stack().append(self)
        self._mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)
        _stack().remove(self)
        for done in self._pending:
            done.wait()
        self._pending.clear()

    def expect(self, done: threading.Event) -> None:
        """Wait for ``done`` before closing, since another thread counts here until then."""
        self._pending.append(done)

    def add(self, kind: str, size: int) -> None:
        self.calls[kind] += 1
        self.bytes[kind] += size

    def __repr__(self) -> str:
        return ", ".join(f"{self.calls[k]} {k} ({self.bytes[k]} B)" for k in sorted(self.calls))


def open_here() -> list[count_collectives]:
    """Return the counters open on this thread, to count on another thread with `also_here`."""
    return list(_stack())


@contextlib.contextmanager
def also_here(counters: list[count_collectives]):
    """Count on this thread with counters that were opened on another one."""
    with contextlib.ExitStack() as modes:
        for counter in counters:
            modes.enter_context(_Operators(counter))
        yield


def report(operator: str, *tensors) -> None:
    """Report one collective that bypasses the dispatcher to the open counters of this thread."""
    for counter in _stack():
        counter.add(_kind(operator), _largest(tensors))


def _stack() -> list:
    if not hasattr(_active, "counters"):
        _active.counters = []
    return _active.counters


def _kind(operator: str) -> str:
    return next((kind for part, kind in _KINDS.items() if part in operator), operator)


def _largest(tree) -> int:
    """Return the bytes of the largest argument; a list of tensors counts as one argument."""

    def size(item) -> int:
        if isinstance(item, torch.Tensor):
            return item.numel() * item.element_size()
        return sum(map(size, item)) if isinstance(item, list | tuple) else 0

    return max(map(size, tree), default=0)


class _Operators(TorchDispatchMode):
    """Dispatch mode that reports ``c10d`` operators to ``counter``."""

    def __init__(self, counter: count_collectives):
        super().__init__()
        self.counter = counter

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counter.add(_kind(func.overloadpacket.__name__), _largest(args))
        return func(*args, **(kwargs or {}))
