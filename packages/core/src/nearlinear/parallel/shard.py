"""MiCS, part one: model states sharded within a subset of ranks and replicated across subsets.

Source: MiCS (Zhang et al., VLDB 2023), section 3.2, on PyTorch's ``fully_shard``. Every block is
its own unit, gathered just before use and freed after; embeddings, final norm and head stay in the
root unit, so that tied weights are one parameter of one unit. Gradients come back averaged over
all data ranks; `nearlinear.accumulate` adds the two-hop schedule.
"""

import logging

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from .. import runtime
from ..config import Config
from ..errors import ConfigError
from .blocks import find_blocks
from .delayed_init import materialise
from .optimizer_guard import watch_optimizers

log = logging.getLogger(__name__)


def shard(
    model: nn.Module,
    *,
    blocks: list[nn.Module] | None = None,
    precision: str | None = None,
    reshard_after_forward: bool | None = None,
) -> nn.Module:
    """Shard ``model`` in place over this job's mesh and return it.

    ``blocks``: the units to gather one at a time (default: found, see `find_blocks`).
    ``precision``: ``"fp32"`` or ``"bf16"`` (bfloat16 compute; float32 master weights and gradient
    reduction); default: what the config says. ``reshard_after_forward``: free gathered parameters
    between forward and backward; default: blocks yes, the root unit no, since backward starts
    there; True or False hold for both. A model built under `delayed_init` gets its values here,
    one unit at a time. Raises ConfigError.
    """
    now = runtime.current()
    _refuse_what_is_missing(now.config)
    if isinstance(model, FSDPModule):
        raise ConfigError("the model is sharded already: call nl.shard once")
    blocks = find_blocks(model) if blocks is None else list(blocks)
    mesh = shard_mesh(now)
    policy = _policy(precision or ("bf16" if now.config.bf16 else "fp32"))
    free = True if reshard_after_forward is None else reshard_after_forward
    for unit in blocks:
        _place(model, unit, now)
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=free)
    _place(model, model, now)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    if hasattr(model, "set_reduce_scatter_unused_params"):
        # parameters used by some micro-batches only: partial sums must keep one shape
        model.set_reduce_scatter_unused_params(True)
    watch_optimizers()
    return model


def _place(model: nn.Module, unit: nn.Module, now: runtime.Runtime) -> None:
    """Put ``unit`` on this rank's device, with values where `delayed_init` left it without."""
    materialise(model, unit, now.device, seed=now.config.random_seed)
    unit.to(now.device)


def shard_mesh(now: runtime.Runtime) -> DeviceMesh:
    """The mesh FSDP2 shards over: (replicate, shard), or (shard,) where there is one replica."""
    mesh = now.mesh.device_mesh(now.device.type)
    return mesh["replicate", "shard"] if now.mesh.replicate > 1 else mesh["shard"]


def _policy(precision: str) -> MixedPrecisionPolicy:
    if precision == "fp32":
        return MixedPrecisionPolicy()
    if precision == "bf16":
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    raise ConfigError(f"precision = {precision!r}: allowed are 'fp32' and 'bf16'")


def _refuse_what_is_missing(config: Config) -> None:
    """A setting this release cannot honour is an error, never silently ignored."""
    for name in (
        "tensor_parallel_degree context_parallel_degree expert_parallel_degree "
        "pipeline_parallel_degree"
    ).split():
        if getattr(config, name) > 1:
            raise ConfigError(
                f"{name} = {getattr(config, name)}: this release trains with sharded data "
                "parallelism only; set it to 1 and raise hybrid_shard_degree instead"
            )
    if config.fp16:
        raise ConfigError("fp16 = true: this release has no loss scaling; use bf16 = true")
    for name in (
        "sm_activation_offloading activation_loading_horizon microbatches allow_empty_shards "
        "fsdp_cache_flush_warnings"
    ).split():
        if getattr(config, name) != getattr(Config, name):
            log.warning("%s = %s has no effect in this release", name, getattr(config, name))
