"""Compute, memory and copy rates of one rank, while all other ranks do the same.

Ranks that share cores, memory or power are measured as they run in training. Candidates take turns,
so that a slow moment of the machine affects all of them. Each round counts as the time of its
slowest rank; the median over rounds is reported. Sizes are those of training: matrix products from
small to large blocks, activations of a megabyte and more.
"""

from __future__ import annotations

import functools
import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F

from ... import _torch
from ...config.parallel import HOST_MEMORY_BACKEND
from ...distributed import runtime as backends
from ...distributed.mesh import Mesh
from ...distributed.runtime import Runtime
from ...errors import ConfigError, NearlinearError
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
    names = ["gloo", *({configured} - {"gloo", HOST_MEMORY_BACKEND})]
    loads = torch.ones(1, dtype=torch.int64)
    try:
        backends.register_backend(HOST_MEMORY_BACKEND)
    except ConfigError as error:
        log.info("skipping backend nearlinear: %s", error)
        loads.zero_()
    dist.all_reduce(loads, op=dist.ReduceOp.MIN)
    return [*names, HOST_MEMORY_BACKEND] if loads else names


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
    shared = dist.get_backend(group) == HOST_MEMORY_BACKEND
    if shared and _torch.supports_custom_collectives():
        import nearlinear_collectives

        source = getattr(nearlinear_collectives, collective)(group)
    return source.allocate(size, dtype=torch.float32, device=runtime.device)


EDGES = {"cpu": (128, 256, 512, 1024), "cuda": (512, 1024, 2048, 4096, 8192)}
"""Edges of the cubic matrix products."""
ROWS = {"cpu": 512, "cuda": 16384}
"""Rows of the activations, 1024 wide: 2 MiB of float32 on the CPU, as in small models."""
DTYPES = {
    "cpu": {"fp32": torch.float32, "bf16": torch.bfloat16},
    "cuda": {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16},
}
NEW_BYTES = 2**26  # large enough that malloc always maps new pages
WIDTH, HEADS, SEQUENCE, HEAD_WIDTH = 1024, 8, 512, 64
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class DeviceRates:
    """Measured rates of one rank."""

    products: dict[str, list[list[float]]]
    """[edge of a cube, TFLOPS] by precision."""
    memory: float
    """Bytes per second read and written by operators."""
    fresh: float
    """Extra seconds per byte written for the first time."""
    kernel: float
    """Seconds of an operator without work."""
    attention: dict[str, float]
    """FLOPS of causal fused attention by precision; masked FLOPs are not counted."""
    host: float
    """Bytes per second to or from host memory, the slower direction."""


def measure_rates(runtime: Runtime, rounds: int) -> DeviceRates:
    """Measure all ranks at once. A collective call."""
    device, dtypes = runtime.device, DTYPES[runtime.device.type]
    add = functools.partial(torch.zeros(1, device=device).add, 1)
    (kernel,) = seconds_per_call([add], device, rounds)
    return DeviceRates(
        products={name: _products(dtype, device, rounds) for name, dtype in dtypes.items()},
        memory=_memory_rate(next(iter(dtypes.values())), device, rounds),
        fresh=_first_write(device, rounds),
        kernel=kernel,
        attention={name: _attention(dtype, device, rounds) for name, dtype in dtypes.items()},
        host=_host_rate(device, rounds),
    )


def _products(dtype: torch.dtype, device: torch.device, rounds: int) -> list[list[float]]:
    edges, operations = EDGES[device.type], []
    for edge in edges:
        matrix = torch.full((edge, edge), 0.5, dtype=dtype, device=device)
        operations.append(functools.partial(torch.matmul, matrix, matrix))
    seconds = seconds_per_call(operations, device, rounds)
    return [[edge, 2e-12 * edge**3 / each] for edge, each in zip(edges, seconds, strict=True)]


def _attention(dtype: torch.dtype, device: torch.device, rounds: int) -> float:
    query = torch.randn(1, HEADS, SEQUENCE, HEAD_WIDTH, dtype=dtype, device=device)
    attention = functools.partial(
        F.scaled_dot_product_attention, query, query, query, is_causal=True
    )
    (seconds,) = seconds_per_call([attention], device, rounds)
    return 2.0 * HEADS * HEAD_WIDTH * SEQUENCE**2 / seconds


def _memory_rate(dtype: torch.dtype, device: torch.device, rounds: int) -> float:
    """Measure the operators between the products of a GPT block: sum, norm, softmax and GELU.

    GELU runs operator by operator, as in transformers. On the CPU, arithmetic dominates its time.
    """
    states = torch.randn(ROWS[device.type], WIDTH, dtype=dtype, device=device)
    operations = [
        functools.partial(torch.add, states, states),
        functools.partial(F.layer_norm, states, (WIDTH,)),
        functools.partial(torch.softmax, states, -1),
        functools.partial(_gelu, states),
    ]
    elements = (3 + 2 + 2 + 18) * states.numel()  # read or written
    return elements * dtype.itemsize / sum(seconds_per_call(operations, device, rounds))


def _gelu(states: torch.Tensor) -> torch.Tensor:
    """GELU in eight operators: six unary, two binary."""
    cubes = states + 0.044715 * torch.pow(states, 3.0)
    return 0.5 * states * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * cubes))


def _first_write(device: torch.device, rounds: int) -> float:
    """Measure newly mapped memory; 0 where the allocator reuses freed memory."""
    if device.type != "cpu":
        return 0.0
    kept = torch.empty(NEW_BYTES, dtype=torch.uint8)
    operations = [lambda: torch.empty(NEW_BYTES, dtype=torch.uint8).zero_(), kept.zero_]
    first, again = seconds_per_call(operations, device, rounds)
    return max(0.0, first - again) / NEW_BYTES


def _host_rate(device: torch.device, rounds: int) -> float:
    """Measure copies to and from host memory; on the CPU, copies within its memory."""
    size = 2**25
    here = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.zeros(size, dtype=torch.uint8, device=device)
    operations = [
        functools.partial(there.copy_, here, True),
        functools.partial(here.copy_, there, True),
    ]
    return size / max(seconds_per_call(operations, device, rounds))


def free_memory(device: torch.device, ranks_on_node: int) -> int:
    """Return the free bytes per rank, on the rank with the least. A collective call.

    CPU ranks divide the memory of their node. Raises NearlinearError if it is unknown.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    else:
        dist.barrier()  # every process has its initial size
        free = free_host_memory() // ranks_on_node
    least = torch.tensor(free, dtype=torch.int64, device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return int(least)


def free_host_memory() -> int:
    """Return the bytes that processes of this machine can allocate, within their cgroup limits."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable:"))
        groups = Path("/proc/self/cgroup").read_text()
    except (OSError, StopIteration):
        raise NearlinearError(
            "this system does not report its free memory. Give it, as in --memory 8 (GiB per rank)."
        ) from None
    return min([int(available.split()[1]) * 1024, *cgroup_free_memory(groups, CGROUPS)])


def cgroup_free_memory(groups: str, mounted: Path) -> list[int]:
    """Return the free bytes within each cgroup limit of this process.

    Reclaimable file cache counts as free. Inside a container, its own group is the root of the
    mount.

    Args:
        groups: Text of /proc/self/cgroup.
        mounted: Mount point of the cgroup file system.
    """
    free = []
    for line in groups.splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds not in ("", "memory"):
            continue
        base = mounted / kinds  # "" is cgroup version 2
        names = ("memory.max", "memory.current", "inactive_file")
        if kinds:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        below = path.strip("/").split("/") if path.strip("/") else []
        for depth in range(len(below) + 1):
            each = _cgroup_free(base.joinpath(*below[:depth]), *names)
            free += [] if each is None else [each]
    return free


def _cgroup_free(folder: Path, limit: str, used: str, cache: str) -> int | None:
    try:
        most = (folder / limit).read_text().strip()
        now = int((folder / used).read_text())
        rows = (row.split() for row in (folder / "memory.stat").read_text().splitlines())
        stat = {row[0]: row[1] for row in rows}
    except OSError:
        return None
    if most == "max":
        return None
    return max(0, int(most) - now + int(stat.get(cache, 0)))
