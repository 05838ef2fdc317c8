"""Plain-text tables, rates and durations for reports on a terminal or in a log."""

import math


def format_table(rows: list[tuple], left: tuple[int, ...] = (0,)) -> list[str]:
    """Align the columns of ``rows`` and return one line per row.

    Columns whose index is in ``left`` are aligned to the left, all others to the right.
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = zip(row, widths, range(len(row)), strict=True)
        padded = [c.ljust(w) if i in left else c.rjust(w) for c, w, i in cells]
        lines.append("  " + "  ".join(padded).rstrip())
    return lines


def format_rate(value: float) -> str:
    """Format a number with three digits and a decimal prefix: 12.3k, 4.56M; "-" if not finite."""
    if not math.isfinite(value):
        return "-"
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.3g}{letter}"
    return f"{value:.3g}"


def format_number(value: float, spec: str) -> str:
    """Format ``value`` by the format specification ``spec``; "-" if it is not finite."""
    return f"{value:{spec}}" if math.isfinite(value) else "-"


def format_duration(seconds: float) -> str:
    """Format a duration in its two largest units: 2 d 03 h, 4 min 05 s, 12 s."""
    if not math.isfinite(seconds):
        return "-"
    whole = round(seconds)
    for size, unit, smaller_size, smaller_unit in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // smaller_size:02d} {smaller_unit}"
    return f"{whole} s"
