"""Tables of microseconds per call of every contender, and the engine against the best MPI."""

import math

from ci.benchmarks.collectives.options import format_size

from .contenders import Contender
from .measure import Key, MeasureConfig, Sample

Row = list[str]


def tables(found: dict[Key, Sample], contenders: list[Contender], config: MeasureConfig) -> str:
    """Return a Markdown table per number of ranks and operation."""
    parts = []
    for ranks in config.ranks:
        for operation in config.operations:
            found_rows = (_row(found, contenders, ranks, operation, n) for n in config.sizes)
            rows = [row for row in found_rows if row]
            names = [c.name for c in contenders if _measured(found, ranks, operation, c.name)]
            if not rows:
                continue
            head = ["size", *names]
            if _compares(contenders):
                head += ["best MPI", "best MPI / engine"]
            parts.append(
                f"{operation}, {ranks} ranks: microseconds per call, median (minimum)\n\n"
                + _markdown([head, *rows])
            )
            if _compares(contenders):
                parts[-1] += "\n\n" + _summary(found, contenders, ranks, operation, config.sizes)
    return "\n\n".join(parts)


def speed_ratio(
    found, contenders, ranks: int, operation: str, size: int
) -> tuple[float, float] | None:
    """Return the best MPI's time over the engine's, of (medians, minima); None without either.

    The engine is faster where the ratio is above 1.
    """
    engine = found.get((ranks, operation, size, "engine"))
    mpi = _samples(found, contenders, ranks, operation, size)
    if not engine or not mpi:
        return None
    best_median = min(sample.median for sample in mpi.values())
    best_minimum = min(sample.minimum for sample in mpi.values())
    return best_median / engine.median, best_minimum / engine.minimum


def _row(found, contenders, ranks: int, operation: str, size: int) -> Row | None:
    cells = []
    for contender in contenders:
        if not _measured(found, ranks, operation, contender.name):
            continue
        sample = found.get((ranks, operation, size, contender.name))
        text = f"{_us(sample.median)} ({_us(sample.minimum)})" if sample else "-"
        cells.append(text + (f" **{sample.wrong} WRONG**" if sample and sample.wrong else ""))
    if all(cell == "-" for cell in cells):
        return None
    if _compares(contenders):
        mpi = _samples(found, contenders, ranks, operation, size)
        cells.append(min(mpi, key=lambda name: mpi[name].median) if mpi else "-")
        both = speed_ratio(found, contenders, ranks, operation, size)
        cells.append(f"{both[0]:.2f} ({both[1]:.2f})" if both else "-")
    return [format_size(size), *cells]


def _summary(found, contenders, ranks: int, operation: str, sizes: list[int]) -> str:
    lines = []
    for label, chosen in (
        ("all sizes", sizes),
        ("64 KiB and up", [s for s in sizes if s >= 65536]),
    ):
        both = [r for s in chosen if (r := speed_ratio(found, contenders, ranks, operation, s))]
        if not both:
            continue
        median, minimum = (
            math.exp(sum(map(math.log, x)) / len(x)) for x in zip(*both, strict=True)
        )
        worst = min(r[0] for r in both)
        lines.append(
            f"{label}: geometric mean {median:.2f} (of minima {minimum:.2f}), "
            f"smallest ratio of medians {worst:.2f}"
        )
    return "; ".join(lines)


def _measured(found, ranks: int, operation: str, name: str) -> bool:
    return any(key[0] == ranks and key[1] == operation and key[3] == name for key in found)


def _samples(found, contenders, ranks: int, operation: str, size: int) -> dict[str, Sample]:
    names = [contender.name for contender in contenders if contender.is_mpi]
    keys = {name: (ranks, operation, size, name) for name in names}
    return {name: found[key] for name, key in keys.items() if key in found}


def _compares(contenders: list[Contender]) -> bool:
    return any(c.name == "engine" for c in contenders) and any(c.is_mpi for c in contenders)


def _us(seconds: float) -> str:
    us = seconds * 1e6
    return f"{us:.1f}" if us < 100 else f"{us:.0f}"


def _markdown(rows: list[Row]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|")
    return "\n".join(lines)
