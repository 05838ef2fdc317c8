"""Time workloads block by block, and print nccl-tests style tables of the samples.

Backends take turns: a block of back-to-back calls of A, one of B, one of A again, and so on, so
that background load affects all of them equally. The time of a block is that of its slowest rank;
the tables show the median and the minimum over blocks.
"""

from __future__ import annotations

import csv
import math
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ci.benchmarks.collectives.backends import Contender
from ci.benchmarks.collectives.options import format_size
from ci.benchmarks.collectives.patterns import Pattern, Workload

MAX_CALLS = 10_000
COLUMNS = (("median", "(us)", 10), ("min", "(us)", 10), ("algbw", "(GB/s)", 7),
           ("busbw", "(GB/s)", 7), ("#wrong", "", 7))  # fmt: skip
_WIDTH = sum(width for *_, width in COLUMNS) + len(COLUMNS) - 1


@dataclass(frozen=True)
class Blocks:
    """Blocks to measure per size and contender."""

    number: int = 8
    seconds: float = 0.03
    """Length of a block; it has at least two calls, however long they take."""


@dataclass(frozen=True)
class Sample:
    """Measurement of one contender and one workload."""

    contender: Contender
    pattern: str
    workload: Workload
    calls: int
    """Calls per block."""
    seconds: list[float]
    """Seconds per call, one entry per block."""
    wrong: int
    """Wrong elements, over all ranks and both checks."""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def minimum(self) -> float:
        return min(self.seconds)

    @property
    def algorithm_bandwidth(self) -> float:
        """Size over time in bytes per second (algbw of nccl-tests)."""
        return self.workload.bytes / self.median

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second on each rank's link under an optimal algorithm (busbw of nccl-tests)."""
        return self.algorithm_bandwidth * self.workload.bus_factor


def measure(
    name: str, pattern: Pattern, contenders: list[Contender], blocks: Blocks
) -> list[Sample]:
    """Measure one workload with every contender. Collective over the default group.

    Each contender's result is checked with new data before and after it is timed.

    Returns:
        One `Sample` per contender, in their order.
    """
    wrong = [_check(pattern, contender, salt=i) for i, contender in enumerate(contenders)]
    pattern.prepare_timing()
    first = slowest([_time_block(pattern, contender, 2) for contender in contenders])
    calls = [min(MAX_CALLS, max(2, math.ceil(blocks.seconds / t))) for t in first]
    times: list[list[float]] = []
    for _ in range(blocks.number):
        pairs = zip(contenders, calls, strict=True)
        times.append([_time_block(pattern, contender, n) for contender, n in pairs])
    seconds = slowest([t for row in times for t in row])
    for i, contender in enumerate(contenders):
        wrong[i] += _check(pattern, contender, salt=len(contenders) + i)
    totals = torch.tensor(wrong)
    dist.all_reduce(totals)
    return [
        Sample(
            contender, name, pattern.workload, calls[i], seconds[i :: len(contenders)], int(total)
        )
        for i, (contender, total) in enumerate(zip(contenders, totals, strict=True))
    ]


def _check(pattern: Pattern, contender: Contender, salt: int) -> int:
    pattern.fill(salt)
    dist.barrier()
    return pattern.workload.wrong(pattern.call(contender), salt)


def _time_block(pattern: Pattern, contender: Contender, calls: int) -> float:
    """Return this rank's seconds per call. One untimed call aligns the ranks first."""
    dist.barrier()
    pattern.call(contender)
    start = time.perf_counter()
    for _ in range(calls):
        pattern.call(contender)
    return (time.perf_counter() - start) / calls


def slowest(seconds: list[float]) -> list[float]:
    """Return the maximum of each time over ranks. Collective over the default group."""
    times = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return times.tolist()


class Table:
    """Format one pattern, operation and data type of several contenders, a row per size."""

    def __init__(self, labels: list[str], against: str) -> None:
        self.labels, self.against = labels, against
        self.others = [label for label in labels if label != against]
        self.widths = [max(16, len(f"{against}/{label}")) for label in self.others]

    def head(self, title: str) -> list[str]:
        """Return the lines above the rows."""
        ratios = [f"{self.against}/{label}" for label in self.others]
        names = "".join(f" | {label:^{_WIDTH}}" for label in self.labels)
        ratio_names = " ".join(f"{r:>{w}}" for r, w in zip(ratios, self.widths, strict=True))
        heads = [" ".join(f"{c[i]:>{c[2]}}" for c in COLUMNS) for i in (0, 1)]
        ratio_heads = " ".join(f"{'median (min)':>{w}}" for w in self.widths)
        bar = " | " if self.others else ""
        lines = [
            f"# {title}",
            f"#{'':>43}{names}{bar}{ratio_names}",
            f"#{'size':>11} {'count':>12} {'type':>9} {'redop':>6}  "
            + f" | {heads[0]}" * len(self.labels)
            + bar
            + ratio_heads,
            f"#{'(B)':>11} {'(elements)':>12} {'':>9} {'':>6}  "
            + f" | {heads[1]}" * len(self.labels),
        ]
        return [line.rstrip() for line in lines]

    def row(self, samples: list[Sample]) -> str:
        workload = samples[0].workload
        cells = "".join(f" | {_cells(sample)}" for sample in samples)
        by_label = {sample.contender.label: sample for sample in samples}
        ratios = [
            f"{r:.2f} ({m:.2f})".rjust(width)
            for label, width in zip(self.others, self.widths, strict=True)
            for r, m in [speedup(by_label[self.against], by_label[label])]
        ]
        return (
            f"{workload.bytes:>12} {workload.count:>12} {dtype_name(workload):>9} "
            f"{reduce_name(workload):>6}  {cells}{' | ' if ratios else ''}{' '.join(ratios)}"
        )


def speedup(baseline: Sample, sample: Sample) -> tuple[float, float]:
    """Return the baseline's time over the sample's time: (of medians, of minima)."""
    return baseline.median / sample.median, baseline.minimum / sample.minimum


def summary(rows: list[list[Sample]], against: str) -> list[dict]:
    """Summarize ratios to ``against`` per pattern, operation, data type and label."""
    found: dict[tuple, list[tuple[float, float, int]]] = {}
    for samples in rows:
        base = next(s for s in samples if s.contender.label == against)
        for sample in samples:
            if sample is not base:
                key = (sample.pattern, sample.workload.operation, dtype_name(sample.workload),
                       sample.contender.label)  # fmt: skip
                found.setdefault(key, []).append((*speedup(base, sample), sample.workload.bytes))
    return [
        {
            "pattern": pattern,
            "operation": operation,
            "dtype": dtype,
            "contender": label,
            "against": against,
            "geometric_mean": geometric_mean(r[0] for r in ratios),
            "geometric_mean_of_minima": geometric_mean(r[1] for r in ratios),
            "smallest": min(ratios)[0],
            "smallest_at_bytes": min(ratios)[2],
        }
        for (pattern, operation, dtype, label), ratios in found.items()
    ]


def summary_line(entry: dict) -> str:
    return (
        f"# {entry['operation']} {entry['pattern']} {entry['dtype']}: "
        f"{entry['against']}/{entry['contender']} geometric mean {entry['geometric_mean']:.2f} "
        f"(of minima {entry['geometric_mean_of_minima']:.2f}), smallest {entry['smallest']:.2f} "
        f"at {format_size(entry['smallest_at_bytes'])}"
    )


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def dtype_name(workload: Workload) -> str:
    return str(workload.dtype).removeprefix("torch.")


def reduce_name(workload: Workload) -> str:
    return workload.reduce if workload.reduces else "none"


def entry(sample: Sample) -> dict:
    """Convert a sample to a flat record for CSV and JSON."""
    workload = sample.workload
    return {
        "operation": workload.operation,
        "pattern": sample.pattern,
        "dtype": dtype_name(workload),
        "reduce": reduce_name(workload),
        "ranks": workload.ranks,
        "bytes": workload.bytes,
        "count": workload.count,
        "contender": sample.contender.label,
        "backend": sample.contender.backend,
        "calls": sample.calls,
        "median_us": round(sample.median * 1e6, 3),
        "min_us": round(sample.minimum * 1e6, 3),
        "algbw_GBps": round(sample.algorithm_bandwidth / 1e9, 4),
        "busbw_GBps": round(sample.bus_bandwidth / 1e9, 4),
        "wrong": sample.wrong,
    }


def write_csv(path: Path, entries: list[dict]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(entries[0]))
        writer.writeheader()
        writer.writerows(entries)


def _cells(sample: Sample) -> str:
    numbers = (
        _format_us(sample.median),
        _format_us(sample.minimum),
        f"{sample.algorithm_bandwidth / 1e9:.2f}",
        f"{sample.bus_bandwidth / 1e9:.2f}",
        str(sample.wrong),
    )
    return " ".join(f"{n:>{column[2]}}" for n, column in zip(numbers, COLUMNS, strict=True))


def _format_us(seconds: float) -> str:
    us = seconds * 1e6
    return f"{us:.2f}" if us < 100 else f"{us:.1f}" if us < 10_000 else f"{us:.0f}"
