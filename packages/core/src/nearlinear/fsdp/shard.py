"""Sharded model states: `nl.shard`, on PyTorch's ``fully_shard``.

Source: MiCS (Zhang et al. 2022, arXiv:2205.00119): model states are sharded within a subset of the
ranks and replicated across subsets. Every block is a unit of its own, gathered just before use and
freed after it. Embeddings, final norm and head stay in the root unit, so that tied weights are one
parameter of one unit. Units that a `ShardingExtension` names (experts divided by
`nearlinear.transform`) are nested in the blocks and sharded over the ranks that hold the same ones.
Gradients are averages over all data ranks; `nearlinear.accumulate` adds the two-hop schedule.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

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

from .. import _torch
from ..config.parallel import ParallelConfig, load
from ..distributed import runtime as runtimes
from ..distributed.mesh import dim_to_shard
from ..distributed.runtime import Runtime
from ..errors import ConfigError
from .accumulate import guard_optimizers, marking_replaced_parameters
from .call_interception import make_interceptable
from .clip_grad import clip_in_optimizer_steps
from .deferred_init import materialize, require_built
from .loss_scaler import install_loss_scaler
from .model_state import (
    find_blocks,
    fsdp_roots,
    label_parameters,
    model_state,
    tied_blocks,
)
from .optimizer_state import install_optimizer_slices, shards_optimizer_state
from .overlap import (
    can_overlap,
    enable_async_all_gather,
    enable_overlapped_reduction,
    set_staged_all_gather,
)
from .partial_gradients import install_partial_gradients
from .prefetch import plan_retention, set_prefetch_schedule, stage_stays_gathered

log = logging.getLogger(__name__)

COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtype in which blocks compute, by `ParallelConfig.precision`."""


def shard(
    model: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    config: ParallelConfig | dict[str, Any] | str | os.PathLike[str] | None = None,
    blocks: list[nn.Module] | None = None,
    precision: str | None = None,
    reshard_after_forward: bool | None = None,
) -> nn.Module:
    """Shard ``model`` in place and return it. A collective call of all ranks of the mesh.

    After `nl.init` the model is sharded over the job's mesh::

        nl.init({"hybrid_shard_degree": 8, "bf16": True})
        model = nl.shard(model)

    With ``mesh`` no `nl.init` is needed, and ``model`` may be a part of a larger model::

        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard"))
        model = nl.shard(model, mesh=mesh, config={"bf16": True})

    The other kinds of parallelism need `nl.init`.

    A model built under `deferred_init` gets its values here, one unit at a time.

    Args:
        mesh: Ranks to shard over, with the dims ("shard",) or ("replicate", "shard").
        config: Settings for ``mesh``, as in `nl.init`. The mesh determines the degrees.
        blocks: Units to gather one at a time; default `find_blocks`.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``: dtype of the computation, with float32
            master weights and gradient reduction, and a loss scale in float16. Default: the
            config's.
        reshard_after_forward: Free the parameters of a unit between forward and backward pass.
            Default: where they are not used next, see `prefetch`.

    Raises ConfigError.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"nl.shard needs a torch.nn.Module, not {type(model).__name__}")
    require_built("nl.shard")
    runtime = _runtime_for(mesh, config)
    settings = _with_precision(runtime.config, precision)
    settings.check_supported()
    if runtime.device.type == "cpu" and not _torch.shards_on_cpu():
        raise ConfigError(
            f"PyTorch {torch.__version__} cannot shard on the CPU: install 2.8 or newer"
        )
    if any(isinstance(root, FSDPModule) for root in fsdp_roots(model)):
        raise ConfigError("the model is sharded already: call nl.shard once")
    state = model_state(model)
    _check_transformed(model, runtime)
    if settings.fp8 and not state.converted_to_fp8:
        raise ConfigError(
            "fp8 = true, but the model does not multiply in float8: call nl.convert_to_fp8(model) "
            "before nl.shard(model)"
        )
    if settings.shard_optimizer_state and runtime.mesh.replicate == 1 and runtime.rank == 0:
        log.warning(
            "shard_optimizer_state has no effect: with one replica the optimizer state is sharded "
            "already"
        )
    state.runtime = runtime
    policy = _precision_policy(settings)
    with marking_replaced_parameters(model):
        if state.pipeline is not None:
            _shard_stages(model, runtime, policy, reshard_after_forward)
        else:
            _shard_model(model, runtime, policy, reshard_after_forward, blocks)
            make_interceptable(model)
    label_parameters(model)
    if shards_optimizer_state(runtime):
        install_optimizer_slices(model, runtime)
    install_partial_gradients(model, runtime)
    if settings.fp16:
        install_loss_scaler(model, settings)
    guard_optimizers()
    if settings.sdp_gradient_clipping:
        clip_in_optimizer_steps()
    return model


def _runtime_for(
    mesh: DeviceMesh | None, config: ParallelConfig | dict | str | os.PathLike | None
) -> Runtime:
    """Return the runtime of `nl.init`, or a new one for ``mesh``."""
    if mesh is not None:
        return Runtime.from_device_mesh(mesh, load(config))
    if config is not None:
        raise ConfigError(
            "nl.shard(config=...) without mesh=: pass the mesh too, or give the config to nl.init"
        )
    return runtimes.current()


def _shard_model(
    model: nn.Module,
    runtime: Runtime,
    policy: MixedPrecisionPolicy,
    reshard_after_forward: bool | None,
    blocks: list[nn.Module] | None,
) -> None:
    """Shard a model whose whole forward pass runs on this rank."""
    state, settings = model_state(model), runtime.config
    blocks = find_blocks(model) if blocks is None else list(blocks)
    if blocks:
        _check_calls(model, blocks)
    modules = set(model.modules())
    for block in blocks:
        if block not in modules:
            raise ConfigError(
                f"nl.shard(blocks=...): {type(block).__name__} is not a part of the model: pass "
                "submodules of the model"
            )
    for block, name in tied_blocks(model, blocks).items():
        raise ConfigError(
            f"nl.shard(blocks=...): {type(block).__name__} shares {name} with another unit, and "
            "tied parameters must be in one: leave it out of blocks, so that it is in the root unit"
        )
    overlaps = settings.overlap_communication and can_overlap(runtime, model, policy)
    mesh = runtime.device_mesh["shard"] if overlaps else _fsdp_mesh(runtime)
    experts = _expert_units(model, model, blocks)
    sizes = [sum(p.numel() for p in unit.parameters()) for unit in (model, *blocks)]
    sizes[0] -= sum(sizes[1:])
    for unit in (*blocks, model):
        _place(model, unit, runtime)
        free = reshard_after_forward is not False
        _shard_experts(experts[unit], runtime, policy, free, overlaps)
        fully_shard(
            unit,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=_offload_policy(runtime),
            reshard_after_forward=reshard_after_forward is True if unit is model else free,
            shard_placement_fn=_placement(mesh),
        )
    inner = [unit for units in experts.values() for unit in units]
    own_experts = inner if runtime.mesh.expert_sharing == 1 else []  # not shared with any rank
    units = {"sharing": _units([*blocks, model])}
    not_shared = own_experts + ([*blocks, model] if runtime.mesh.sharing == 1 else [])
    for unit in not_shared:
        _torch.compute_in_place(unit)
    if inner and not own_experts:
        units["expert_sharing"] = _units(inner)
    gathered_dtype = policy.param_dtype or next(model.parameters()).dtype
    if runtime.device.type == "cpu":
        for unit in _units(own_experts if overlaps else [*blocks, model, *inner]):
            unit.set_force_sum_reduction_for_comms(True)  # torch 2.8's gloo has no mean
    if overlaps:
        enable_async_all_gather(model, units, runtime, gathered_dtype)
        state.reduction = enable_overlapped_reduction(units, runtime)
    elif _torch.supports_custom_collectives():
        set_staged_all_gather(units, runtime, gathered_dtype)
    elif settings.gather_dtype != "same":
        log.warning(
            "gather_dtype = %r has no effect: FSDP2 of PyTorch %s takes no custom all-gather",
            settings.gather_dtype,
            torch.__version__,
        )
    if reshard_after_forward is None:
        state.prefetch = set_prefetch_schedule(
            model,
            blocks,
            plan_retention(sizes, settings, runtime.mesh.sharing),
            settings.prefetch_depth,
            inner_units=experts,
        )
    _torch.reduce_unused_parameters(model)


def _shard_stages(
    model: nn.Module,
    runtime: Runtime,
    policy: MixedPrecisionPolicy,
    reshard_after_forward: bool | None,
) -> None:
    """Shard each stage of a pipeline by itself, with FSDP2's own communication.

    The micro-batches of a schedule follow each other directly. Parameters therefore stay gathered,
    unless they exceed ``memory_budget`` and the schedule allows to free them.
    """
    settings, pipeline = runtime.config, model_state(model).pipeline
    assert pipeline is not None
    needs_gathered, live = pipeline.needs_gathered_weights, settings.live_parameters
    if reshard_after_forward and needs_gathered:
        raise ConfigError(
            f"nl.shard(reshard_after_forward=True) with pipeline = {pipeline.schedule_name!r}: "
            "this schedule computes weight gradients apart from the backward pass and needs "
            "gathered parameters; leave it out, or choose another schedule"
        )
    if reshard_after_forward is None:
        held = sum(parameter.numel() for parameter in model.parameters())
        reshard_after_forward = not stage_stays_gathered(held, live, needs_gathered)
        if needs_gathered and held > live:
            log.warning(
                "a limit of %d gathered parameters has no effect: pipeline = %r keeps this rank's "
                "%d parameters gathered",
                live,
                pipeline.schedule_name,
                held,
            )
    for stage in fsdp_roots(model):
        blocks = pipeline.blocks_of(stage)
        experts = _expert_units(model, stage, blocks)
        for unit in (*blocks, stage):
            _place(stage, unit, runtime)
            _shard_experts(experts[unit], runtime, policy, reshard_after_forward, overlaps=False)
            fully_shard(
                unit,
                mesh=_fsdp_mesh(runtime),
                mp_policy=policy,
                offload_policy=_offload_policy(runtime),
                reshard_after_forward=reshard_after_forward,
                shard_placement_fn=_placement(_fsdp_mesh(runtime)),
            )
            if runtime.device.type == "cpu":
                for each in _units([unit, *experts[unit]]):
                    each.set_force_sum_reduction_for_comms(True)  # torch 2.8's gloo has no mean
        _torch.reduce_unused_parameters(stage)
        pipeline.control_replica_reduction(stage)
    pipeline.dtype = policy.param_dtype or next(model.parameters()).dtype
    if settings.gather_dtype != "same" or settings.hierarchical_all_gather == "on":
        log.warning("gather_dtype and hierarchical_all_gather have no effect on a pipeline")


def _check_transformed(model: nn.Module, runtime: Runtime) -> None:
    """Raise ConfigError for a parallel degree whose transformation the model lacks."""
    state = model_state(model)
    if runtime.mesh.pipeline > 1 and state.pipeline is None:
        raise ConfigError(
            f"pipeline_parallel_degree = {runtime.mesh.pipeline}, but the model is not divided "
            "into stages: call nl.pipeline(model) before nl.shard(model)"
        )
    for axis in ("tensor", "context", "expert"):
        degree = getattr(runtime.mesh, axis)
        if degree > 1 and axis not in state.layout.axes:
            raise ConfigError(
                f"{axis}_parallel_degree = {degree}, but the model is not transformed: call "
                "nl.transform(model) before nl.shard(model)"
            )


def _units(modules: list[nn.Module]) -> list[FSDPModule]:
    """Return ``modules``, which are sharded, by the type that has FSDP2's methods."""
    return [module for module in modules if isinstance(module, FSDPModule)]


def _check_calls(model: nn.Module, blocks: list[nn.Module]) -> None:
    """Raise ConfigError if the model calls ``block.forward``, past the hook that gathers it."""
    parts = {part for block in blocks for part in block.modules()}
    for kind in {type(module) for module in model.modules() if module not in parts}:
        forward = inspect.unwrap(kind.forward)
        if "forward" not in getattr(getattr(forward, "__code__", None), "co_names", ()):
            continue
        with suppress(OSError, TypeError):  # no source
            if re.search(r"(?<!super\(\))\.forward\(", inspect.getsource(forward)):
                raise ConfigError(
                    f"{kind.__name__} calls the method forward of its blocks, so that they are not "
                    "gathered before: call nl.shard(model, blocks=[]), which makes one unit of the "
                    "model"
                )


def _place(model: nn.Module, unit: nn.Module, runtime: Runtime) -> None:
    """Move ``unit`` to this rank's device, with values if its initialization was deferred."""
    materialize(model, unit, runtime.device)
    tensors = (*unit.parameters(), *unit.buffers())
    if any(tensor.device != runtime.device for tensor in tensors):  # fake ones cannot be moved
        unit.to(runtime.device)


def _fsdp_mesh(runtime: Runtime, experts: bool = False) -> DeviceMesh:
    """Return the mesh for FSDP2: (replicate, shard), or (shard,) if it does not see replicas.

    It does not if there is one replica, or if replicas shard the optimizer state.
    """
    mesh = runtime.expert_mesh if experts else runtime.device_mesh
    shards_only = runtime.mesh.replicate == 1 or shards_optimizer_state(runtime)
    return mesh["shard"] if shards_only else mesh["replicate", "shard"]


def _expert_units(
    model: nn.Module, root: nn.Module, blocks: list[nn.Module]
) -> dict[nn.Module, list[nn.Module]]:
    """Group the expert units by the block that contains them, or by ``root`` outside of blocks."""
    extensions = model_state(model).extensions

    def experts_in(module: nn.Module) -> list[nn.Module]:
        return [unit for extension in extensions for unit in extension.expert_units(module)]

    by_unit = {block: experts_in(block) for block in blocks}
    inside = {unit for units in by_unit.values() for unit in units}
    by_unit[root] = [unit for unit in experts_in(root) if unit not in inside]
    return by_unit


def _shard_experts(
    units: list[nn.Module],
    runtime: Runtime,
    policy: MixedPrecisionPolicy,
    reshard_after_forward: bool,
    overlaps: bool,
) -> None:
    """Shard each of ``units`` over the ranks that hold the same experts.

    Inputs keep their dtypes: the block has cast the tokens, and router weights are more precise.
    """
    policy = dataclasses.replace(policy, cast_forward_inputs=False)
    ranks = runtime.mesh.expert_sharing
    for unit in units:
        # FSDP2 reduces across replicas itself if there is nothing to reduce-scatter before.
        shard_only = overlaps and ranks > 1
        mesh = runtime.expert_mesh["shard"] if shard_only else _fsdp_mesh(runtime, experts=True)
        fully_shard(
            unit,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=_offload_policy(runtime),
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=_placement(mesh),
        )


def _placement(mesh: DeviceMesh) -> Callable[[nn.Parameter], Shard]:
    """Return the function that places a unit's parameters on ``mesh``, for ``fully_shard``."""
    ranks = mesh.size(-1)
    return lambda parameter: Shard(dim_to_shard(parameter.shape, ranks))


def _offload_policy(runtime: Runtime) -> OffloadPolicy:
    """Keep shards in host memory if the optimizer updates them there."""
    if not runtime.config.offload_optimizer:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=runtime.device.type != "cpu")


def _with_precision(config: ParallelConfig, precision: str | None) -> ParallelConfig:
    """Return ``config`` with its precision replaced by ``precision``, unless that is None."""
    if precision is None:
        return config
    if precision not in COMPUTE_DTYPES:
        allowed = ", ".join(map(repr, COMPUTE_DTYPES))
        raise ConfigError(f"precision = {precision!r}: allowed are {allowed}")
    return dataclasses.replace(config, bf16=precision == "bf16", fp16=precision == "fp16")


def _precision_policy(config: ParallelConfig) -> MixedPrecisionPolicy:
    if config.precision == "fp32":
        return MixedPrecisionPolicy()
    dtype = COMPUTE_DTYPES[config.precision]
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
