"""Sizes as people write them: ``1K``, ``64M``, and ranges such as ``1K:256M:4``.

K, M and G are powers of 1024, as in nccl-tests and as memory is counted.
"""

import re

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
SYNTAX = (
    "write bytes as 4096, 64K, 16M or 1G, and a range as FIRST:LAST:FACTOR, for instance 1K:256M:4"
)


def parse_size(text: str) -> int:
    """Bytes; ValueError for anything else than a positive whole number and a unit."""
    match = re.fullmatch(r"(\d+)([KMG]?)(i?B)?", text.strip(), re.IGNORECASE)
    if not match or int(match[1]) == 0:
        raise ValueError(f"{text!r} is not a size: {SYNTAX}")
    return int(match[1]) * UNITS[match[2].upper()]


def parse_sizes(texts: list[str]) -> list[int]:
    """All sizes of some words, each a size or a range, ascending and without repetition."""
    found: set[int] = set()
    for text in texts:
        parts = text.split(":")
        if len(parts) == 1:
            found.add(parse_size(text))
            continue
        if len(parts) > 3:
            raise ValueError(f"{text!r} is not a range of sizes: {SYNTAX}")
        size, last = parse_size(parts[0]), parse_size(parts[1])
        factor = int(parts[2]) if len(parts) == 3 and parts[2].isdigit() else 2
        if len(parts) == 3 and not (parts[2].isdigit() and factor > 1):
            raise ValueError(f"{text!r}: the factor must be a whole number above 1; {SYNTAX}")
        if size > last:
            raise ValueError(f"{text!r}: the first size is larger than the last; {SYNTAX}")
        while size <= last:
            found.add(size)
            size *= factor
    return sorted(found)


def show(size: int) -> str:
    """``65536`` as ``64 KiB``; one decimal where that says more."""
    power = min(3, (size.bit_length() - 1) // 10) if size else 0
    number = f"{size / 1024**power:.1f}".removesuffix(".0")
    return f"{number} {('B', 'KiB', 'MiB', 'GiB')[power]}"
