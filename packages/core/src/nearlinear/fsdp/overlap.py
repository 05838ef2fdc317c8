"""Communication of a sharded model overlapped with its computation, where torch does not overlap.

On accelerators FSDP2 overlaps with streams, replicas included, and keeps its own collectives. On
the CPU it waits. There every unit gets a `UnitAllGather` and a `UnitReduceScatter`, which run on
two `CommThread`s. Each thread has process groups of its own: collectives of one group must have one
order on all ranks, and the main thread uses its own groups meanwhile. Two-stage and compressed
all-gathers are `UnitAllGather`s on every device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from .. import _torch
from ..config.parallel import HOST_MEMORY_BACKEND
from ..distributed.collectives import (
    Allocator,
    Hierarchy,
    ReduceScatter,
    backend_of,
    is_hierarchy_faster,
    split_by_node,
)
from ..distributed.comm_thread import CommThread
from ..distributed.runtime import Runtime, backend_for_device, register_backend
from ..distributed.thread_backend import BACKEND as THREADS
from .all_gather_codec import CODECS, packed_size
from .unit_collectives import (
    GradientReduction,
    ReusedMemory,
    TorchAllocator,
    UnitAllGather,
    UnitReduceScatter,
)

Units = dict[str, list[FSDPModule]]
"""Units by the axis of the ranks that share their parameters: ``sharing``, ``expert_sharing``."""

_SUMMED_UNSCALED = (torch.float32, torch.bfloat16)  # FSDP2 divides gradients of other dtypes


def can_overlap(runtime: Runtime, model: nn.Module, policy: MixedPrecisionPolicy) -> bool:
    """Return whether ``model``'s units can communicate on threads: on the CPU, in one dtype."""
    if (
        runtime.device.type != "cpu"
        or runtime.mesh.sharing * runtime.mesh.replicate * runtime.replicas == 1
        or not _torch.supports_custom_collectives()
    ):
        return False
    masters = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    reduced = {policy.reduce_dtype or dtype for dtype in masters}
    return len(masters) == 1 and masters == reduced and masters <= set(_SUMMED_UNSCALED)


@dataclass
class ShardComm:
    """Process groups of the ranks that share some parameters, one per communication thread."""

    gather_group: dist.ProcessGroup
    gather_hierarchy: Hierarchy | None
    reduce_scatter: ReduceScatter


@dataclass
class CommThreads:
    """Communication threads of a job and their process groups; one set per `Runtime`."""

    gathers: CommThread
    reductions: CommThread
    replicas: dist.ProcessGroup | None
    shard_comms: dict[str, ShardComm] = field(default_factory=dict)
    """By axis, see `Units`."""

    def finish(self) -> None:
        """Wait until all submitted work has ended, failed or not."""
        for thread in (self.gathers, self.reductions):
            with contextlib.suppress(Exception):
                thread.submit(end=lambda: None).wait()


def comm_threads(runtime: Runtime) -> CommThreads:
    """Return the communication threads of ``runtime``. The first call is collective."""
    threads = runtime.comm_threads
    if threads is None:
        inline = _inline(runtime)
        replicas = _group(runtime, "replicate") if runtime.mesh.replicate > 1 else None
        threads = runtime.comm_threads = CommThreads(
            CommThread("gathers", inline), CommThread("reductions", inline), replicas
        )
    assert isinstance(threads, CommThreads)
    return threads


def _shard_comm(runtime: Runtime, axis: str) -> ShardComm:
    """Return the process groups of ``axis``. The first call is collective."""
    known = comm_threads(runtime).shard_comms
    if axis not in known:
        gather_group, reduce_group = _group(runtime, axis), _group(runtime, axis)
        gather_hierarchy = _hierarchy(runtime, axis)
        known[axis] = ShardComm(
            gather_group,
            gather_hierarchy,
            ReduceScatter(reduce_group, _hierarchy(runtime, axis)),
        )
    return known[axis]


def _inline(runtime: Runtime) -> bool:
    """Return whether work runs in the caller's thread: with streams, or if ranks are threads."""
    return runtime.device.type != "cpu" or dist.get_backend() == THREADS


def _group(runtime: Runtime, axis: str) -> dist.ProcessGroup:
    """Return FSDP2's own group if one thread uses it, or else a new group of the same ranks."""
    if not _inline(runtime):
        return _new_group(runtime.mesh.group(axis, runtime.rank), runtime)
    if axis == "expert_sharing":
        return runtime.expert_mesh["shard"].get_group()
    return runtime.device_mesh["shard" if axis == "sharing" else axis].get_group()


def _new_group(ranks: list[int], runtime: Runtime) -> dist.ProcessGroup:
    """Create a group over the configured backend, also if the default group uses another."""
    name = runtime.config.communication_backend
    backend = (
        None if name == "auto" else register_backend(backend_for_device(name, runtime.device.type))
    )
    group = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
    return cast(dist.ProcessGroup, group)  # this rank is a member


def _hierarchy(runtime: Runtime, axis: str) -> Hierarchy | None:
    ranks = split_by_node(runtime.mesh, runtime.rank, axis)
    if ranks is None or runtime.config.hierarchical_all_gather == "off":
        return None
    inter_node, intra_node = (_new_group(group, runtime) for group in ranks)
    return Hierarchy(inter_node, intra_node, len(ranks[1]))


def enable_async_all_gather(
    model: nn.Module, units: Units, runtime: Runtime, dtype: torch.dtype
) -> None:
    """Run the all-gathers of ``units``, in ``dtype``, on a thread, and wait when they compute."""
    for axis, sharing in units.items():
        if getattr(runtime.mesh, axis) == 1:
            continue  # nothing to gather
        _set_all_gathers(sharing, runtime, axis, _use_hierarchy(sharing, runtime, axis, dtype))
    _torch.enable_async_all_gather(model)


def set_staged_all_gather(units: Units, runtime: Runtime, dtype: torch.dtype) -> None:
    """Give ``units`` a `UnitAllGather` where two stages or compression pay; others keep FSDP2's."""
    compressed = CODECS[runtime.config.gather_dtype] is not None
    for axis, sharing in units.items():
        staged = _use_hierarchy(sharing, runtime, axis, dtype)
        if compressed and getattr(runtime.mesh, axis) > 1:
            _set_all_gathers(sharing, runtime, axis, staged)
            continue
        chosen = [unit for unit, two in zip(sharing, staged, strict=True) if two]
        if chosen:
            _set_all_gathers(chosen, runtime, axis, [True] * len(chosen))


def _set_all_gathers(
    units: Iterable[FSDPModule], runtime: Runtime, axis: str, staged: Iterable[bool]
) -> None:
    thread, comm = comm_threads(runtime).gathers, _shard_comm(runtime, axis)
    memory, codec = _allocator(comm.gather_group, "AllGather"), CODECS[runtime.config.gather_dtype]
    for unit, two in zip(units, staged, strict=True):
        hierarchy = comm.gather_hierarchy if two else None
        gather = UnitAllGather(thread, comm.gather_group, memory, hierarchy, codec)
        unit.set_custom_all_gather(gather)


def _use_hierarchy(
    units: list[FSDPModule], runtime: Runtime, axis: str, dtype: torch.dtype
) -> list[bool]:
    """Return, for each unit, whether it gathers in two stages."""
    choice = runtime.config.hierarchical_all_gather
    if choice == "off" or split_by_node(runtime.mesh, runtime.rank, axis) is None:
        return [False] * len(units)
    if choice == "on":
        return [True] * len(units)
    comm = _shard_comm(runtime, axis)
    if backend_of(comm.gather_group) == HOST_MEMORY_BACKEND:  # hierarchical by itself
        return [False] * len(units)
    assert comm.gather_hierarchy is not None
    ranks = getattr(runtime.mesh, axis)
    shards = [sum(-(-p.numel() // ranks) for p in _torch.sharded_parameters(u)) for u in units]
    sizes = [packed_size(runtime.config.gather_dtype, shard, dtype) for shard in shards]
    memory = _allocator(comm.gather_group, "AllGather")
    return is_hierarchy_faster(
        comm.gather_hierarchy, comm.gather_group, memory, sizes, runtime.device
    )


def enable_overlapped_reduction(units: Units, runtime: Runtime) -> GradientReduction:
    """Reduce the gradients of ``units``, sharded over the shard axis only, on a thread.

    Units of a single shard have no first hop. FSDP2 hands their gradients to its all-reduce hook.
    """
    threads, limit = comm_threads(runtime), runtime.config.sdp_reduce_bucket_size
    reduction = GradientReduction(threads.reductions, threads.replicas, limit)
    for axis, sharing in units.items():
        if getattr(runtime.mesh, axis) == 1:
            # holds the gradients from the backward pass to the optimizer's step
            memory = _allocator(threads.replicas, "ReduceScatter", otherwise=ReusedMemory())
            for unit in sharing:
                whole = UnitReduceScatter(reduction, unit, None, memory)
                unit.set_custom_reduce_scatter(whole)
                unit.set_all_reduce_hook(whole.reduce_whole)
            continue
        reduce_scatter = _shard_comm(runtime, axis).reduce_scatter
        memory = _allocator(reduce_scatter.group, "ReduceScatter")
        for unit in sharing:
            unit.set_custom_reduce_scatter(
                UnitReduceScatter(reduction, unit, reduce_scatter, memory)
            )
    return reduction


def _allocator(
    group: dist.ProcessGroup | None, kind: str, otherwise: Allocator | None = None
) -> Allocator:
    """Return the allocator of FSDP2's buffers: the backend's own, or ``otherwise``, or torch's."""
    if group is None or backend_of(group) != HOST_MEMORY_BACKEND:
        return otherwise or TorchAllocator()
    import nearlinear_collectives

    return getattr(nearlinear_collectives, kind)(group)
