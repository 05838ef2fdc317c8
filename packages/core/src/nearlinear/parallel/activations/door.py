"""`nl.checkpoint_activations` and `nl.offload_activations`: set up, in any order, once each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ... import runtime
from ...errors import ConfigError
from ..blocks import find_blocks
from ..pipeline.calls import in_front
from ..pipeline.stage import gives_tuple
from ..roots import roots_of
from . import regions
from .budget import Budget
from .copies import copier_for
from .front import Activations, Front, Place, Synchronous
from .offload import Offload, Peak
from .strategy import parse


def checkpoint_activations(
    model: nn.Module, strategy: str | int = "each", *, blocks: list[nn.Module] | None = None
) -> nn.Module:
    """Compute activations of ``model``'s blocks again in the backward pass; returns ``model``.

    ``strategy``, after SMP's names:

    ``"each"``: every block by itself; its input is kept.
    ``"group_N"``: N blocks in a row as one, and ``"contiguous"``: all of a rank's in a row. Fewer
    inputs are kept, and more is there at once while they are computed again: activations of N
    blocks, and their gathered parameters if that is at most ``sdp_max_live_parameters``; if not,
    all but the last are gathered once more.
    ``"selective"``: every block by itself, but outputs of matrix products and of attention are
    kept, so that little is computed twice.
    ``"12GiB"``, ``"500MiB"`` or a number of bytes: what saved activations of a micro-batch may take
    on a rank. The first micro-batch is measured, see `budget`; then as few blocks are recomputed as
    fit.

    Schedules of pipelines that split the backward pass (zero bubble) compute twice again. In
    training only, and with the same random numbers (dropout). After `nearlinear.transform` and
    `nearlinear.pipeline`, before or after `nearlinear.shard`. ``blocks``: default those of `shard`.
    Raises ConfigError, and NearlinearError from a forward pass that a strategy does not go with.
    """
    asked, now = parse(strategy), runtime.current()
    if getattr(_known(model), "strategy", None) is not None:
        raise ConfigError("activations are checkpointed already: call it once")
    found = _activations(model, blocks)
    if asked.together != 1:
        found.regions = _regions(model, found, asked.together, now.config.sdp_max_live_parameters)
    if asked.budget is not None:
        found.budget = Budget(asked.budget, now, len(found.blocks))
    found.strategy = asked
    _count(model, found)
    return model


def offload_activations(
    model: nn.Module,
    horizon: int | None = None,
    *,
    smallest: int = 64 * 2**10,
    blocks: list[nn.Module] | None = None,
) -> nn.Module:
    """Keep what ``model``'s blocks save for the backward pass in host memory; returns ``model``.

    With `checkpoint_activations` that is the input of every block or group that is recomputed,
    without, all of a block's saved tensors. They leave while the next blocks compute, and come back
    when the backward pass is ``horizon`` blocks away (default: ``activation_loading_horizon`` of
    the config), so that at most ``horizon`` + 1 blocks' are on the device, and those of a forward
    pass that is under way in a pipeline; the last that many of a forward pass stay, but in
    pipelines, where other micro-batches come between. Gradients do not change by a bit. Parameters,
    buffers, and storages of less than ``smallest`` bytes stay; what several tensors or blocks share
    moves once.

    On CUDA by two streams and pinned memory, elsewhere by a thread. With ``sm_activation_offloading
    = false`` PyTorch's ``save_on_cpu`` does it, which waits for every copy. `offload_peak` says
    what it came to. When to call it: as `checkpoint_activations`, before or after. Raises
    ConfigError.
    """
    now = runtime.current()
    horizon = now.config.activation_loading_horizon if horizon is None else horizon
    if horizon < 1:
        raise ConfigError(f"nl.offload_activations: horizon = {horizon}: must be at least 1")
    if getattr(_known(model), "offload", None) is not None:
        raise ConfigError("activations are offloaded already: call it once")
    found = _activations(model, blocks)
    if now.config.sm_activation_offloading:
        found.offload = Offload(horizon, smallest, now.device, copier_for(now.device), found.see)
    else:
        found.offload = Synchronous(pinned=now.device.type == "cuda")
    _count(model, found)
    return model


def offload_peak(model: nn.Module, *, begin_anew: bool = False) -> Peak:
    """The most that was on the device at once of what `offload_activations` moves, on this rank.

    Since the beginning, or the last call with ``begin_anew``. ConfigError where nothing is
    offloaded, or PyTorch's own offload does it.
    """
    offload = getattr(_known(model), "offload", None)
    if not isinstance(offload, Offload):
        raise ConfigError("nothing is counted: call nl.offload_activations(model) first")
    found = offload.peak
    if begin_anew:
        offload.forget_peak()
    return found


def show_kept(model: nn.Module, see: Callable[[torch.Tensor], None] | None) -> None:
    """Show ``see`` what is kept on the device for the backward pass from now on, None: nobody.

    That is what hooks on saved tensors around the model do not see: outputs that ``"selective"``
    keeps, what is saved by blocks that run again, what offload leaves there and brings back.
    """
    found = _known(model)
    if found is not None:
        found.shown = see


def _known(model: nn.Module) -> Activations | None:
    return getattr(model, "_nearlinear_activations", None)


def _activations(model: nn.Module, blocks: list[nn.Module] | None) -> Activations:
    """Those of ``model``, made on first use. Raises ConfigError."""
    found = _known(model)
    if found is not None:
        if blocks is not None and list(blocks) != found.blocks:
            raise ConfigError(
                "blocks: give the same to checkpoint_activations and offload_activations"
            )
        return found
    if not isinstance(model, nn.Module):
        raise ConfigError(f"activations are of a torch.nn.Module, not of a {type(model).__name__}")
    _refuse_others(model)
    found = Activations([block for stack in _stacks(model, blocks) for block in stack])
    for number, block in enumerate(found.blocks):
        block._nearlinear_place = Place(found, number, vars(block).pop("forward", None))
        block.__class__ = in_front(type(block), Front)
    for root in roots_of(model):
        base = getattr(root, "base_model", root)
        base.register_forward_pre_hook(found.begin, with_kwargs=True)
        base.register_forward_hook(found.end)
    model._nearlinear_activations = found
    return found


def _refuse_others(model: nn.Module) -> None:
    """Raise ConfigError where somebody else recomputes activations."""
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise ConfigError(
            "the model's own gradient checkpointing is on: call "
            "model.gradient_checkpointing_disable() before"
        )
    if any("_checkpoint_wrapped_module" in name for name, _ in model.named_modules()):
        raise ConfigError(
            "the model's blocks are in PyTorch's checkpoint_wrapper already: leave that out"
        )


def _stacks(model: nn.Module, blocks: list[nn.Module] | None) -> list[list[nn.Module]]:
    """Blocks in a row, of each of a pipeline's stages on this rank, or of the model."""
    if blocks is not None:
        inside = set(model.modules())
        if not all(block in inside for block in blocks):
            raise ConfigError("blocks: one is not a part of the model")
        return [list(blocks)]
    engine = getattr(model, "_nearlinear_pipeline", None)
    if engine is None:
        return [find_blocks(model)]
    return [engine.blocks_of(stage) for stage in roots_of(model)]


def _regions(model: nn.Module, found: Activations, together: int, live: int) -> list:
    stacks = [found.blocks] if not hasattr(model, "_nearlinear_pipeline") else _stacks(model, None)
    made = regions.cut(stacks, together, lambda block: gives_tuple(_beneath(block)), live)
    for region in made:
        for position, block in enumerate(region.blocks):
            place = block._nearlinear_place
            place.region, place.position = region, position
    return made


def _beneath(block: nn.Module) -> type:
    """The class that `Front` stands before."""
    line = type(block).__mro__
    return line[line.index(Front) + 1]


def _count(model: nn.Module, found: Activations) -> None:
    """Tell the offload how many blocks, or groups, a forward pass has."""
    if isinstance(found.offload, Offload) and not hasattr(model, "_nearlinear_pipeline"):
        found.offload.last = len(found.regions or found.blocks)
