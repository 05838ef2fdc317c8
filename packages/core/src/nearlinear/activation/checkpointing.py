"""Activation checkpointing: of one block, of a group of blocks, and selective.

Source: Chen et al. 2016, "Training deep nets with sublinear memory cost", with PyTorch's
non-reentrant `torch.utils.checkpoint`. Only tensors among the arguments are saved, each once. They
pass the surrounding saved-tensor hooks, through which `offload` receives them. Tensors saved during
recomputation do not: PyTorch's hooks keep them until they are used.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from .. import _torch
from ..errors import NearlinearError


@dataclass(eq=False)
class CheckpointGroup:
    """Consecutive blocks that are recomputed as one; only the input of the first one is saved.

    The model calls the blocks one after the other. All calls but the last are recorded and return
    their hidden states unchanged; the last call runs all blocks, each with its own arguments and
    hooks. The backward pass recomputes all of them at once.
    """

    blocks: list[nn.Module]
    gives_tuple: list[bool]
    """For each block, whether it returns hidden states in a tuple."""
    live: int
    """Parameters that may stay gathered between recomputation and backward pass."""
    running: bool = False
    _recorded: list[tuple[tuple, dict]] = field(default_factory=list)
    _passed_on: torch.Tensor | None = None

    def collect(self, position: int, args: tuple, kwargs: dict) -> list | None:
        """Record the call of block ``position``; return all calls at the last block, else None.

        Raises NearlinearError if the model does not call the blocks directly one after the other.
        """
        if position == 0:
            self.clear()  # left by a failed forward pass
        if position != len(self._recorded):
            raise NearlinearError(
                f"activation checkpointing: block {position + 1} of a group of {len(self.blocks)} "
                f"was called after {len(self._recorded)} of them. Use "
                'strategy="each".'
            )
        if position and args[0] is not self._passed_on:
            raise NearlinearError(
                "activation checkpointing: the model changes hidden states between blocks "
                f"{position} and {position + 1} of a group. Use "
                'strategy="each".'
            )
        self._recorded.append((args if position == 0 else (None, *args[1:]), kwargs))
        if position < len(self.blocks) - 1:
            self._passed_on = args[0]
            return None
        calls = self._recorded
        self.clear()
        return calls

    def placeholder(self, position: int):
        """Return the hidden states unchanged, as the preliminary output of block ``position``."""
        hidden = self._passed_on
        return (hidden,) if self.gives_tuple[position] else hidden

    def clear(self) -> None:
        """Drop the recorded calls."""
        self._recorded, self._passed_on = [], None

    def check_finished(self) -> None:
        """Raise NearlinearError if the forward pass left out blocks of the group."""
        if self._recorded:
            called, self._recorded = len(self._recorded), []
            raise NearlinearError(
                f"activation checkpointing: the model called {called} of {len(self.blocks)} blocks "
                'of a group. Use strategy="each".'
            )

    def run(self, calls: list[tuple[tuple, dict]]):
        """Run all blocks with ``calls`` and return the output of the last one."""
        frees = _torch.in_backward() and self._size() > self.live
        self.running, output = True, None
        try:
            for block, (args, kwargs) in zip(self.blocks, calls, strict=True):
                if args[0] is None:
                    args = (output[0] if isinstance(output, tuple) else output, *args[1:])
                output = block(*args, **kwargs)
                if frees and block is not self.blocks[-1] and isinstance(block, FSDPModule):
                    block.reshard()  # gathered again for its backward pass
        finally:
            self.running = False
        return output

    def _size(self) -> int:
        return sum(p.numel() for block in self.blocks for p in block.parameters())


def make_groups(
    stacks: list[list[nn.Module]],
    size: int,
    gives_tuple: Callable[[nn.Module], bool],
    live: int,
) -> list[CheckpointGroup]:
    """Divide each of ``stacks`` into groups of ``size`` blocks; 0 makes one group per stack."""
    groups = []
    for blocks in stacks:
        step = size or len(blocks)
        for begin in range(0, len(blocks), max(1, step)):
            part = blocks[begin : begin + step]
            groups.append(CheckpointGroup(part, [gives_tuple(block) for block in part], live))
    return groups


# Selective checkpointing. Source: Korthikanti et al. 2022, "Reducing activation recomputation in
# large transformer models". Outputs of matrix products, attention and functional collectives
# (``_c10d_functional``) are kept; all other operators are cheap to recompute, and collectives that
# write into a buffer are repeated. PyTorch's ``create_selective_checkpoint_contexts`` requires an
# identical sequence of operators, which ranks that are threads cannot guarantee, supports a single
# backward pass, and hides the kept tensors from `offload`. Compiled blocks use it nevertheless,
# since it tells the compiler which outputs to keep.

KEPT_OPERATORS = (
    "mm addmm bmm baddbmm linear _grouped_mm _scaled_mm "
    "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_fused_attention_overrideable"
).split()


@functools.cache
def _kept_operators() -> frozenset:
    found = (getattr(torch.ops.aten, name, None) for name in KEPT_OPERATORS)
    return frozenset(operator.default for operator in found if operator is not None)


def _keeps(operator) -> bool:
    return operator in _kept_operators() or operator.namespace == "_c10d_functional"


class _KeepOutputs(_torch.TorchDispatchMode):
    """Dispatch mode that keeps outputs in the first run of a block."""

    def __init__(self, kept: dict[object, list], keep: Callable):
        super().__init__()
        self.kept, self.keep = kept, keep

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        output = operator(*args, **(kwargs or {}))
        if _keeps(operator):
            self.kept[operator].append(_torch.map_tensors(self._kept, output))
        return output

    def _kept(self, tensor: torch.Tensor) -> _KeptOutput:
        return _KeptOutput(self.keep(tensor))


class _KeptOutput:
    """A kept output, packed by a saved-tensor hook."""

    def __init__(self, held):
        self.held = held


class _ReuseOutputs(_torch.TorchDispatchMode):
    """Dispatch mode that returns the kept outputs in recomputation, in the order of the calls."""

    def __init__(self, kept: dict[object, list], give_back: Callable):
        super().__init__()
        self.kept, self.give_back, self.calls = kept, give_back, Counter()

    def __enter__(self):
        self.calls.clear()
        return super().__enter__()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if not _keeps(operator):
            return operator(*args, **(kwargs or {}))
        call = self.calls[operator]
        self.calls[operator] += 1
        return _torch.map_instances(
            _KeptOutput, lambda each: self.give_back(each.held).detach(), self.kept[operator][call]
        )


def selective_contexts(pack: Callable, unpack: Callable) -> tuple[_KeepOutputs, _ReuseOutputs]:
    """Return the contexts of the first run and of recomputation; arguments are hooks."""
    kept = defaultdict(list)
    return _KeepOutputs(kept, pack), _ReuseOutputs(kept, unpack)


def selective_contexts_compiled():
    """Return the contexts for ``torch.utils.checkpoint`` inside of compiled blocks."""
    return create_selective_checkpoint_contexts(_policy)


def _policy(context, operator, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _keeps(operator) else CheckpointPolicy.PREFER_RECOMPUTE


Observer = Callable[[torch.Tensor], None]
Contexts = Callable[[], tuple[AbstractContextManager, AbstractContextManager]]


@dataclass(frozen=True)
class _TensorSlot:
    """Placeholder for a tensor among the arguments."""

    index: int


class _Recomputation:
    """Context of recomputation; entered again by every backward pass that needs it."""

    def __init__(self, inner: AbstractContextManager, parts: list[nn.Module], observer: Observer):
        self.inner, self.parts, self.observer = inner, parts, observer
        self.stack = ExitStack()

    def __enter__(self):
        self.stack.enter_context(_torch.recomputing(self.parts))
        self.stack.enter_context(self.inner)
        self.stack.enter_context(_torch.seeing_saved_tensors(self.observer))

    def __exit__(self, *error):
        return self.stack.__exit__(*error)


def run_recomputed(
    run: Callable,
    call,
    parts: list[nn.Module],
    observer: Observer,
    contexts: Contexts | None = None,
):
    """Return ``run(call)`` and recompute its activations in the backward pass.

    Args:
        run: Function of ``call``. Its random numbers are repeated.
        call: Tree that contains tensors.
        parts: Modules that run.
        observer: Called with the tensors saved during recomputation.
        contexts: Makes the contexts of the first run and of recomputation.
    """
    tensors: dict[int, torch.Tensor] = {}
    indices: dict[int, int] = {}

    def take_out(tensor: torch.Tensor) -> _TensorSlot:
        tensors[id(tensor)] = tensor
        return _TensorSlot(indices.setdefault(id(tensor), len(indices)))

    frame = _torch.map_tensors(take_out, call)

    def run_with(*given: torch.Tensor):
        return run(_torch.map_instances(_TensorSlot, lambda slot: given[slot.index], frame))

    def make_contexts():
        first, again = contexts() if contexts else (nullcontext(), nullcontext())
        return first, _Recomputation(again, parts, observer)

    return checkpoint(run_with, *tensors.values(), use_reentrant=False, context_fn=make_contexts)
