"""nccl-tests style tables, all contenders in one row, and the same numbers as CSV."""

import csv
import math
from collections.abc import Iterable
from pathlib import Path

from .measure import Sample
from .patterns import Job
from .sizes import show

COLUMNS = (("median", "(us)", 10), ("min", "(us)", 10), ("algbw", "(GB/s)", 7),
           ("busbw", "(GB/s)", 7), ("#wrong", "", 7))  # fmt: skip
_WIDTH = sum(width for *_, width in COLUMNS) + len(COLUMNS) - 1


class Table:
    """Prints one pattern, operation and data type of several contenders, a row per size."""

    def __init__(self, labels: list[str], against: str):
        self.labels, self.against = labels, against
        self.others = [label for label in labels if label != against]

    def head(self, title: str) -> list[str]:
        """The lines above the rows."""
        ratios = [f"{self.against}/{label}" for label in self.others]
        self.widths = [max(16, len(ratio)) for ratio in ratios]
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
        job = samples[0].job
        cells = "".join(f" | {_cells(sample)}" for sample in samples)
        by_label = {sample.contender.label: sample for sample in samples}
        ratios = [
            f"{r:.2f} ({m:.2f})".rjust(width)
            for label, width in zip(self.others, self.widths, strict=True)
            for r, m in [ratio(by_label[self.against], by_label[label])]
        ]
        return (
            f"{job.bytes:>12} {job.count:>12} {dtype_name(job):>9} {reduce_name(job):>6}  "
            f"{cells}{' | ' if ratios else ''}{' '.join(ratios)}"
        )


def ratio(slow: Sample, fast: Sample) -> tuple[float, float]:
    """How many times the first's time the second's is below it: of medians, of minima."""
    return slow.median / fast.median, slow.minimum / fast.minimum


def summary(rows: list[list[Sample]], against: str) -> list[dict]:
    """Geometric mean and smallest ratio to ``against``, per pattern, operation, type, label."""
    found: dict[tuple, list[tuple[float, float, int]]] = {}
    for samples in rows:
        base = next(s for s in samples if s.contender.label == against)
        for sample in samples:
            if sample is not base:
                key = (sample.pattern, sample.job.operation, dtype_name(sample.job),
                       sample.contender.label)  # fmt: skip
                found.setdefault(key, []).append((*ratio(base, sample), sample.job.bytes))
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
        f"at {show(entry['smallest_at_bytes'])}"
    )


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def dtype_name(job: Job) -> str:
    return str(job.dtype).removeprefix("torch.")


def reduce_name(job: Job) -> str:
    return "none" if job.operation == "all_gather" else job.reduce


def entry(sample: Sample) -> dict:
    """A sample as a flat record, for CSV and JSON."""
    job = sample.job
    return {
        "operation": job.operation,
        "pattern": sample.pattern,
        "dtype": dtype_name(job),
        "reduce": reduce_name(job),
        "ranks": job.ranks,
        "bytes": job.bytes,
        "count": job.count,
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
        _time(sample.median),
        _time(sample.minimum),
        f"{sample.algorithm_bandwidth / 1e9:.2f}",
        f"{sample.bus_bandwidth / 1e9:.2f}",
        str(sample.wrong),
    )
    return " ".join(f"{n:>{column[2]}}" for n, column in zip(numbers, COLUMNS, strict=True))


def _time(seconds: float) -> str:
    us = seconds * 1e6
    return f"{us:.2f}" if us < 100 else f"{us:.1f}" if us < 10_000 else f"{us:.0f}"
