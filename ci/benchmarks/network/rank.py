"""Rank process of the network benchmark. Rank 0 prints one line of JSON per operation and size.

A block is a number of back-to-back calls, timed on the slowest rank. Untimed calls precede a block
to align the ranks and to empty the links' token buckets, which pass the first 64 KB at memory
speed.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
from datetime import timedelta
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist

from ci.benchmarks.collectives import backends
from ci.benchmarks.collectives.measure import slowest
from ci.benchmarks.collectives.patterns import DTYPES, OutOfPlace, Workload

from .config import DTYPE, NetworkConfig, necessary_bytes

BUCKETS = 2 * 65536  # bytes that empty the token buckets at both ends of a link
BARRIERS = 8


class NicCounters:
    """Byte counters of the nodes' NICs, and the traffic of a barrier."""

    def __init__(self, interface: str):
        folder = Path("/sys/class/net") / interface / "statistics"
        self.counters = [folder / "tx_bytes", folder / "rx_bytes"]
        self.nodes = int(os.environ["GROUP_WORLD_SIZE"])
        self.node = int(os.environ["GROUP_RANK"])
        self.reads = os.environ["LOCAL_RANK"] == "0"
        dist.barrier()
        before = self.read()
        for _ in range(BARRIERS):
            dist.barrier()
        self.barrier = (self.read() - before) / BARRIERS

    def read(self) -> torch.Tensor:
        """Return this node's (sent, received) bytes on its first rank, zeros on others."""
        if not self.reads:
            return torch.zeros(2, dtype=torch.float64)
        numbers = [int(counter.read_text()) for counter in self.counters]
        return torch.tensor(numbers, dtype=torch.float64)

    def gather(self, crossed: torch.Tensor) -> torch.Tensor:
        """Return all nodes' (sent, received) bytes, shape (nodes, 2). Collective."""
        table = torch.zeros(self.nodes, 2, dtype=torch.float64)
        table[self.node] = crossed
        dist.all_reduce(table)
        return table


class Measurement:
    """Blocks of one backend for one operation and size."""

    def __init__(
        self, contender: backends.Contender, pattern: OutOfPlace, nics: NicCounters, necessary: int
    ):
        self.contender, self.pattern, self.nics = contender, pattern, nics
        self.necessary = necessary
        self.untimed = max(1, math.ceil(BUCKETS / necessary))
        self.calls = 2
        self.wrong = 0
        self.times: list[float] = []
        self.made = 0
        self.crossed = torch.zeros(2, dtype=torch.float64)

    def verify(self, salt: int) -> None:
        """Make one call with new data and count wrong elements."""
        self.pattern.fill(salt)
        dist.barrier()
        self.wrong += self.pattern.workload.wrong(self.pattern.call(self.contender), salt)

    def block(self) -> float:
        """Run one block and return the seconds per call on this rank."""
        before = self.nics.read()
        dist.barrier()
        for _ in range(self.untimed):
            self.pattern.call(self.contender)
        start = perf_counter()
        for _ in range(self.calls):
            self.pattern.call(self.contender)
        seconds = (perf_counter() - start) / self.calls
        dist.barrier()
        self.crossed += self.nics.read() - before - 2 * self.nics.barrier
        self.made += self.untimed + self.calls
        return seconds

    def record(self, rate: int) -> dict:
        """Return the result of this backend. Collective."""
        wrong = torch.tensor(self.wrong)
        dist.all_reduce(wrong)
        ratios = self.nics.gather(self.crossed) / (self.necessary * self.made)
        ideal = self.necessary * 8 / rate  # seconds at the full rate
        median, best = statistics.median(self.times), min(self.times)
        return {
            "contender": self.contender.label,
            "link_used": round(ideal / median, 4),
            "link_used_at_best": round(ideal / best, 4),
            "sent_over_necessary": round(ratios[:, 0].max().item(), 4),
            "received_over_necessary": round(ratios[:, 1].max().item(), 4),
            "median_us": round(median * 1e6, 1),
            "min_us": round(best * 1e6, 1),
            "calls": self.calls,
            "wrong": wrong.item(),
            "blocks_us": [round(seconds * 1e6, 1) for seconds in self.times],
        }


def measure(
    operation: str,
    size: int,
    contenders: list[backends.Contender],
    nics: NicCounters,
    config: NetworkConfig,
) -> list[dict]:
    """Measure all backends and return a record per backend. Collective."""
    ranks = dist.get_world_size()
    total, rank = size * nics.nodes, dist.get_rank()
    if operation == "all_to_all":  # an input of each rank instead of one of all
        total //= ranks // nics.nodes
    workload = Workload.from_size(operation, total, DTYPES[DTYPE], "sum", rank, ranks)
    necessary = necessary_bytes(operation, nics.nodes, size)
    pattern = OutOfPlace(workload)
    measurements = [Measurement(contender, pattern, nics, necessary) for contender in contenders]
    for salt, measurement in enumerate(measurements):
        measurement.verify(salt)
    pattern.prepare_timing()
    first = slowest([each.block() for each in measurements])
    for measurement, seconds in zip(measurements, first, strict=True):
        measurement.calls = max(2, math.ceil(config.block_seconds / seconds))
    for _ in range(config.blocks):
        seconds_of_all = slowest([each.block() for each in measurements])
        for measurement, seconds in zip(measurements, seconds_of_all, strict=True):
            measurement.times.append(seconds)
    for salt, measurement in enumerate(measurements, len(measurements)):
        measurement.verify(salt)
    settings = {
        "operation": operation,
        "ranks_per_node": ranks // nics.nodes,
        "bytes_per_node": size,
        "bytes": workload.bytes,
        "necessary_bytes": necessary,
    }
    return [{**settings, **each.record(config.rate)} for each in measurements]


def main(text: str) -> None:
    config = NetworkConfig.from_json(text)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=config.timeout_seconds))
    backends.import_plugins(config.plugins)
    contenders = backends.make_contenders(backends.parse_backends(config.backends))
    nics = NicCounters(os.environ["GLOO_SOCKET_IFNAME"])
    for operation in config.operations:
        for size in config.sizes:
            records = measure(operation, size, contenders, nics, config)
            if dist.get_rank() == 0:
                print(json.dumps(records), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
