"""Curves, bars and numbers as text: in eighths of a character where it can be shown, else in ASCII.

Values are spread over the width there is: each column is the mean of its share of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

EIGHTHS = " ▁▂▃▄▅▆▇█"
ASCII = " .:-=+*#@"
UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def levels(encoding: str) -> str:
    """Nine characters from empty to full that ``encoding`` can show."""
    try:
        EIGHTHS.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return EIGHTHS


def sparkline(values: Sequence[float], width: int, shades: str = EIGHTHS) -> str:
    """``values`` in one line of at most ``width`` characters; the least is a low mark."""
    return chart(values, width, 1, shades)[0]


def chart(values: Sequence[float], width: int, height: int, shades: str = EIGHTHS) -> list[str]:
    """``values`` as ``height`` lines of at most ``width`` characters; blank where no number is."""
    columns = _shares(values, width)
    finite = [value for value in columns if math.isfinite(value)]
    if not finite:
        return [""] * height
    low, high = min(finite), max(finite)
    full = len(shades) - 1
    marks = [_mark(value, low, high, height * full) for value in columns]
    rows = []
    for row in reversed(range(height)):
        rows.append("".join(shades[max(0, min(full, mark - row * full))] for mark in marks))
    return rows


def bar(share: float, width: int, shades: str = EIGHTHS) -> str:
    """A filled part of ``width`` characters."""
    filled = round(max(0.0, min(1.0, share)) * width)
    return shades[-1] * filled + (shades[1] * (width - filled))


def short(value: float) -> str:
    """A rate in a few characters: 12.3k, 4.56M."""
    if not math.isfinite(value):
        return "-"
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.3g}{letter}"
    return f"{value:.3g}"


def number(value: float, form: str) -> str:
    """``value`` in a format, or a dash where it is unknown."""
    return f"{value:{form}}" if math.isfinite(value) else "-"


def duration(seconds: float) -> str:
    """A time in its two largest units: 2 d 03 h, 4 min 05 s, 12 s."""
    if not math.isfinite(seconds):
        return "-"
    whole = round(seconds)
    for size, unit, less, part in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // less:02d} {part}"
    return f"{whole} s"


def _shares(values: Sequence[float], width: int) -> list[float]:
    """``values`` cut into ``width`` parts, or one each where they are fewer; the mean of each."""
    width = max(1, width)
    if len(values) <= width:
        return list(values)
    edges = [i * len(values) // width for i in range(width + 1)]
    parts = (values[begin:end] for begin, end in zip(edges, edges[1:], strict=False))
    return [_mean(part) for part in parts]


def _mean(part: Sequence[float]) -> float:
    finite = [value for value in part if math.isfinite(value)]
    return sum(value / len(finite) for value in finite) if finite else math.nan


def _mark(value: float, low: float, high: float, top: int) -> int:
    """How high a column stands, 1 to ``top``; 0 where there is no number."""
    if not math.isfinite(value):
        return 0
    span = high / 2 - low / 2  # halves: the difference of two floats may be none
    return 1 + round((value / 2 - low / 2) / span * (top - 1)) if span > 0 else max(1, top // 2)
