"""Interception of block calls, and the activation policy that the blocks of a model share.

A mixin class intercepts the calls of a block, so parameter names, checkpoints and ``isinstance``
checks do not change. A block that is recomputed by itself runs again inside of its own hooks, since
FSDP2 has gathered it for its backward pass. Blocks that are recomputed as a group run again
including their hooks.
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

from ..config.activation_strategy import ActivationStrategy
from ..errors import NearlinearError
from ..fsdp.compile import CompiledForward
from ..fsdp.model_state import model_state
from .checkpointing import (
    CheckpointGroup,
    run_recomputed,
    selective_contexts,
    selective_contexts_compiled,
)
from .memory_budget import Budget
from .offload import Hooks, Offload
from .saved_tensors import KeptTensor


@dataclass(eq=False)
class SaveOnCpu:
    """PyTorch's ``save_on_cpu``, which copies every saved tensor while the device waits."""

    pinned: bool

    @contextlib.contextmanager
    def saving(self, number: int, modules: list[nn.Module]) -> Iterator[Hooks]:
        hooks = save_on_cpu(pin_memory=self.pinned)
        with hooks:
            yield hooks.pack_hook, hooks.unpack_hook


@dataclass(eq=False)
class ActivationPolicy:
    """Checkpointing and offload of the blocks of a model on this rank."""

    blocks: list[nn.Module]
    strategy: ActivationStrategy | None = None
    budget: Budget | None = None
    groups: list[CheckpointGroup] = field(default_factory=list)
    block_info: dict[nn.Module, BlockInfo] = field(default_factory=dict)
    offload: Offload | SaveOnCpu | None = None
    observer: Callable[[torch.Tensor], None] | None = None
    """Called with each activation that stays on the device for the backward pass."""

    def observe(self, tensor: torch.Tensor) -> None:
        """Report a kept tensor that saved-tensor hooks around the model do not see."""
        if self.observer is not None:
            self.observer(tensor)

    def begin(self, base: nn.Module, args: tuple, kwargs: dict) -> None:
        """Pre-forward hook of the module that calls the blocks."""
        if not _trains(base):
            return
        if self.groups:
            requested = kwargs.get("output_hidden_states")
            if requested is None:
                requested = getattr(getattr(base, "config", None), "output_hidden_states", False)
            if requested:
                raise NearlinearError(
                    "output_hidden_states = True is not supported with blocks that are recomputed "
                    "as a group. Use strategy 'each'."
                )
        if isinstance(self.offload, Offload):
            self.offload.begin_pass(base)

    def end(self, base: nn.Module, args: tuple, output) -> None:
        """Forward hook of the module that calls the blocks."""
        if not _trains(base):
            return
        for group in self.groups:
            group.check_finished()
        if self.budget is not None:
            self.budget.decide()

    def run(self, block: nn.Module, number: int, forward: Callable, args: tuple, kwargs: dict):
        """Run ``forward`` of one block under the policy."""

        def run(call):
            return forward(*call[0], **call[1])

        call = args, kwargs
        with self._saving(number, [block]) as hooks:
            if self.strategy is None or not (self.budget is None or self.budget.recomputes(number)):
                return run(call)
            if self.strategy.selective and isinstance(forward, CompiledForward):
                return forward.recomputing(selective_contexts_compiled)(*args, **kwargs)
            if self.budget is not None:
                run = self.budget.measured(number, block, run)
            contexts = None
            if self.strategy.selective:
                contexts = functools.partial(selective_contexts, *hooks)
            return run_recomputed(run, call, [block], self.observe, contexts)

    def run_group(self, group: CheckpointGroup, calls: list[tuple[tuple, dict]]):
        """Run a group of blocks, to be recomputed as one."""
        with self._saving(self.groups.index(group), group.blocks):
            return run_recomputed(group.run, calls, group.blocks, self.observe)

    def _saving(self, number: int, modules: list[nn.Module]) -> AbstractContextManager[Hooks]:
        if self.offload is None:
            hooks: Hooks = self._keep, _take_kept
            return contextlib.nullcontext(hooks)
        return self.offload.saving(number, modules)

    def _keep(self, tensor: torch.Tensor) -> KeptTensor:
        self.observe(tensor)
        return KeptTensor.from_tensor(tensor)


def _take_kept(kept: object) -> torch.Tensor:
    assert isinstance(kept, KeptTensor)
    return kept.take()


@dataclass(eq=False)
class BlockInfo:
    """Position of one block, and its policy."""

    policy: ActivationPolicy
    number: int
    """Index among the blocks of the model."""
    forward: Callable | None = None
    """``forward`` of the instance, if it differs from that of its class (compiled or patched)."""
    group: CheckpointGroup | None = None
    position: int = 0
    """Index in the group."""


class CheckpointedBlock(nn.Module):
    """Mixin that stands before the class of a block and applies its activation policy."""

    def __call__(self, *args, **kwargs):
        info = _info_of(self)
        group = info.group
        if group is None or group.running or not _trains(self):
            return super().__call__(*args, **kwargs)
        calls = group.collect(info.position, *_prepare_arguments(self, args, kwargs))
        if calls is None:
            return group.placeholder(info.position)
        return info.policy.run_group(group, calls)

    def forward(self, *args, **kwargs):
        info = _info_of(self)
        forward = info.forward or super().forward
        if info.group is not None or not _trains(self):
            return forward(*args, **kwargs)
        args, kwargs = _prepare_arguments(self, args, kwargs)
        return info.policy.run(self, info.number, forward, args, kwargs)


def _info_of(block: nn.Module) -> BlockInfo:
    policy = model_state(block).activations
    assert isinstance(policy, ActivationPolicy)
    return policy.block_info[block]


def _trains(module: nn.Module) -> bool:
    return module.training and torch.is_grad_enabled()


def _prepare_arguments(block: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Move hidden states to the first argument and remove a cache of keys and values.

    Training does not read the cache, and recomputation would write to it twice. Raises
    NearlinearError for a cache that is not empty.
    """
    if getattr(block, "gradient_checkpointing", False):
        raise NearlinearError(
            "the model's own gradient checkpointing is on beside nearlinear's. Call "
            "model.gradient_checkpointing_disable()."
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
    """Return whether ``value`` is an empty Hugging Face cache of keys and values."""
    if not (hasattr(value, "get_seq_length") and hasattr(value, "update")):
        return False
    if value.get_seq_length():
        raise NearlinearError(
            "past_key_values must be empty in training with activation checkpointing or offload. "
            "Put these tokens into the batch."
        )
    return True
