"""Communication of a sharded model beside its computation, where torch does not do it itself.

On accelerators FSDP2 overlaps by streams, replicas included, and is left to it. On the CPU it
waits; there every unit is given a gather and a reduction of ours, which run on two `Lane`s, each
with process groups of its own: collectives of one group must come in one order on all ranks, and
the caller's thread goes on with its own. Gathers in two stages (`hierarchy`) are ours everywhere.
"""

import contextlib
from dataclasses import dataclass

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
class Lanes:
    """A job's threads for communication, and the groups they use; one set per `Runtime`."""

    gathers: Lane
    reductions: Lane
    gathering: dist.ProcessGroup  # the shard group, twice: one for each lane
    scatter: Scatter
    replicas: dist.ProcessGroup | None
    hierarchy: Hierarchy | None  # of the gathers

    def finish(self) -> None:
        """Wait until nothing is under way any more, however it ends."""
        for lane in (self.gathers, self.reductions):
            with contextlib.suppress(Exception):
                lane.give(end=lambda: None).wait()


def lanes_of(now: Runtime) -> Lanes:
    """The lanes of this job, opened on first use: a collective call."""
    if now.lanes is None:
        inline = now.device.type != "cpu" or dist.get_backend() == THREADS
        group = _of_mesh if inline else _of_its_own
        replicate = now.mesh.replicate > 1
        now.lanes = Lanes(
            Lane("gathers", inline),
            Lane("reductions", inline),
            group(now, "sharing"),
            Scatter(group(now, "sharing"), _hierarchy(now)),
            group(now, "replicate") if replicate else None,
            _hierarchy(now),
        )
    return now.lanes


def _of_mesh(now: Runtime, axis: str) -> dist.ProcessGroup:
    return now.device_mesh["shard" if axis == "sharing" else axis].get_group()


def _of_its_own(now: Runtime, axis: str) -> dist.ProcessGroup:
    return _new_group(now.mesh.group(axis, now.rank), now)


def _new_group(ranks: list[int], now: Runtime) -> dist.ProcessGroup:
    """Over the backend that the config names, also where the job's other groups use another."""
    asked = now.config.communication_backend
    backend = None if asked == "auto" else known_to_torch(for_device(asked, now.device.type))
    return dist.new_group(ranks, backend=backend, use_local_synchronization=True)


def _hierarchy(now: Runtime) -> Hierarchy | None:
    ranks = cut(now.mesh, now.rank)
    if ranks is None or now.config.hierarchical_all_gather == "off":
        return None
    across, inside = (_new_group(group, now) for group in ranks)
    return Hierarchy(across, inside, len(ranks[1]))


def gather_beside(model, units: list[FSDPModule], now: Runtime, dtype: torch.dtype) -> None:
    """Have ``units`` gather on a lane, in ``dtype``, and wait for it when they compute."""
    _give_gathers(units, now, _staged(units, now, dtype))
    _torch.gather_asynchronously(model)


def gather_in_stages(units: list[FSDPModule], now: Runtime, dtype: torch.dtype) -> None:
    """Have those ``units`` gather across nodes first for which that pays; the others stay.

    All are given a gather of ours where parameters travel smaller than they compute.
    """
    staged = _staged(units, now, dtype)
    if CODECS[now.config.gather_dtype] is not None and now.mesh.sharing > 1:
        _give_gathers(units, now, staged)
        return
    chosen = [unit for unit, two in zip(units, staged, strict=True) if two]
    if chosen:
        _give_gathers(chosen, now, [True] * len(chosen))


def _give_gathers(units: list[FSDPModule], now: Runtime, staged: list[bool]) -> None:
    lanes = lanes_of(now)
    memory, codec = _memory(lanes.gathering, "AllGather"), CODECS[now.config.gather_dtype]
    for unit, two in zip(units, staged, strict=True):
        hierarchy = lanes.hierarchy if two else None
        gather = UnitGather(lanes.gathers, lanes.gathering, memory, hierarchy, codec)
        unit.set_custom_all_gather(gather)


def _staged(units: list[FSDPModule], now: Runtime, dtype: torch.dtype) -> list[bool]:
    """For each unit, whether it gathers in two stages."""
    asked = now.config.hierarchical_all_gather
    if asked == "off" or cut(now.mesh, now.rank) is None:
        return [False] * len(units)
    if asked == "on":
        return [True] * len(units)
    lanes = lanes_of(now)
    if dist.get_backend(lanes.gathering) == IN_HOST_MEMORY:  # its gathers are made so already
        return [False] * len(units)
    ranks = now.mesh.sharing
    sizes = [sum(-(-p.numel() // ranks) for p in _torch.sharded_parameters(u)) for u in units]
    sent = [travelling(now.config.gather_dtype, size, dtype) for size in sizes]
    memory = _memory(lanes.gathering, "AllGather")
    return worth_it(lanes.hierarchy, lanes.gathering, memory, sent, now.device)


def reduce_beside(units: list[FSDPModule], now: Runtime) -> Reduction:
    """Have ``units``, sharded over the shard axis alone, reduce in both hops on a lane."""
    lanes = lanes_of(now)
    memory = _memory(lanes.scatter.shards, "ReduceScatter")
    most = now.config.sdp_reduce_bucket_size
    reduction = Reduction(lanes.reductions, lanes.scatter, lanes.replicas, memory, most)
    for unit in units:
        unit.set_custom_reduce_scatter(UnitReduction(reduction, unit))
    return reduction


def _memory(group: dist.ProcessGroup, kind: str):
    """What FSDP2's buffers are allocated from: the backend's own memory, where it has some."""
    if dist.get_backend(group) != IN_HOST_MEMORY:
        return PrivateMemory()
    import nearlinear_collectives

    return getattr(nearlinear_collectives, kind)(group)
