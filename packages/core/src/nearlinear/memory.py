"""Measure the memory of one optimizer step on every rank.

Tensors are counted by their storages: shards, gradients and optimizer states as seen by the
optimizer, saved tensors and gathered parameters at their peaks. Peaks of different parts may occur
at different times, so their sum is an upper bound. On CUDA, ``other`` is the rest of the
allocator's peak: temporaries of operators.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from . import _torch
from .activation.api import observe_kept_tensors
from .errors import NearlinearError
from .fsdp.model_state import fsdp_roots, local_tensor, optimizer_parameter, runtime_of

PARTS = {
    "parameters": "parameters, sharded",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations saved by the blocks",
    "logits": "saved after the last block: logits, loss",
    "gathered": "gathered parameters",
    "communication": "communication buffers (computed)",
    "other": "other",
}
"""Parts of a rank's memory, in display order; ``other`` only where the device reports its peak."""

MIB = 2**20


@dataclass(frozen=True)
class MemoryReport:
    """Memory of one rank in one step, in bytes by part."""

    mine: dict[str, int]
    """Bytes on this rank."""
    most: dict[str, int]
    """Most bytes on any rank."""

    @property
    def total(self) -> int:
        return sum(self.mine.values())

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON and for `nearlinear.plots.memory`."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        width = max(map(len, PARTS.values()))
        lines = [f"{'memory of a step, MiB':{width}}  {'this rank':>9}  {'maximum':>9}"]
        for part, name in PARTS.items():
            if part in self.mine:
                lines.append(_row(name, width, self.mine[part], self.most[part]))
        lines.append(_row("total", width, self.total, self.most["total"]))
        return "\n".join(lines)


def _row(name: str, width: int, *sizes: int) -> str:
    return "  ".join([f"{name:{width}}", *(f"{size / MIB:9.1f}" for size in sizes)])


REDUCED_BYTES = 4  # gradients are reduced in float32


class memory_report:  # noqa: N801 (a context manager that reads as a verb)
    """Measure the step inside a ``with`` block.

    Example::

        with nl.memory_report(model, optimizer) as memory:
            for batch in nl.accumulate(model, micro_batches):
                model(**batch).loss.backward()
            optimizer.step()
        print(memory)

    ``model`` is sharded. The body runs one whole step, including ``optimizer.step()``, slightly
    slower than usual. Afterwards, ``memory.report`` is the `MemoryReport`. The exit is a collective
    call of all ranks.

    Raises NearlinearError if the model is not sharded, or if no forward pass has run inside.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.model: nn.Module = model
        self.optimizer: torch.optim.Optimizer = optimizer
        self.roots: list[nn.Module] = fsdp_roots(model)
        if not all(isinstance(root, FSDPModule) for root in self.roots):
            raise NearlinearError("nl.memory_report needs a model sharded by nl.shard")
        self.units: list[nn.Module] = [
            unit for root in self.roots for unit in root.modules() if _is_unit(unit)
        ]
        self.report: MemoryReport | None = None
        self._saved = SavedTensors(self._saved_kind)
        self._kind = "activations"
        self._recomputations: list[AbstractContextManager] = []  # observe recomputed units
        self._maybe_gathered = set(self.units)
        self._gathered = self._gradients = 0
        self._item_bytes: int | None = None  # bytes of a hidden number, once a block has run
        self._handles: list = []

    def __enter__(self) -> memory_report:
        device = runtime_of(self.model).device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        for unit in self.units:
            self._handles.append(unit.register_forward_pre_hook(self._before_unit))
            self._handles.append(unit.register_forward_hook(self._after_unit, always_call=True))
        for root in self.roots:
            before = root.register_forward_pre_hook(self._before_root, with_kwargs=True)
            self._handles.append(before)
            for block in _blocks(root)[:1]:
                first = block.register_forward_pre_hook(self._before_first_block, with_kwargs=True)
                self._handles.append(first)
            for block in _blocks(root)[-1:]:
                self._handles.append(block.register_forward_hook(self._after_last_block))
        self._handles.append(self.optimizer.register_step_pre_hook(self._before_update))
        self._saved.__enter__()
        observe_kept_tensors(self.model, self._saved.observe)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        observe_kept_tensors(self.model, None)
        self._saved.__exit__(kind, error, trace)
        for handle in self._handles:
            handle.remove()
        if kind is None:
            self.report = self._make_report()

    def __str__(self) -> str:
        return str(self.report)

    def _before_root(self, root, args, kwargs) -> None:
        self._kind = "activations"
        if root is self.model:  # the inputs of later pipeline stages are activations
            self._saved.exclude(_torch.tensors_in([args, kwargs]))

    def _before_unit(self, unit, args) -> None:
        self._saved.exclude((*unit.parameters(), *unit.buffers()))  # gathered by now
        self._observe_gathered(unit)
        if _torch.in_backward():
            observer = _torch.seeing_saved_tensors(self._saved.observe)
            observer.__enter__()
            self._recomputations.append(observer)

    def _after_unit(self, unit, args, output) -> None:
        if _torch.in_backward():
            self._recomputations.pop().__exit__(None, None, None)
            return
        for tensor in _torch.tensors_in(output):
            if tensor.requires_grad:  # FSDP2's hook on it, which gathers, runs first
                tensor.register_hook(partial(self._observe_gathered, unit))

    def _before_first_block(self, block, args, kwargs) -> None:
        hidden = [t for t in _torch.tensors_in([args, kwargs]) if t.is_floating_point()]
        if hidden and not _torch.in_backward():
            self._item_bytes = hidden[0].element_size()

    def _after_last_block(self, block, args, output) -> None:
        self._kind = "logits"

    def _saved_kind(self) -> str:
        """Part of the tensors saved now; a backward pass saves them in recomputation."""
        return "activations" if _torch.in_backward() else self._kind

    def _observe_gathered(self, unit, gradient=None) -> None:
        """Update the peak of gathered parameters, after ``unit`` was gathered."""
        self._maybe_gathered.add(unit)
        sizes = {unit: _torch.gathered_bytes(unit) for unit in self._maybe_gathered}
        self._maybe_gathered = {unit for unit, size in sizes.items() if size}
        self._gathered = max(self._gathered, sum(sizes.values()))

    def _before_update(self, optimizer, args, kwargs) -> None:
        updated = map(optimizer_parameter, self.model.parameters())
        gradients = [p.grad for p in updated if p.grad is not None]
        if gradients:
            self._gradients = max(self._gradients, storage_bytes(gradients))

    def _make_report(self) -> MemoryReport:
        if self._item_bytes is None:
            raise NearlinearError("nl.memory_report: no step has run inside the with block")
        now = runtime_of(self.model)
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [value for value in states if isinstance(value, torch.Tensor)]
        on_device = (t for t in tensors if t.device.type == now.device.type)
        blocks = [_elements(block) for root in self.roots for block in _blocks(root)]
        largest = max(sum(map(_elements, self.roots)) - sum(blocks), *blocks)
        mine = {
            "parameters": storage_bytes([*self.model.parameters(), *self.model.buffers()]),
            "gradients": self._gradients,
            "optimizer": storage_bytes(on_device),
            "activations": self._saved.peak["activations"],
            "logits": self._saved.peak["logits"],
            "gathered": self._gathered,
            "communication": communication_bytes(
                largest, self._item_bytes, now.config.prefetch_depth
            ),
        }
        if now.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(now.device)
            mine["other"] = max(0, peak - sum(mine.values()))
        return MemoryReport(mine, _maximum_over_ranks(mine, now.device))


def communication_bytes(largest: int, item_bytes: int, prefetch_depth: int) -> int:
    """Compute the bytes of communication buffers for the largest unit.

    Counts its gradients as computed and as reduced (float32), and the buffers of all all-gathers in
    flight.
    """
    gathers = 1 + prefetch_depth
    return largest * (item_bytes * (1 + gathers) + REDUCED_BYTES)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the local storages, each counted once."""
    storages = (local_tensor(tensor).untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _is_unit(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def _blocks(root: nn.Module) -> list[nn.Module]:
    """Return the outermost units below ``root``, in order."""
    found, inside = [], set()
    for module in root.modules():
        if module is not root and _is_unit(module) and module not in inside:
            found.append(module)
            inside |= set(module.modules())
    return found


def _elements(unit: nn.Module) -> int:
    """Return the gathered parameters of ``unit`` and its inner units."""
    inner = [module for module in unit.modules() if _is_unit(module)]
    return sum(p.numel() for module in inner for p in _torch.sharded_parameters(module))


def _maximum_over_ranks(mine: dict[str, int], device: torch.device) -> dict[str, int]:
    """Return the maximum of each part and of the total over all ranks. A collective call."""
    names = [name for name in PARTS if name in mine]
    sizes = [*(mine[name] for name in names), sum(mine.values())]
    most = torch.tensor(sizes, dtype=torch.int64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return dict(zip([*names, "total"], most.tolist(), strict=True))


@dataclass(frozen=True)
class _Storage:
    kind: str
    bytes: int
    alive: weakref.ref[torch.UntypedStorage]


class SavedTensors:
    """Counts the bytes saved for a backward pass while it is active.

    Each storage counts once, however many tensors of it are saved, from its first save until its
    memory is free. Storages of excluded tensors (parameters, buffers) do not count. Tensors saved
    inside inner hooks (selective checkpointing, offloading, recomputation) do not pass the hooks of
    this class: owners of such hooks report them to `observe`.
    """

    def __init__(self, kind: Callable[[], str]):
        """``kind``: returns the part that newly saved tensors belong to."""
        self.kind = kind
        self.peak: Counter[str] = Counter()
        """Most bytes of each kind at once."""
        self._now: Counter[str] = Counter()
        self._held: dict[int, _Storage] = {}
        self._excluded: set[int] = set()
        self._freed: deque[int] = deque()  # appended by whichever thread frees a storage
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    @property
    def now(self) -> Counter[str]:
        """Current bytes of each kind."""
        while self._freed:
            storage = self._held.pop(self._freed.popleft())
            self._now[storage.kind] -= storage.bytes
        return self._now

    def exclude(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do not count the storages of ``tensors``, also if they are reused later."""
        self._excluded |= {_torch.storage_of(local_tensor(tensor)) for tensor in tensors}

    def __enter__(self) -> SavedTensors:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self._hooks.__exit__(*error)

    def observe(self, tensor: torch.Tensor) -> None:
        """Count ``tensor``, which is on the device and saved for a backward pass."""
        storage, now = local_tensor(tensor).untyped_storage(), self.now
        identity = _torch.storage_of(local_tensor(tensor))
        if identity in self._held or identity in self._excluded:
            return
        freed, kind, size = self._freed, self.kind(), storage.nbytes()
        alive = weakref.ref(storage, lambda _: freed.append(identity))
        self._held[identity] = _Storage(kind, size, alive)
        now[kind] += size
        self.peak[kind] = max(self.peak[kind], now[kind])

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.observe(tensor)
        return tensor
