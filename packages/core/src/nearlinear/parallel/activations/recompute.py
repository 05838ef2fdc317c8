"""Run a piece of a model so that its activations are computed again in the backward pass.

Source: Chen et al. 2016, "Training deep nets with sublinear memory cost", by PyTorch's
non-reentrant `torch.utils.checkpoint`. Only tensors among the arguments are saved, each once; they
go through the saved-tensor hooks of whoever is around, which is how `offload` gets them. What it
saves when it runs again does not: PyTorch's own hooks keep that until it is used.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ... import _torch

See = Callable[[torch.Tensor], None]
Contexts = Callable[[], tuple[AbstractContextManager, AbstractContextManager]]


@dataclass(frozen=True)
class _Place:
    """Stands where a tensor stood."""

    number: int


class _Again:
    """Where it runs again; once more for every backward pass that needs it."""

    def __init__(self, inner: AbstractContextManager, parts: list[nn.Module], see: See):
        self.inner, self.parts, self.see, self.open = inner, parts, see, ExitStack()

    def __enter__(self):
        self.open.enter_context(_torch.recomputing(self.parts))
        self.open.enter_context(self.inner)
        self.open.enter_context(_torch.seeing_saved_tensors(self.see))

    def __exit__(self, *error):
        return self.open.__exit__(*error)


def recomputed(
    run: Callable, call, parts: list[nn.Module], see: See, contexts: Contexts | None = None
):
    """``run(call)``, whose activations are not kept. ``call`` is a tree with tensors in it.

    ``parts``: the modules that run. Random numbers are drawn again as they were. ``see`` is shown
    what is saved when it runs again; ``contexts`` makes what it runs in at first, and again.
    """
    tensors: dict[int, torch.Tensor] = {}
    numbers: dict[int, int] = {}

    def take_out(tensor: torch.Tensor) -> _Place:
        tensors[id(tensor)] = tensor
        return _Place(numbers.setdefault(id(tensor), len(numbers)))

    frame = _torch.map_tensors(take_out, call)

    def run_with(*given: torch.Tensor):
        return run(_torch.map_instances(_Place, lambda place: given[place.number], frame))

    def around():
        first, again = contexts() if contexts else (nullcontext(), nullcontext())
        return first, _Again(again, parts, see)

    return checkpoint(run_with, *tensors.values(), use_reentrant=False, context_fn=around)
