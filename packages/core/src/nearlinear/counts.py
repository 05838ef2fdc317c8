"""Count the collectives a piece of code issues on this rank, and the bytes they carry.

``with count_collectives() as counts: ...`` works on real process groups (every ``c10d`` operator
passes torch's dispatcher) and on ranks that are threads (which report here themselves). Bytes are
the larger side of the call: an all-gather's output, a reduce-scatter's input.
"""

import contextlib
import threading
from collections import Counter

import torch

from ._torch import TorchDispatchMode

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
    """Counts while it is open: ``calls["all_gather"]``, ``bytes["all_gather"]``."""

    def __init__(self):
        self.calls, self.bytes = Counter(), Counter()
        self._pending = []
        self._mode = _Operators(self)

    def __enter__(self) -> "count_collectives":
        _stack().append(self)
        self._mode.__enter__()
        return self

    def __exit__(self, *error):
        self._mode.__exit__(*error)
        _stack().remove(self)
        for done in self._pending:
            done.wait()
        self._pending.clear()

    def expect(self, done: threading.Event) -> None:
        """Do not close before ``done``: until then another thread may count here."""
        self._pending.append(done)

    def add(self, kind: str, size: int) -> None:
        self.calls[kind] += 1
        self.bytes[kind] += size

    def __repr__(self) -> str:
        return ", ".join(f"{self.calls[k]} {k} ({self.bytes[k]} B)" for k in sorted(self.calls))


def open_here() -> list[count_collectives]:
    """The counters that are open on this thread, for communication given to another one."""
    return list(_stack())


@contextlib.contextmanager
def also_here(counters: list[count_collectives]):
    """Have counters that were opened on another thread count on this one."""
    with contextlib.ExitStack() as modes:
        for counter in counters:
            modes.enter_context(_Operators(counter))
        yield


def report(operator: str, *tensors) -> None:
    """Tell the open counters of this thread about one collective that bypasses the dispatcher."""
    for counter in _stack():
        counter.add(_kind(operator), _largest(tensors))


def _stack() -> list:
    if not hasattr(_active, "counters"):
        _active.counters = []
    return _active.counters


def _kind(operator: str) -> str:
    return next((kind for part, kind in _KINDS.items() if part in operator), operator)


def _largest(tree) -> int:
    """Bytes of the largest argument; a list of tensors counts as one argument."""

    def size(item) -> int:
        if isinstance(item, torch.Tensor):
            return item.numel() * item.element_size()
        return sum(map(size, item)) if isinstance(item, list | tuple) else 0

    return max(map(size, tree), default=0)


class _Operators(TorchDispatchMode):
    """Passes every operator on and tells ``counter`` about those of ``c10d``."""

    def __init__(self, counter: count_collectives):
        super().__init__()
        self.counter = counter

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counter.add(_kind(func.overloadpacket.__name__), _largest(args))
        return func(*args, **(kwargs or {}))
