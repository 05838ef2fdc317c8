"""What one rank computes and copies per second, while every other rank does the same.

Ranks that share cores, memory or power get what they get in training. Every time is the slowest
rank's, the median of several rounds. Sizes are those that training has: products from small blocks
to large ones, activations of a megabyte and more.
"""

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn import functional as F

from ..runtime import Runtime
from .measure import finish, slowest_medians

CHUNK = 0.4  # seconds of equal calls that are timed together
EDGES = {"cpu": (128, 256, 512, 1024), "cuda": (512, 1024, 2048, 4096, 8192)}
"""Of the cubes whose products are timed."""
ROWS = {"cpu": 512, "cuda": 16384}
"""Of activations, 1024 wide: 2 MiB of float32 on the CPU, as small models have them there."""
DTYPES = {
    "cpu": {"fp32": torch.float32, "bf16": torch.bfloat16},
    "cuda": {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16},
}
NEW = 2**26  # bytes that malloc always maps anew
WIDTH, HEADS, SEQUENCE, HEAD_WIDTH = 1024, 8, 512, 64


@dataclass(frozen=True)
class Rates:
    """Of a rank."""

    products: dict[str, list[list[float]]]
    """[edge of a cube, TFLOPS] by precision"""
    memory: float
    """bytes per second that operators read and write"""
    fresh: float
    """seconds more per byte that is written for the first time"""
    kernel: float
    """seconds of an operator that has nothing to do"""
    attention: dict[str, float]
    """FLOPS of fused attention under a causal mask, what is hidden left out"""
    host: float
    """bytes per second to host memory or back, the slower"""


def measure_rates(now: Runtime, rounds: int) -> Rates:
    """The `Rates` of this job's ranks, all at once. A collective call."""
    device, dtypes = now.device, DTYPES[now.device.type]
    products = {name: _products(dtype, device, rounds) for name, dtype in dtypes.items()}
    attention = {name: _attention(dtype, device, rounds) for name, dtype in dtypes.items()}
    (kernel,) = per_call([functools.partial(torch.zeros(1, device=device).add, 1)], device, rounds)
    memory = _memory(next(iter(dtypes.values())), device, rounds)
    fresh = _fresh(device, rounds)
    return Rates(products, memory, fresh, kernel, attention, _host(device, rounds))


def per_call(ways: list[Callable], device: torch.device, rounds: int) -> list[float]:
    """Seconds of one call of each way, over chunks of many. A collective call."""
    once = torch.zeros(len(ways), dtype=torch.float64)
    for place, way in enumerate(ways):
        way()
        finish(device)
        begin = time.perf_counter()
        way()
        finish(device)
        once[place] = time.perf_counter() - begin
    once = once.to(device)
    dist.all_reduce(once, op=dist.ReduceOp.MAX)  # every rank calls as often
    counts = [max(1, math.ceil(CHUNK / max(seconds, 1e-7))) for seconds in once.tolist()]
    chunks = [functools.partial(repeat, *each) for each in zip(ways, counts, strict=True)]
    seconds = slowest_medians(chunks, device, rounds)
    return [taken / count for taken, count in zip(seconds, counts, strict=True)]


def repeat(way: Callable, count: int) -> None:
    for _ in range(count):
        way()


def _products(dtype: torch.dtype, device: torch.device, rounds: int) -> list[list[float]]:
    edges, ways = EDGES[device.type], []
    for edge in edges:
        matrix = torch.full((edge, edge), 0.5, dtype=dtype, device=device)
        ways.append(functools.partial(torch.matmul, matrix, matrix))
    seconds = per_call(ways, device, rounds)
    return [[edge, 2e-12 * edge**3 / each] for edge, each in zip(edges, seconds, strict=True)]


def _attention(dtype: torch.dtype, device: torch.device, rounds: int) -> float:
    query = torch.randn(1, HEADS, SEQUENCE, HEAD_WIDTH, dtype=dtype, device=device)
    way = functools.partial(F.scaled_dot_product_attention, query, query, query, is_causal=True)
    (seconds,) = per_call([way], device, rounds)
    return 2.0 * HEADS * HEAD_WIDTH * SEQUENCE**2 / seconds


def _memory(dtype: torch.dtype, device: torch.device, rounds: int) -> float:
    """Of what a GPT block has between its products: a sum, a norm, a softmax, and GELU operator by
    operator, as transformers computes it. On the CPU it is their arithmetic that takes the time."""
    states = torch.randn(ROWS[device.type], WIDTH, dtype=dtype, device=device)
    ways = [
        functools.partial(torch.add, states, states),
        functools.partial(F.layer_norm, states, (WIDTH,)),
        functools.partial(torch.softmax, states, -1),
        functools.partial(_gelu, states),
    ]
    numbers = (3 + 2 + 2 + 18) * states.numel()  # read or written
    return numbers * dtype.itemsize / sum(per_call(ways, device, rounds))


def _gelu(states: torch.Tensor) -> torch.Tensor:
    """Eight operators: six of one tensor, two of two."""
    cubes = states + 0.044715 * torch.pow(states, 3.0)
    return 0.5 * states * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * cubes))


def _fresh(device: torch.device, rounds: int) -> float:
    """Of memory that the allocator asks the system for; 0 where it keeps what it was given back."""
    if device.type != "cpu":
        return 0.0
    kept = torch.empty(NEW, dtype=torch.uint8)
    ways = [lambda: torch.empty(NEW, dtype=torch.uint8).zero_(), kept.zero_]
    first, again = per_call(ways, device, rounds)
    return max(0.0, first - again) / NEW


def _host(device: torch.device, rounds: int) -> float:
    """On the CPU, where that is no way at all, of a copy within its memory."""
    size = 2**25
    here = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.zeros(size, dtype=torch.uint8, device=device)
    ways = [functools.partial(there.copy_, here, True), functools.partial(here.copy_, there, True)]
    return size / max(per_call(ways, device, rounds))
