"""MiCS, part one: model states sharded within a subset of ranks and replicated across subsets.

Source: MiCS (Zhang et al., VLDB 2023), section 3.2, on PyTorch's ``fully_shard``. Every block is
its own unit, gathered just before use and freed after; embeddings, final norm and head stay in the
root unit, so that tied weights are one parameter of one unit. Experts that `nearlinear.transform`
has divided are units inside their blocks, sharded over the ranks that have the same ones. Gradients
come back averaged over all data ranks; `nearlinear.accumulate` adds the two-hop schedule.
"""

import dataclasses
import logging

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard

from .. import _torch, runtime
from ..config import Config
from ..errors import ConfigError
from . import fp8, joint, layout, loss_scale, optimizer_guard, optimizer_shards, overlap, schedule
from .blocks import find_blocks
from .delayed_init import materialise, require_built
from .expert import parallel_experts
from .kept import stays_gathered
from .pipeline import tied
from .pipeline.calls import Called, in_front
from .roots import roots_of

log = logging.getLogger(__name__)

COMPUTED_IN = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What blocks compute in, by `Config.precision`."""


def shard(
    model: nn.Module,
    *,
    blocks: list[nn.Module] | None = None,
    precision: str | None = None,
    reshard_after_forward: bool | None = None,
) -> nn.Module:
    """Shard ``model`` in place over this job's mesh and return it.

    ``blocks``: the units to gather one at a time (default: found, see `find_blocks`).
    ``precision``: ``"fp32"``, ``"bf16"`` or ``"fp16"`` (bfloat16 or float16 compute; float32 master
    weights and gradient reduction; float16 with a `loss_scale`); default: what the config says.
    ``reshard_after_forward``: free gathered parameters between forward and backward; default: where
    they are not used next, see `schedule`; True or False hold for all units. A model built under
    `delayed_init` gets its values here, one unit at a time. Raises ConfigError.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"nl.shard needs a torch.nn.Module, not {type(model).__name__}")
    require_built("nl.shard")
    now = runtime.current()
    asked = _with_precision(now.config, precision)
    asked.check_supported()
    if now.device.type == "cpu" and not _torch.shards_on_cpu():
        raise ConfigError(
            f"PyTorch {torch.__version__} cannot shard on the CPU: install 2.8 or newer"
        )
    if any(isinstance(root, FSDPModule) for root in roots_of(model)):
        raise ConfigError("the model is sharded already: call nl.shard once")
    _require_transformed(model, now)
    if asked.fp8 and not fp8.is_converted(model):
        raise ConfigError(
            "fp8 = true, but the model multiplies as before: call nl.convert_to_fp8(model) before "
            "nl.shard(model)"
        )
    if asked.shard_optimizer_state and now.mesh.replicate == 1 and now.rank == 0:
        log.warning(
            "shard_optimizer_state has no effect: there is one replica, so that its shards "
            "are all there is of the state"
        )
    if not isinstance(model, Called):
        model.__class__ = in_front(type(model), Called)
    if optimizer_shards.asked(now):
        model.__class__ = in_front(type(model), optimizer_shards.Sliced)
    policy = _policy(asked)
    with optimizer_guard.replacing(model):
        if hasattr(model, "_nearlinear_pipeline"):
            _shard_stages(model, now, policy, reshard_after_forward)
        else:
            _shard_whole(model, now, policy, reshard_after_forward, blocks)
    layout.mark(model)
    if optimizer_shards.asked(now):
        optimizer_shards.install(model, now)
    joint.install(model, _joints(model, now))
    if asked.fp16:
        loss_scale.install(model, asked)
    optimizer_guard.watch_optimizers()
    return model


def _shard_whole(model, now: runtime.Runtime, policy, reshard_after_forward, blocks) -> None:
    """Shard a model whose forward pass is this rank's; see `shard`."""
    blocks = find_blocks(model) if blocks is None else list(blocks)
    inside = set(model.modules())
    if any(block not in inside for block in blocks):
        raise ConfigError("nl.shard(model, blocks=...): a block is not a part of the model")
    beside = now.config.overlap_communication and overlap.possible(now, model, policy)
    mesh = now.device_mesh["shard"] if beside else shard_mesh(now)
    experts = _experts_by_unit(model, blocks)
    sizes = [sum(p.numel() for p in unit.parameters()) for unit in (model, *blocks)]
    sizes[0] -= sum(sizes[1:])
    free = reshard_after_forward is not False
    for unit in (*blocks, model):
        _place(model, unit, now)
        _shard_experts(experts[unit], now, policy, free, beside)
        freed = reshard_after_forward is True if unit is model else free
        fully_shard(
            unit,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=_offload(now),
            reshard_after_forward=freed,
        )
    inner = [unit for units in experts.values() for unit in units]
    units = {"sharing": [*blocks, model]}
    alone = inner if now.mesh.expert_sharing == 1 else []  # no rank shares its experts' states
    if inner and not alone:
        units["expert_sharing"] = inner
    gathered = policy.param_dtype or next(model.parameters()).dtype
    if now.device.type == "cpu":
        for unit in alone if beside else [*blocks, model, *inner]:
            unit.set_force_sum_reduction_for_comms(True)  # torch 2.8's gloo takes a mean for a sum
    if beside:
        overlap.gather_beside(model, units, now, gathered)
        model._nearlinear_reduction = overlap.reduce_beside(units, now)
    elif _torch.communicates_by_hooks():
        overlap.gather_in_stages(units, now, gathered)
    elif now.config.gather_dtype != "same":
        log.warning("gather_dtype has no effect: PyTorch %s has no hook for it", torch.__version__)
    if reshard_after_forward is None:
        depth, live = now.config.prefetch_depth, now.config.sdp_max_live_parameters
        model._nearlinear_schedule = schedule.arrange(
            model, blocks, sizes, depth, live, inside=experts
        )
    _torch.reduce_unused_parameters(model)


def _shard_stages(model, now: runtime.Runtime, policy, reshard_after_forward) -> None:
    """Shard a pipeline's stages, each by itself, with FSDP2's own communication.

    Micro-batches of a schedule come one after another, so that what is gathered stays, unless that
    is more than ``sdp_max_live_parameters`` and the schedule can do without, see `kept`.
    """
    engine = model._nearlinear_pipeline
    apart, live = engine.plan.schedule.apart, now.config.sdp_max_live_parameters
    if reshard_after_forward and apart:
        raise ConfigError(
            f"nl.shard(reshard_after_forward=True): pipeline = {engine.plan.name!r} finds "
            "gradients of weights in parameters that stay gathered: leave it out, or take another "
            "schedule"
        )
    if reshard_after_forward is None:
        held = sum(parameter.numel() for parameter in model.parameters())
        reshard_after_forward = not stays_gathered(held, live, apart)
        if apart and held > live:
            log.warning(
                "sdp_max_live_parameters = %d has no effect: pipeline = %r keeps this rank's %d "
                "parameters gathered",
                live,
                engine.plan.name,
                held,
            )
    for stage in roots_of(model):
        blocks = engine.blocks_of(stage)
        experts = _experts_by_unit(stage, blocks)
        for unit in (*blocks, stage):
            _place(stage, unit, now)
            _shard_experts(experts[unit], now, policy, reshard_after_forward, beside=False)
            fully_shard(
                unit,
                mesh=shard_mesh(now),
                mp_policy=policy,
                offload_policy=_offload(now),
                reshard_after_forward=reshard_after_forward,
            )
            if now.device.type == "cpu":  # torch 2.8's gloo sums where it is asked for a mean
                for each in (unit, *experts[unit]):
                    each.set_force_sum_reduction_for_comms(True)
        _torch.reduce_unused_parameters(stage)
        engine.adopt(stage)
    engine.dtype = policy.param_dtype or next(model.parameters()).dtype
    if now.config.gather_dtype != "same" or now.config.hierarchical_all_gather == "on":
        log.warning("gather_dtype and hierarchical_all_gather have no effect on a pipeline")


def _require_transformed(model: nn.Module, now: runtime.Runtime) -> None:
    """Raise ConfigError where a degree asks for what nobody has done to the model."""
    if now.mesh.pipeline > 1 and not hasattr(model, "_nearlinear_pipeline"):
        raise ConfigError(
            f"pipeline_parallel_degree = {now.mesh.pipeline}, but the model is whole: call "
            "nl.pipeline(model) before nl.shard(model)"
        )
    for axis in ("tensor", "context", "expert"):
        degree = getattr(now.mesh, axis)
        if degree > 1 and axis not in layout.of(model).axes:
            raise ConfigError(
                f"{axis}_parallel_degree = {degree}, but the model is not transformed: call "
                "nl.transform(model) before nl.shard(model)"
            )


def _joints(model: nn.Module, now: runtime.Runtime) -> list[joint.Joint]:
    """What several ranks have a part of the gradient of, each."""
    ties = tied.install(model, now) if hasattr(model, "_nearlinear_pipeline") else []
    if now.mesh.tensor == 1:
        return ties
    whole = [
        parameter
        for parameter in model.parameters()
        if all(cut.axis != "tensor" for cut in layout.cuts_of(parameter))
    ]
    return [joint.Joint(now.group("tensor"), whole), *ties]


def _place(model: nn.Module, unit: nn.Module, now: runtime.Runtime) -> None:
    """Put ``unit`` on this rank's device, with values where `delayed_init` left it without."""
    materialise(model, unit, now.device)
    tensors = (*unit.parameters(), *unit.buffers())
    if any(tensor.device != now.device for tensor in tensors):  # fake ones cannot be moved
        unit.to(now.device)


def shard_mesh(now: runtime.Runtime, experts: bool = False) -> DeviceMesh:
    """The mesh FSDP2 shards over: (replicate, shard), or (shard,) where it has nothing to do with
    replicas: there is one, or they are `optimizer_shards`' to bring together."""
    mesh = now.expert_mesh if experts else now.device_mesh
    alone = now.mesh.replicate == 1 or optimizer_shards.asked(now)
    return mesh["shard"] if alone else mesh["replicate", "shard"]


def _experts_by_unit(model: nn.Module, blocks: list[nn.Module]) -> dict[nn.Module, list]:
    """Divided experts, by the block or, outside of all, the model that they are in."""
    by_unit = {block: parallel_experts(block) for block in blocks}
    inside = {unit for units in by_unit.values() for unit in units}
    by_unit[model] = [unit for unit in parallel_experts(model) if unit not in inside]
    return by_unit


def _shard_experts(units: list[nn.Module], now, policy, free: bool, beside: bool) -> None:
    """Each of ``units`` over the ranks that have the same experts.

    Their inputs stay as they are: the block has cast the tokens, the router's weights are finer.
    """
    policy = dataclasses.replace(policy, cast_forward_inputs=False)
    ranks = now.mesh.expert_sharing
    for unit in units:
        # FSDP2 does replicas itself where there is nothing to reduce-scatter before
        mesh = now.expert_mesh["shard"] if beside and ranks > 1 else shard_mesh(now, experts=True)
        fully_shard(
            unit,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=_offload(now),
            reshard_after_forward=free,
            shard_placement_fn=lambda parameter: Shard(_dim_to_shard(parameter, ranks)),
        )


def _dim_to_shard(parameter: nn.Parameter, ranks: int) -> int:
    """The first dim that ``ranks`` divides: there are few experts, and padding them is memory."""
    return next((i for i, size in enumerate(parameter.shape) if size % ranks == 0), 0)


def _offload(now: runtime.Runtime) -> OffloadPolicy:
    """Where shards live: FSDP2 has them in host memory for an optimizer that updates them there."""
    if not now.config.offload_optimizer:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=now.device.type != "cpu")


def _with_precision(config: Config, precision: str | None) -> Config:
    """``config`` with ``precision`` in place of its own, if there is one."""
    if precision is None:
        return config
    if precision not in COMPUTED_IN:
        allowed = ", ".join(map(repr, COMPUTED_IN))
        raise ConfigError(f"precision = {precision!r}: allowed are {allowed}")
    return dataclasses.replace(config, bf16=precision == "bf16", fp16=precision == "fp16")


def _policy(config: Config) -> MixedPrecisionPolicy:
    if config.precision == "fp32":
        return MixedPrecisionPolicy()
    dtype = COMPUTED_IN[config.precision]
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
