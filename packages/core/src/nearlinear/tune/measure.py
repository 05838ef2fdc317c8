"""Time the collectives of a sharded step on this job's links, for every shard degree and backend.

As training runs them: the units' real sizes, in the backend's own memory, over groups of their own.
Backends and ways take turns, so that a slow moment of the machine meets them all; each round counts
as the slowest rank's, and the median round is what is reported.
"""

import dataclasses
import functools
import logging
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .. import _torch, backends, runtime
from ..c10d_names import all_gather, reduce_scatter
from ..errors import ConfigError
from ..mesh import Mesh
from ..parallel.hierarchy import Hierarchy, cut
from ..parallel.overlap import PrivateMemory
from ..parallel.scatter import Scatter
from ..parallel.shard import COMPUTED_IN
from ..parallel.wire import travelling
from .estimate import GATHER, GATHER_STAGED, JOIN, REDUCE, REDUCE_STAGED
from .units import Unit

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Measurement:
    """One collective of one unit."""

    degree: int
    """ranks that share a copy of the model states"""
    backend: str
    collective: str
    unit: int
    """parameters of the unit"""
    bytes: int
    """of the larger side of the call"""
    seconds: float


@dataclass
class Groups:
    """The groups of one degree over one backend; None where a group would be one rank."""

    shards: dist.ProcessGroup | None
    replicas: dist.ProcessGroup | None
    hierarchy: Hierarchy | None


def slowest_medians(ways: list[Callable], device: torch.device, rounds: int) -> list[float]:
    """Median seconds of each way over ``rounds``, after one to warm up; of all ranks the slowest.

    A collective call: every rank gives the same ways in the same order.
    """
    seconds = torch.zeros(1 + rounds, len(ways), dtype=torch.float64)
    for taken in seconds:
        for place, way in enumerate(ways):
            dist.barrier()
            finish(device)
            begin = time.perf_counter()
            way()
            finish(device)
            taken[place] = time.perf_counter() - begin
    seconds = seconds.to(device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return [statistics.median(column) for column in seconds[1:].T.tolist()]


def finish(device: torch.device) -> None:
    """Wait for what the device still has to do."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def candidates(asked: str, device: torch.device) -> list[str]:
    """The backends to compare, by their names in the config. A collective call.

    nccl on GPUs; on the CPU gloo, and nearlinear where every rank can load it; and any other that
    the config asks for.
    """
    if device.type == "cuda":
        return ["nccl"]
    names = ["gloo", *({asked} - {"gloo", backends.IN_HOST_MEMORY})]
    loads = torch.ones(1, dtype=torch.int64)
    try:
        backends.known_to_torch(backends.IN_HOST_MEMORY)
    except ConfigError as error:
        log.info("nearlinear is not measured: %s", error)
        loads.zero_()
    dist.all_reduce(loads, op=dist.ReduceOp.MIN)
    return [*names, backends.IN_HOST_MEMORY] if loads else names


def measure_links(
    degrees: list[int], names: list[str], units: list[Unit], now: runtime.Runtime, rounds: int
) -> list[Measurement]:
    """All collectives of ``units`` at each shard degree, over each of the backends ``names``.

    Nothing for groups of one rank. A collective call.
    """
    opened: dict[tuple, dist.ProcessGroup] = {}
    found = []
    for place, degree in enumerate(degrees, start=1):
        log.info("measuring hybrid_shard_degree = %d (%d of %d)", degree, place, len(degrees))
        config = dataclasses.replace(now.config, hybrid_shard_degree=degree)
        mesh = Mesh.from_config(config, now.mesh.world, now.mesh.ranks_per_node)
        groups = {name: groups_over(mesh, now, name, opened) for name in names}
        for unit in {unit.parameters: unit for unit in units}.values():
            for kind in (_gathers, _reductions, _joins):
                found += _measure(kind, degree, unit, groups, now, rounds)
    return found


def _measure(kind, degree: int, unit: Unit, groups: dict, now, rounds: int) -> list[Measurement]:
    """One kind of collective of one unit, every way over every backend, taking turns."""
    ways = [
        (name, *way)
        for name, between in groups.items()
        for way in kind(between, unit.shard(degree), now)
    ]
    times = slowest_medians([run for *_, run in ways], now.device, rounds)
    return [
        Measurement(degree, name, collective, unit.parameters, size, seconds)
        for (name, collective, size, _), seconds in zip(ways, times, strict=True)
    ]


def groups_over(mesh: Mesh, now: runtime.Runtime, name: str, opened: dict) -> Groups:
    """Those of ``mesh`` over one backend. Groups are opened once and end with the job: torch gives
    a second group of the same ranks the first one's name, and with it its stale addresses."""

    def group(ranks: list[int]) -> dist.ProcessGroup | None:
        key = (name, *ranks)
        if len(ranks) > 1 and key not in opened:
            backend = backends.known_to_torch(name)
            opened[key] = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
        return opened.get(key)

    shards, replicas = (group(mesh.group(axis, now.rank)) for axis in ("sharing", "replicate"))
    ranks = cut(mesh, now.rank)
    if ranks is None or not _torch.communicates_by_hooks():
        return Groups(shards, replicas, None)
    across, inside = map(group, ranks)
    return Groups(shards, replicas, Hierarchy(across, inside, len(ranks[1])))


def _gathers(groups: Groups, elements: int, now: runtime.Runtime) -> Iterator[tuple]:
    """(collective, bytes, what runs it) for each way to gather ``elements`` per rank.

    As they travel; the time to pack and unpack them is not in it.
    """
    shards, hierarchy = groups.shards, groups.hierarchy
    if shards is None:
        return
    computed = COMPUTED_IN[now.config.precision]
    elements, dtype = travelling(now.config.gather_dtype, elements, computed)
    output = memory_of(shards, "AllGather", (elements * shards.size(),), dtype, now)
    mine = output.view(-1, elements)[shards.rank()].zero_()
    yield GATHER, output.nbytes, lambda: all_gather(output, mine, group=shards)
    if hierarchy is not None:
        yield GATHER_STAGED, output.nbytes, lambda: hierarchy.gather(output, mine)


def _reductions(groups: Groups, elements: int, now: runtime.Runtime) -> Iterator[tuple]:
    """The same for ways to reduce float32 gradients to ``elements`` per rank."""
    shards, hierarchy = groups.shards, groups.hierarchy
    if shards is None:
        return
    input = memory_of(shards, "ReduceScatter", (elements * shards.size(),), torch.float32, now)
    output = memory_of(shards, "ReduceScatter", (elements,), torch.float32, now)
    input.zero_()
    op = dist.ReduceOp.AVG
    beside = now.config.overlap_communication and _torch.communicates_by_hooks()
    if now.device.type != "cpu" or not beside:  # FSDP2's own
        run = functools.partial(reduce_scatter, output, input, op=op, group=shards)
        yield REDUCE, input.nbytes, run
        return
    yield REDUCE, input.nbytes, functools.partial(Scatter(shards), output, input, op)
    if hierarchy is not None:
        staged = Scatter(shards, hierarchy)
        yield REDUCE_STAGED, input.nbytes, functools.partial(staged, output, input, op)


def _joins(groups: Groups, elements: int, now: runtime.Runtime) -> Iterator[tuple]:
    """The same for the sum of ``elements`` gradients over the replicas."""
    shards, replicas = groups.shards, groups.replicas
    if replicas is None:
        return
    if shards is None:
        gradients = torch.zeros(elements, device=now.device)
    else:
        gradients = memory_of(shards, "ReduceScatter", (elements,), torch.float32, now).zero_()
    run = functools.partial(dist.all_reduce, gradients, group=replicas)
    yield JOIN, gradients.nbytes, run


def memory_of(group: dist.ProcessGroup, kind: str, size: tuple, dtype, now) -> torch.Tensor:
    """From where FSDP2's buffers come over ``group``."""
    source, shared = PrivateMemory(), dist.get_backend(group) == backends.IN_HOST_MEMORY
    if shared and _torch.communicates_by_hooks():
        import nearlinear_collectives

        source = getattr(nearlinear_collectives, kind)(group)
    return source.allocate(size, dtype=dtype, device=now.device)
