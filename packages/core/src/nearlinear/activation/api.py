"""`nl.checkpoint_activations` and `nl.offload_activations`; call each once, in any order."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ..config.activation_strategy import parse_strategy
from ..errors import ConfigError
from ..fsdp.model_state import (
    find_blocks,
    fsdp_roots,
    mixin_class,
    model_state,
    runtime_of,
    set_model_state,
)
from ..pipeline_parallel.stage import returns_tuple
from . import checkpointing
from .host_buffer import copier_for
from .memory_budget import Budget
from .offload import Offload, OffloadStats
from .wrapper import ActivationPolicy, BlockInfo, CheckpointedBlock, SaveOnCpu


def checkpoint_activations(
    model: nn.Module, strategy: str | int = "each", *, blocks: list[nn.Module] | None = None
) -> nn.Module:
    """Recompute the activations of the blocks of ``model`` in the backward pass.

    Example::

        nl.checkpoint_activations(model, "selective")

    Recomputation happens in training only and repeats the random numbers of dropout. Pipeline
    schedules that split the backward pass (zero bubble) recompute twice. Call this function after
    `nearlinear.transform` and `nearlinear.pipeline`, before or after `nearlinear.shard`.

    Args:
        model: The model.
        strategy: One of, in SMP's names:

            - ``"each"``: recompute every block by itself from its saved input.
            - ``"group_N"``: recompute N consecutive blocks as one; ``"contiguous"``: all
              consecutive blocks of a rank. Fewer inputs are saved. During recomputation the
              activations of N blocks exist at once, and so do their gathered parameters if they fit
              in ``memory_budget``; otherwise all but the last block are gathered twice.
            - ``"selective"``: recompute every block, but save the outputs of matrix products and
              attention.
            - ``"12GiB"``, ``"500MiB"`` or a number of bytes: limit of the saved activations of a
              micro-batch on a rank. The first micro-batch is measured, and as few blocks as
              possible are recomputed, see `memory_budget`.
        blocks: Blocks of the model; defaults to those of `shard`.

    Returns:
        ``model``.

    Raises:
        ConfigError: The strategy is invalid, or activations are checkpointed already.
        NearlinearError: Raised by a forward pass that the strategy does not support.
    """
    parsed, now = parse_strategy(strategy), runtime_of(model)
    if getattr(_known(model), "strategy", None) is not None:
        raise ConfigError("activations are checkpointed already; call it once")
    found = _policy(model, blocks)
    if parsed.group_size != 1:
        live = now.config.live_parameters
        found.groups = _groups(model, found, parsed.group_size, live)
    if parsed.budget is not None:
        found.budget = Budget(parsed.budget, now, len(found.blocks))
    found.strategy = parsed
    _set_block_count(model, found)
    return model


def offload_activations(
    model: nn.Module,
    horizon: int | None = None,
    *,
    smallest: int = 64 * 2**10,
    blocks: list[nn.Module] | None = None,
) -> nn.Module:
    """Keep tensors saved for the backward pass in host memory.

    Example::

        nl.offload_activations(nl.checkpoint_activations(model))

    With `checkpoint_activations` the saved tensors are the inputs of the recomputed blocks or
    groups; without it, all saved tensors of the blocks. They are copied out while the next blocks
    compute, and prefetched when the backward pass is ``horizon`` blocks away. At most ``horizon`` +
    1 blocks have saved tensors on the device, besides those of a forward pass in flight in a
    pipeline. The last blocks of a forward pass stay on the device, except in pipelines, where other
    micro-batches follow. Gradients are bit-identical. Parameters and buffers stay. Storage that
    several tensors or blocks share moves once.

    Copies use two streams and pinned memory on CUDA, and a thread elsewhere. With
    ``sm_activation_offloading = false``, PyTorch's ``save_on_cpu`` is used, which waits for every
    copy. `activation_offload_stats` returns the peaks. Call this function when
    `checkpoint_activations` may be called, before or after it.

    Args:
        model: The model.
        horizon: Defaults to ``activation_loading_horizon`` of the config.
        smallest: Bytes; smaller storages stay on the device.
        blocks: Blocks of the model; defaults to those of `shard`.

    Returns:
        ``model``.

    Raises:
        ConfigError: ``horizon`` is invalid, or activations are offloaded already.
    """
    now = runtime_of(model)
    horizon = now.config.activation_loading_horizon if horizon is None else horizon
    if horizon < 1:
        raise ConfigError(f"nl.offload_activations: horizon = {horizon}: must be at least 1")
    if getattr(_known(model), "offload", None) is not None:
        raise ConfigError("activations are offloaded already. Call nl.offload_activations once.")
    found = _policy(model, blocks)
    if now.config.sm_activation_offloading:
        found.offload = Offload(
            horizon, smallest, now.device, copier_for(now.device), found.observe
        )
    else:
        found.offload = SaveOnCpu(pinned=now.device.type == "cuda")
    _set_block_count(model, found)
    return model


def activation_offload_stats(model: nn.Module, *, reset: bool = False) -> OffloadStats:
    """Return the peaks of activation offload on this rank since the start or the last reset.

    Example::

        nl.activation_offload_stats(model).host_nbytes

    Raises ConfigError if nothing is offloaded, or if PyTorch's ``save_on_cpu`` is used.
    """
    offload = getattr(_known(model), "offload", None)
    if not isinstance(offload, Offload):
        raise ConfigError("nothing is counted. Call nl.offload_activations(model) first.")
    stats = offload.stats
    if reset:
        offload.reset_stats()
    return stats


def observe_kept_tensors(model: nn.Module, observer: Callable[[torch.Tensor], None] | None) -> None:
    """Call ``observer`` with each tensor kept on the device for the backward pass; None stops it.

    Covers tensors that saved-tensor hooks around the model do not see: outputs kept by
    ``"selective"``, tensors saved during recomputation, and tensors that offload keeps or returns.
    """
    found = _known(model)
    if found is not None:
        found.observer = observer


def _known(model: nn.Module) -> ActivationPolicy | None:
    found = model_state(model).activations
    assert found is None or isinstance(found, ActivationPolicy)
    return found


def _policy(model: nn.Module, blocks: list[nn.Module] | None) -> ActivationPolicy:
    """Return the activation policy of ``model``, created on first use. Raises ConfigError."""
    found = _known(model)
    if found is not None:
        if blocks is not None and list(blocks) != found.blocks:
            raise ConfigError(
                "pass the same blocks to checkpoint_activations and offload_activations"
            )
        return found
    if not isinstance(model, nn.Module):
        raise ConfigError(f"expected a torch.nn.Module, got a {type(model).__name__}")
    _check_other_checkpointing(model)
    found = ActivationPolicy([block for stack in _stacks(model, blocks) for block in stack])
    for number, block in enumerate(found.blocks):
        found.block_info[block] = BlockInfo(found, number, vars(block).pop("forward", None))
        set_model_state(block, model_state(model))
        block.__class__ = mixin_class(type(block), CheckpointedBlock)
    for root in fsdp_roots(model):
        base = getattr(root, "base_model", root)
        base.register_forward_pre_hook(found.begin, with_kwargs=True)
        base.register_forward_hook(found.end)
    model_state(model).activations = found
    return found


def _check_other_checkpointing(model: nn.Module) -> None:
    """Raise ConfigError if another mechanism recomputes activations."""
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise ConfigError(
            "the model's own gradient checkpointing is on. Call "
            "model.gradient_checkpointing_disable() first."
        )
    if any("_checkpoint_wrapped_module" in name for name, _ in model.named_modules()):
        raise ConfigError(
            "the model's blocks are wrapped in PyTorch's checkpoint_wrapper already. Remove it."
        )


def _stacks(model: nn.Module, blocks: list[nn.Module] | None) -> list[list[nn.Module]]:
    """Return the consecutive blocks of each pipeline stage on this rank, or of the model."""
    if blocks is not None:
        inside = set(model.modules())
        if not all(block in inside for block in blocks):
            raise ConfigError("blocks: one of them is not a part of the model")
        return [list(blocks)]
    pipeline = model_state(model).pipeline
    if pipeline is None:
        return [find_blocks(model)]
    return [pipeline.blocks_of(stage) for stage in fsdp_roots(model)]


def _groups(model: nn.Module, found: ActivationPolicy, size: int, live: int) -> list:
    stacks = [found.blocks] if model_state(model).pipeline is None else _stacks(model, None)
    groups = checkpointing.make_groups(
        stacks, size, lambda block: returns_tuple(_original_class(block)), live
    )
    for group in groups:
        for position, block in enumerate(group.blocks):
            info = found.block_info[block]
            info.group, info.position = group, position
    return groups


def _original_class(block: nn.Module) -> type:
    """Return the class of ``block`` without the mixin `CheckpointedBlock`."""
    classes = type(block).__mro__
    return classes[classes.index(CheckpointedBlock) + 1]


def _set_block_count(model: nn.Module, found: ActivationPolicy) -> None:
    """Set the number of blocks, or groups, of a forward pass in the offload."""
    if isinstance(found.offload, Offload) and model_state(model).pipeline is None:
        found.offload.block_count = len(found.groups or found.blocks)
