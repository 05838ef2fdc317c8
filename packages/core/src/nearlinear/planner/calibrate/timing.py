"""Timing of operations on all ranks at once, and the process groups and buffers they use.

Candidates take turns, so that a slow moment of the machine affects all of them. Each round counts
as the time of its slowest rank; the median over rounds is reported.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ... import _torch
from ...distributed import backend as backends
from ...distributed.mesh import Mesh
from ...distributed.runtime import Runtime
from ...errors import ConfigError
from ...fsdp.overlap import TorchAllocator

log = logging.getLogger(__name__)

CHUNK_SECONDS = 0.4  # duration of the repeated calls that are timed together


@dataclass(frozen=True)
class ShardGroups:
    """Process groups of one shard degree over one backend; None for a group of one rank."""

    shards: dist.ProcessGroup | None
    replicas: dist.ProcessGroup | None


def slowest_medians(
    operations: Sequence[Callable[[], object]], device: torch.device, rounds: int
) -> list[float]:
    """Return the median seconds of each operation over ``rounds``, on the slowest rank.

    One more round warms up. A collective call: all ranks pass the same operations in order.
    """
    seconds = torch.zeros(1 + rounds, len(operations), dtype=torch.float64)
    for row in seconds:
        for place, operation in enumerate(operations):
            dist.barrier()
            synchronize(device)
            begin = time.perf_counter()
            operation()
            synchronize(device)
            row[place] = time.perf_counter() - begin
    seconds = seconds.to(device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return [statistics.median(column) for column in seconds[1:].T.tolist()]


def seconds_per_call(
    operations: Sequence[Callable[[], object]], device: torch.device, rounds: int
) -> list[float]:
    """Return the seconds of one call of each operation, over chunks of many calls.

    A collective call.
    """
    once = torch.zeros(len(operations), dtype=torch.float64)
    for place, operation in enumerate(operations):
        operation()
        synchronize(device)
        begin = time.perf_counter()
        operation()
        synchronize(device)
        once[place] = time.perf_counter() - begin
    once = once.to(device)
    dist.all_reduce(once, op=dist.ReduceOp.MAX)  # all ranks must make the same number of calls
    counts = [max(1, math.ceil(CHUNK_SECONDS / max(each, 1e-7))) for each in once.tolist()]

    def chunk(operation: Callable[[], object], count: int) -> Callable[[], None]:
        return lambda: repeat(operation, count)

    chunks = [chunk(*each) for each in zip(operations, counts, strict=True)]
    seconds = slowest_medians(chunks, device, rounds)
    return [each / count for each, count in zip(seconds, counts, strict=True)]


def repeat(operation: Callable[[], object], count: int) -> None:
    for _ in range(count):
        operation()


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def candidate_backends(configured: str, device: torch.device) -> list[str]:
    """Return the backends to measure, by their config names. A collective call.

    On GPUs: nccl. On the CPU: gloo, nearlinear if all ranks can load it, and the configured one.
    """
    if device.type == "cuda":
        return ["nccl"]
    names = ["gloo", *({configured} - {"gloo", backends.HOST_MEMORY_BACKEND})]
    loads = torch.ones(1, dtype=torch.int64)
    try:
        backends.register_backend(backends.HOST_MEMORY_BACKEND)
    except ConfigError as error:
        log.info("skipping backend nearlinear: %s", error)
        loads.zero_()
    dist.all_reduce(loads, op=dist.ReduceOp.MIN)
    return [*names, backends.HOST_MEMORY_BACKEND] if loads else names


def open_groups(
    mesh: Mesh, runtime: Runtime, name: str, opened: dict[tuple, dist.ProcessGroup]
) -> ShardGroups:
    """Return the shard and replica group of ``mesh`` over one backend.

    Groups are cached in ``opened`` and live as long as the job: torch would give a second group of
    the same ranks the name of the first, and with it stale addresses.
    """

    def group(ranks: list[int]) -> dist.ProcessGroup | None:
        key = (name, *ranks)
        if len(ranks) > 1 and key not in opened:
            backend = backends.register_backend(name)
            made = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
            assert isinstance(made, dist.ProcessGroup)  # this rank is one of ranks
            opened[key] = made
        return opened.get(key)

    return ShardGroups(
        *(group(mesh.group(axis, runtime.rank)) for axis in ("sharing", "replicate"))
    )


def allocate_buffer(
    group: dist.ProcessGroup, collective: str, size: tuple[int, ...], runtime: Runtime
) -> torch.Tensor:
    """Allocate a float32 buffer as FSDP2 does over ``group``: in the backend's own memory.

    ``collective``: "AllGather" or "ReduceScatter".
    """
    source = TorchAllocator()
    shared = dist.get_backend(group) == backends.HOST_MEMORY_BACKEND
    if shared and _torch.supports_custom_collectives():
        import nearlinear_collectives

        source = getattr(nearlinear_collectives, collective)(group)
    return source.allocate(size, dtype=torch.float32, device=runtime.device)
