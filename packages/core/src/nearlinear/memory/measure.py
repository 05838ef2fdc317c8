"""Measure where the memory of one optimizer step goes, on every rank.

Tensors are counted by their bytes: shards, gradients and optimizer states as the optimizer sees
them, saved tensors and gathered parameters at their peaks. Peaks of parts may come at other times;
their sum is what a step needs at most. On CUDA what is missing to the allocator's peak is
``other``: what operators need while they run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from .. import _torch, runtime
from ..errors import NearlinearError
from ..parallel import slices
from ..parallel.activations.door import show_kept
from ..parallel.layout import local
from ..parallel.roots import roots_of
from .report import NAMES, Report
from .saved import SavedTensors
from .savings import Facts, Parts, savings

REDUCED_BYTES = 4  # gradients are reduced in float32


class memory_report:  # noqa: N801 (a context manager, named as the verb it is)
    """Measure the step inside: ``with nl.memory_report(model, optimizer) as memory: ...``.

    ``model`` is sharded; the body runs one whole step, ``optimizer.step()`` included, a little
    slower than usual. Afterwards ``memory.report`` is the `Report`, and ``print(memory)`` shows its
    table. Leaving is a collective call of all ranks. Raises NearlinearError for a model that is not
    sharded, and where no forward pass has run inside.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.model, self.optimizer = model, optimizer
        self.roots = roots_of(model)
        if not all(isinstance(root, FSDPModule) for root in self.roots):
            raise NearlinearError("nl.memory_report needs a model sharded by nl.shard")
        self.units = [unit for root in self.roots for unit in root.modules() if _is_unit(unit)]
        self.report: Report | None = None
        self._saved = SavedTensors(self._saving)
        self._kind = "activations"
        self._again: list[AbstractContextManager] = []  # see what units that run again save
        self._open = set(self.units)  # units that may be gathered
        self._gathered = self._gradients = self._rows = 0
        self._gradient_bytes = REDUCED_BYTES
        self._entering: tuple | None = None  # shape and bytes of a number of hidden states
        self._flying = self._flown = 0  # micro-batches between forward and backward; the most
        self._handles: list = []

    def __enter__(self) -> memory_report:
        device = runtime.current().device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        for unit in self.units:
            self._handles.append(unit.register_forward_pre_hook(self._unit_begins))
            self._handles.append(unit.register_forward_hook(self._unit_ends, always_call=True))
        for root in self.roots:
            begins = root.register_forward_pre_hook(self._root_begins, with_kwargs=True)
            self._handles.append(begins)
            for block in _blocks(root)[:1]:
                enters = block.register_forward_pre_hook(self._enters, with_kwargs=True)
                self._handles.append(enters)
            for block in _blocks(root)[-1:]:
                self._handles.append(block.register_forward_hook(self._leaves))
        self._handles.append(self.optimizer.register_step_pre_hook(self._steps))
        self._saved.__enter__()
        show_kept(self.model, self._saved.see)
        return self

    def __exit__(self, kind, error, trace) -> None:
        show_kept(self.model, None)
        self._saved.__exit__(kind, error, trace)
        for handle in self._handles:
            handle.remove()
        if kind is None:
            self.report = self._made()

    def __str__(self) -> str:
        return str(self.report)

    def _root_begins(self, root, args, kwargs) -> None:
        self._kind = "activations"
        given = _torch.tensors_in([args, kwargs])
        self._rows = max([self._rows, *(tensor.shape[0] for tensor in given if tensor.dim())])
        if root is self.model:  # what a later stage of a pipeline is given are activations
            self._saved.leave_out(given)

    def _unit_begins(self, unit, args) -> None:
        self._saved.leave_out((*unit.parameters(), *unit.buffers()))  # gathered by now
        self._look(unit)
        if _torch.in_backward():
            seeing = _torch.seeing_saved_tensors(self._saved.see)
            seeing.__enter__()
            self._again.append(seeing)

    def _unit_ends(self, unit, args, output) -> None:
        if _torch.in_backward():
            self._again.pop().__exit__(None, None, None)
            return
        for tensor in _torch.tensors_in(output):
            if tensor.requires_grad:  # FSDP2 has a hook there that gathers, before this one
                tensor.register_hook(partial(self._look, unit))

    def _enters(self, block, args, kwargs) -> None:
        numbers = [t for t in _torch.tensors_in([args, kwargs]) if t.is_floating_point()]
        if not numbers or _torch.in_backward():
            return
        hidden = numbers[0]
        self._entering = hidden.shape, hidden.element_size()
        self._flown = max(self._flown, self._flying + 1)
        if hidden.requires_grad:
            self._flying += 1
            hidden.register_hook(self._came_back)

    def _came_back(self, gradient) -> None:
        self._flying -= 1

    def _leaves(self, block, args, output) -> None:
        self._kind = "logits"

    def _saving(self) -> str:
        """What is saved now; a backward pass saves where blocks run again."""
        return "activations" if _torch.in_backward() else self._kind

    def _look(self, unit, gradient=None) -> None:
        """See how much is gathered, now that ``unit`` is: at no other time does it become more."""
        self._open.add(unit)
        sizes = {unit: _torch.gathered_bytes(unit) for unit in self._open}
        self._open = {unit for unit, size in sizes.items() if size}
        self._gathered = max(self._gathered, sum(sizes.values()))

    def _steps(self, optimizer, args, kwargs) -> None:
        updated = map(slices.of, self.model.parameters())
        gradients = [p.grad for p in updated if p.grad is not None]
        if gradients:
            self._gradients = max(self._gradients, bytes_of(gradients))
            self._gradient_bytes = gradients[0].element_size()

    def _made(self) -> Report:
        if self._entering is None:
            raise NearlinearError("nl.memory_report: no step has run inside it")
        now, facts = runtime.current(), self._facts()
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [value for value in states if isinstance(value, torch.Tensor)]
        mine = {
            "parameters": bytes_of([*self.model.parameters(), *self.model.buffers()]),
            "gradients": self._gradients,
            "optimizer": bytes_of(t for t in tensors if t.device.type == now.device.type),
            "activations": self._saved.peak["activations"],
            "logits": self._saved.peak["logits"],
            "gathered": self._gathered,
            "communication": communication(facts),
        }
        if now.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(now.device)
            mine["other"] = max(0, peak - sum(mine.values()))
        return Report(mine, _most(mine, now.device), savings(mine, facts))

    def _facts(self) -> Facts:
        now, (shape, item_bytes) = runtime.current(), self._entering
        blocks = [block for root in self.roots for block in _blocks(root)]
        sizes = [_elements(block) for block in blocks]
        tokens = math.prod(shape[:-1]) * self._flown
        return Facts(
            config=now.config,
            mesh=now.mesh,
            units=(sum(map(_elements, self.roots)) - sum(sizes), *sizes),
            input_bytes=tokens * shape[-1] * item_bytes,
            products_bytes=tokens * item_bytes * (numbers_out(blocks[0]) + shape[-1]),
            rows=self._rows,
            item_bytes=item_bytes,
            gradient_bytes=self._gradient_bytes,
        )


def communication(facts: Facts) -> int:
    """Bytes of what travels, computed, not measured: for the largest unit its gradients as they
    were computed and as they are reduced (float32), and the buffers of the gathers under way."""
    largest, gathers = max(facts.units), 1 + facts.config.prefetch_depth
    return largest * (facts.item_bytes * (1 + gathers) + REDUCED_BYTES)


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Of the storages on this rank, each once."""
    storages = (local(tensor).untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _is_unit(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def _blocks(root: nn.Module) -> list[nn.Module]:
    """The outermost units below ``root``, in order."""
    found, inside = [], set()
    for module in root.modules():
        if module is not root and _is_unit(module) and module not in inside:
            found.append(module)
            inside |= set(module.modules())
    return found


def _elements(unit: nn.Module) -> int:
    """Parameters of ``unit`` and of the units in it, gathered."""
    inner = [module for module in unit.modules() if _is_unit(module)]
    return sum(p.numel() for module in inner for p in _torch.sharded_parameters(module))


def numbers_out(block: nn.Module) -> int:
    """Numbers that the matrices in ``block`` put out for one token, attention's not among them."""
    names = ("out_features", "nf")  # of linear layers, of GPT-2's
    found = (getattr(m, name, 0) for m in block.modules() for name in names)
    return sum(number for number in found if isinstance(number, int))


def _most(mine: Parts, device: torch.device) -> Parts:
    """The most that any rank has of each part, and together. A collective call."""
    names = [name for name in NAMES if name in mine]
    sizes = [*(mine[name] for name in names), sum(mine.values())]
    most = torch.tensor(sizes, dtype=torch.int64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return dict(zip([*names, "total"], most.tolist(), strict=True))
