"""Output of commands: plain-text tables, rates and durations, and files named by flags."""

from __future__ import annotations

import math
import os
from pathlib import Path

from .errors import ConfigError


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
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * unit:  # which rounds to 1 with three digits
            scaled = value / unit
            return f"{scaled:,.0f}{letter}" if abs(scaled) >= 999.5 else f"{scaled:.3g}{letter}"
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


def check_output_file(flag: str, path: str, suffix: str, source: str = "") -> None:
    """Raise ConfigError if ``path`` cannot be written.

    Args:
        flag: Command-line flag that named the file, for messages.
        path: File to write. An empty path is accepted and means no file.
        suffix: Required suffix of the file name, such as ".json".
        source: Config file of the command, which must not be overwritten.
    """
    if not path:
        return
    file = Path(path)
    if file.suffix != suffix:
        raise ConfigError(f"{flag} {path}: the file name must end in {suffix}")
    if source and file.resolve() == Path(source).resolve():
        raise ConfigError(f"{flag} {path} is the config file itself: choose another file")
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"{flag} {path} cannot be written: choose a file in a writable folder")


def write_output_file(path: str, text: str) -> None:
    """Write ``text`` to ``path`` and print the path. An empty path means no file.

    Raises ConfigError if the file cannot be written.
    """
    if not path:
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror})") from None
    print(f"wrote {path}", flush=True)
