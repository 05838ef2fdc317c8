"""One rank: measure what the plan says; rank 0 prints a line of JSON per operation and size.

A block is a number of back-to-back calls, its time that of the slowest rank. Calls that are not
timed come first: they line the ranks up, and empty the links' token buckets, which let the first
64 KB pass at memory speed.
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

from nearlinear_collectives.bench import backends
from nearlinear_collectives.bench.data import DTYPES
from nearlinear_collectives.bench.measure import slowest
from nearlinear_collectives.bench.patterns import Job, Plain

from .plan import DTYPE, Plan, necessary_bytes

BUCKETS = 2 * 65536  # bytes after which the token buckets on both ends of a link are empty
BARRIERS = 8


class Nics:
    """What crosses the nodes' NICs, less the barriers around it that are not measured."""

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
        """This node's bytes (sent, received); zeros on all but its first rank."""
        if not self.reads:
            return torch.zeros(2, dtype=torch.float64)
        numbers = [int(counter.read_text()) for counter in self.counters]
        return torch.tensor(numbers, dtype=torch.float64)

    def of_all(self, crossed: torch.Tensor) -> torch.Tensor:
        """Every node's row of (sent, received), on every rank."""
        table = torch.zeros(self.nodes, 2, dtype=torch.float64)
        table[self.node] = crossed
        dist.all_reduce(table)
        return table


class Turns:
    """One backend's blocks of one operation and size."""

    def __init__(self, contender: backends.Contender, pattern: Plain, nics: Nics, necessary: int):
        self.contender, self.pattern, self.nics = contender, pattern, nics
        self.necessary = necessary
        self.untimed = max(1, math.ceil(BUCKETS / necessary))
        self.calls = 2
        self.wrong = 0
        self.times: list[float] = []
        self.made = 0
        self.crossed = torch.zeros(2, dtype=torch.float64)

    def check(self, salt: int) -> None:
        """One call with new data."""
        self.pattern.fill(salt)
        dist.barrier()
        self.wrong += self.pattern.job.wrong(self.pattern.call(self.contender), salt)

    def block(self) -> float:
        """Seconds per call on this rank."""
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
        """Collective: what rank 0 prints of this backend."""
        wrong = torch.tensor(self.wrong)
        dist.all_reduce(wrong)
        ratios = self.nics.of_all(self.crossed) / (self.necessary * self.made)
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
    operation: str, size: int, contenders: list[backends.Contender], nics: Nics, plan: Plan
) -> list[dict]:
    """A record per backend. Collective over the default group."""
    ranks = dist.get_world_size()
    job = Job.of_size(operation, size * nics.nodes, DTYPES[DTYPE], "sum", dist.get_rank(), ranks)
    necessary = necessary_bytes(operation, nics.nodes, size)
    pattern = Plain(job)
    turns = [Turns(contender, pattern, nics, necessary) for contender in contenders]
    for salt, turn in enumerate(turns):
        turn.check(salt)
    pattern.rest()
    first = slowest([turn.block() for turn in turns])
    for turn, seconds in zip(turns, first, strict=True):
        turn.calls = max(2, math.ceil(plan.block_seconds / seconds))
    for _ in range(plan.blocks):
        for turn, seconds in zip(turns, slowest([turn.block() for turn in turns]), strict=True):
            turn.times.append(seconds)
    for salt, turn in enumerate(turns, len(turns)):
        turn.check(salt)
    place = {
        "operation": operation,
        "ranks_per_node": ranks // nics.nodes,
        "bytes_per_node": size,
        "bytes": job.bytes,
        "necessary_bytes": necessary,
    }
    return [{**place, **turn.record(plan.rate)} for turn in turns]


def main(text: str) -> None:
    plan = Plan.from_json(text)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=plan.timeout_seconds))
    backends.import_plugins(list(plan.plugins))
    contenders = backends.make(backends.parse(list(plan.backends)))
    nics = Nics(os.environ["GLOO_SOCKET_IFNAME"])
    for operation in plan.operations:
        for size in plan.sizes:
            records = measure(operation, size, contenders, nics, plan)
            if dist.get_rank() == 0:
                print(json.dumps(records), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
