"""What stands in front of a block's class, and what the blocks of one model have in common.

Names, checkpoints and ``isinstance`` stay as they were. A block that is recomputed by itself runs
again inside its own hooks: FSDP2 has gathered it for its backward pass anyway. Blocks that are
recomputed together run again with their hooks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

from ...errors import NearlinearError
from ..compile import Compiled
from .budget import Budget
from .offload import Hooks, Offload
from .recompute import recomputed
from .regions import Region
from .saved import Stays
from .selective import contexts
from .strategy import Strategy


@dataclass(eq=False)
class Synchronous:
    """PyTorch's own offload: every saved tensor, copied while the device waits."""

    pinned: bool

    @contextlib.contextmanager
    def saving(self, number: int, modules: list[nn.Module]) -> Iterator[Hooks]:
        hooks = save_on_cpu(pin_memory=self.pinned)
        with hooks:
            yield hooks.pack_hook, hooks.unpack_hook


@dataclass(eq=False)
class Activations:
    """What is done about the activations of a model's blocks on this rank."""

    blocks: list[nn.Module]
    strategy: Strategy | None = None
    budget: Budget | None = None
    regions: list[Region] = field(default_factory=list)
    offload: Offload | Synchronous | None = None
    shown: Callable[[torch.Tensor], None] | None = None
    """who wants to see, if anybody does, what is kept on the device for the backward pass"""

    def see(self, tensor: torch.Tensor) -> None:
        """``tensor`` is kept, out of sight of hooks around the model."""
        if self.shown is not None:
            self.shown(tensor)

    def begin(self, base: nn.Module, args: tuple, kwargs: dict) -> None:
        """Before a forward pass of what calls the blocks."""
        if not _trains(base):
            return
        if self.regions:
            asked = kwargs.get("output_hidden_states")
            own = getattr(getattr(base, "config", None), "output_hidden_states", False)
            if own if asked is None else asked:
                raise NearlinearError(
                    "output_hidden_states = True, but blocks that are recomputed together have "
                    "none in between: checkpoint activations with strategy 'each'"
                )
        if isinstance(self.offload, Offload):
            self.offload.begin_pass(base)

    def end(self, base: nn.Module, args: tuple, output) -> None:
        """After it."""
        if not _trains(base):
            return
        for region in self.regions:
            region.check_finished()
        if self.budget is not None:
            self.budget.decide()

    def run(self, block: nn.Module, number: int, forward: Callable, args: tuple, kwargs: dict):
        """``forward`` of ``block``, by itself."""

        def run(call):
            return forward(*call[0], **call[1])

        call = args, kwargs
        with self._saving(number, [block]) as hooks:
            if self.strategy is None or not (self.budget is None or self.budget.recomputes(number)):
                return run(call)
            if self.strategy.selective and isinstance(forward, Compiled):
                return forward.selective(*args, **kwargs)
            if self.budget is not None:
                run = self.budget.watched(number, block, run)
            kept = functools.partial(contexts, *hooks) if self.strategy.selective else None
            return recomputed(run, call, [block], self.see, kept)

    def run_together(self, region: Region, calls: list[tuple[tuple, dict]]):
        with self._saving(self.regions.index(region), region.blocks):
            return recomputed(region.run, calls, region.blocks, self.see)

    def _saving(self, number: int, modules: list[nn.Module]) -> AbstractContextManager[Hooks]:
        if self.offload is None:
            return contextlib.nullcontext((self._keep, Stays.take))
        return self.offload.saving(number, modules)

    def _keep(self, tensor: torch.Tensor) -> Stays:
        self.see(tensor)
        return Stays.of(tensor)


@dataclass(eq=False)
class Place:
    """Which of the blocks one is."""

    of: Activations
    number: int
    forward: Callable | None = None
    """the block's own, where that is not its class's: compiled, or patched by somebody"""
    region: Region | None = None
    position: int = 0
    """in the region"""


class Front:
    """In front of a block's class."""

    def __call__(self, *args, **kwargs):
        place = self._nearlinear_place
        region = place.region
        if region is None or region.running or not _trains(self):
            return super().__call__(*args, **kwargs)
        calls = region.take(place.position, *_prepared(self, args, kwargs))
        if calls is None:
            return region.hand_on(place.position)
        return place.of.run_together(region, calls)

    def forward(self, *args, **kwargs):
        place = self._nearlinear_place
        forward = place.forward or super().forward
        if place.region is not None or not _trains(self):
            return forward(*args, **kwargs)
        args, kwargs = _prepared(self, args, kwargs)
        return place.of.run(self, place.number, forward, args, kwargs)


def _trains(module: nn.Module) -> bool:
    return module.training and torch.is_grad_enabled()


def _prepared(block: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Arguments with hidden states first, and without a cache of keys and values.

    Training does not read one, and a block that runs again would write to it again. Raises
    NearlinearError.
    """
    if getattr(block, "gradient_checkpointing", False):
        raise NearlinearError(
            "the model's own gradient checkpointing is on, and nearlinear's too: call "
            "model.gradient_checkpointing_disable()"
        )
    if not args and "hidden_states" in kwargs:
        args, kwargs = (
            (kwargs["hidden_states"],),
            {k: v for k, v in kwargs.items() if k != "hidden_states"},
        )
    args = tuple(None if _is_cache(value) else value for value in args)
    kwargs = {key: None if _is_cache(value) else value for key, value in kwargs.items()}
    if kwargs.get("use_cache"):
        kwargs["use_cache"] = False
    return args, kwargs


def _is_cache(value) -> bool:
    """Whether it is an empty cache of Hugging Face's."""
    if not (hasattr(value, "get_seq_length") and hasattr(value, "update")):
        return False
    if value.get_seq_length():
        raise NearlinearError(
            "past_key_values with something in them, in training with activations recomputed or "
            "offloaded: put these tokens into the batch"
        )
    return True
