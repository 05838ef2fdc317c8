"""What selective recomputation keeps: outputs of matrix products, of attention, and of collectives.

Source of the idea: Korthikanti et al. 2022, "Reducing activation recomputation in large transformer
models". All else (norms, activation functions, dropout) is cheap to compute again. Collectives are
kept where they are functions of their input (``_c10d_functional``); those that write into a buffer
are repeated. PyTorch's ``create_selective_checkpoint_contexts`` does the same, but wants to see
every operator again, which ranks that are threads cannot promise (one of them copies for others),
serves one backward pass, and keeps out of `offload`'s sight what it keeps. A compiled block has
none of these troubles: there it is PyTorch's, which tells the compiler what to keep.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ... import _torch

KEPT = (
    "mm addmm bmm baddbmm linear _grouped_mm _scaled_mm "
    "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_fused_attention_overrideable"
).split()


@functools.cache
def _kept_operators() -> frozenset:
    found = (getattr(torch.ops.aten, name, None) for name in KEPT)
    return frozenset(operator.default for operator in found if operator is not None)


def _keeps(operator) -> bool:
    return operator in _kept_operators() or operator.namespace == "_c10d_functional"


class _Keeping(_torch.TorchDispatchMode):
    """Keeps outputs while a block runs."""

    def __init__(self, kept: dict[object, list], keep: Callable):
        super().__init__()
        self.kept, self.keep = kept, keep

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        output = operator(*args, **(kwargs or {}))
        if _keeps(operator):
            self.kept[operator].append(_torch.map_tensors(self._kept, output))
        return output

    def _kept(self, tensor: torch.Tensor) -> _Output:
        return _Output(self.keep(tensor))


class _Output:
    """A kept output, as whoever keeps it has it."""

    def __init__(self, held):
        self.held = held


class _Using(_torch.TorchDispatchMode):
    """Gives them back when it runs again, in the order of each operator's calls."""

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
            _Output, lambda each: self.give_back(each.held).detach(), self.kept[operator][call]
        )


def contexts(keep: Callable, give_back: Callable) -> tuple[_Keeping, _Using]:
    """What a block runs in, at first and again. ``keep``, ``give_back``: hooks, see `offload`."""
    kept = defaultdict(list)
    return _Keeping(kept, keep), _Using(kept, give_back)


def contexts_of_graphs():
    """The same for ``torch.utils.checkpoint`` inside what is compiled."""
    return create_selective_checkpoint_contexts(_policy)


def _policy(context, operator, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _keeps(operator) else CheckpointPolicy.PREFER_RECOMPUTE
