"""Communication of a sharded model beside its computation, where torch does not do it itself.

On accelerators FSDP2 overlaps by streams, replicas included, and is left to it. On the CPU it
waits; there every unit is given a gather and a reduction of ours, which run on two `Lane`s, each
with process groups of its own: collectives of one group must come in one order on all ranks, and
the caller's thread goes on with its own. Gathers in two stages (`hierarchy`) are ours everywhere.
"""

import contextlib
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from .. import _torch
from ..backends import IN_HOST_MEMORY, for_device, known_to_torch
from ..runtime import Runtime
from ..spmd.threads import BACKEND as THREADS
from .gather import UnitGather
from .hierarchy import Hierarchy, cut, worth_it
from .lane import Lane
from .reduction import Reduction, UnitReduction
from .scatter import Scatter
from .wire import CODECS, travelling

Units = dict[str, list[FSDPModule]]  # by who shares their states, see `mesh.JOINT`

SUMMED_AS_THEY_ARE = (torch.float32, torch.bfloat16)  # FSDP2 divides others, before and after


def possible(now: Runtime, model: nn.Module, policy: MixedPrecisionPolicy) -> bool:
    """Whether ``model``'s units can communicate on lanes: on the CPU, over shards, in one dtype."""
    if now.device.type != "cpu" or now.mesh.sharing == 1 or not _torch.communicates_by_hooks():
        return False
    masters = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    reduced = {policy.reduce_dtype or dtype for dtype in masters}
    return len(masters) == 1 and masters == reduced and masters <= set(SUMMED_AS_THEY_ARE)


class PrivateMemory:
    """What torch gives anybody."""

    def allocate(self, size, *, dtype, device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


@dataclass
class Sharers:
    """The ranks that share some states, as groups of each lane's own."""

    gathering: dist.ProcessGroup
    hierarchy: Hierarchy | None  # of the gathers
    scatter: Scatter


@dataclass
class Lanes:
    """A job's threads for communication, and the groups they use; one set per `Runtime`."""

    gathers: Lane
    reductions: Lane
    replicas: dist.ProcessGroup | None
    sharers: dict[str, Sharers] = field(default_factory=dict)  # ``sharing``, ``expert_sharing``

    def finish(self) -> None:
        """Wait until nothing is under way any more, however it ends."""
        for lane in (self.gathers, self.reductions):
            with contextlib.suppress(Exception):
                lane.give(end=lambda: None).wait()


def lanes_of(now: Runtime) -> Lanes:
    """The lanes of this job, opened on first use: a collective call."""
    if now.lanes is None:
        inline = _inline(now)
        replicas = _group(now, "replicate") if now.mesh.replicate > 1 else None
        now.lanes = Lanes(Lane("gathers", inline), Lane("reductions", inline), replicas)
    return now.lanes


def _sharers(now: Runtime, axis: str) -> Sharers:
    """The groups of ``axis`` for this job's lanes, made on first use: a collective call."""
    known = lanes_of(now).sharers
    if axis not in known:
        gathering, scattering = _group(now, axis), _group(now, axis)
        known[axis] = Sharers(
            gathering, _hierarchy(now, axis), Scatter(scattering, _hierarchy(now, axis))
        )
    return known[axis]


def _inline(now: Runtime) -> bool:
    """Whether lanes are the caller's own thread: where streams overlap, or ranks are threads."""
    return now.device.type != "cpu" or dist.get_backend() == THREADS


def _group(now: Runtime, axis: str) -> dist.ProcessGroup:
    """FSDP2's own group where one thread uses it, else another one of the same ranks."""
    if not _inline(now):
        return _new_group(now.mesh.group(axis, now.rank), now)
    if axis == "expert_sharing":
        return now.expert_mesh["shard"].get_group()
    return now.device_mesh["shard" if axis == "sharing" else axis].get_group()


def _new_group(ranks: list[int], now: Runtime) -> dist.ProcessGroup:
    """Over the backend that the config names, also where the job's other groups use another."""
    asked = now.config.communication_backend
    backend = None if asked == "auto" else known_to_torch(for_device(asked, now.device.type))
    return dist.new_group(ranks, backend=backend, use_local_synchronization=True)


def _hierarchy(now: Runtime, axis: str) -> Hierarchy | None:
    ranks = cut(now.mesh, now.rank, axis)
    if ranks is None or now.config.hierarchical_all_gather == "off":
        return None
    across, inside = (_new_group(group, now) for group in ranks)
    return Hierarchy(across, inside, len(ranks[1]))


def gather_beside(model, units: Units, now: Runtime, dtype: torch.dtype) -> None:
    """Have ``units`` gather on a lane, in ``dtype``, and wait for it when they compute."""
    for axis, sharing in units.items():
        _give_gathers(sharing, now, axis, _staged(sharing, now, axis, dtype))
    _torch.gather_asynchronously(model)


def gather_in_stages(units: Units, now: Runtime, dtype: torch.dtype) -> None:
    """Have those ``units`` gather across nodes first for which that pays; the others stay.

    All are given a gather of ours where parameters travel smaller than they compute.
    """
    coded = CODECS[now.config.gather_dtype] is not None
    for axis, sharing in units.items():
        staged = _staged(sharing, now, axis, dtype)
        if coded and getattr(now.mesh, axis) > 1:
            _give_gathers(sharing, now, axis, staged)
            continue
        chosen = [unit for unit, two in zip(sharing, staged, strict=True) if two]
        if chosen:
            _give_gathers(chosen, now, axis, [True] * len(chosen))


def _give_gathers(units: list[FSDPModule], now: Runtime, axis: str, staged: list[bool]) -> None:
    lane, sharers = lanes_of(now).gathers, _sharers(now, axis)
    memory, codec = _memory(sharers.gathering, "AllGather"), CODECS[now.config.gather_dtype]
    for unit, two in zip(units, staged, strict=True):
        hierarchy = sharers.hierarchy if two else None
        unit.set_custom_all_gather(UnitGather(lane, sharers.gathering, memory, hierarchy, codec))


def _staged(units: list[FSDPModule], now: Runtime, axis: str, dtype: torch.dtype) -> list[bool]:
    """For each unit, whether it gathers in two stages."""
    asked = now.config.hierarchical_all_gather
    if asked == "off" or cut(now.mesh, now.rank, axis) is None:
        return [False] * len(units)
    if asked == "on":
        return [True] * len(units)
    sharers = _sharers(now, axis)
    if dist.get_backend(sharers.gathering) == IN_HOST_MEMORY:  # its gathers are made so already
        return [False] * len(units)
    ranks = getattr(now.mesh, axis)
    sizes = [sum(-(-p.numel() // ranks) for p in _torch.sharded_parameters(u)) for u in units]
    sent = [travelling(now.config.gather_dtype, size, dtype) for size in sizes]
    memory = _memory(sharers.gathering, "AllGather")
    return worth_it(sharers.hierarchy, sharers.gathering, memory, sent, now.device)


def reduce_beside(units: Units, now: Runtime) -> Reduction:
    """Have ``units``, sharded over the shard axis alone, reduce in both hops on a lane."""
    lanes, most = lanes_of(now), now.config.sdp_reduce_bucket_size
    reduction = Reduction(lanes.reductions, lanes.replicas, most)
    for axis, sharing in units.items():
        scatter = _sharers(now, axis).scatter
        memory = _memory(scatter.shards, "ReduceScatter")
        for unit in sharing:
            unit.set_custom_reduce_scatter(UnitReduction(reduction, unit, scatter, memory))
    return reduction


def _memory(group: dist.ProcessGroup, kind: str):
    """What FSDP2's buffers are allocated from: the backend's own memory, where it has some."""
    if dist.get_backend(group) != IN_HOST_MEMORY:
        return PrivateMemory()
    import nearlinear_collectives

    return getattr(nearlinear_collectives, kind)(group)
