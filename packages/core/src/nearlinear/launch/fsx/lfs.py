"""Lustre's own tool, ``lfs``: which files are only in S3, bring them, and how files are striped.

Formats are those that ``lfs hsm_state``, ``lfs hsm_restore`` and ``lfs getstripe`` print, of Lustre
2.10 to 2.15. A file that is "released" has its name and size in the file system, and its bytes in
S3 alone. Source: Lustre's manual, chapters on HSM and on file layout.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import ConfigError

BATCH = 500  # files of one call: its command line stays short
STATE = re.compile(r"^(?P<path>.*): \((?P<bits>0x[0-9a-f]+)\)(?P<words>[^,\n]*)", re.MULTILINE)
EXISTS, ARCHIVED, RELEASED = 0x1, 0x8, 0x4


@dataclass(frozen=True)
class State:
    """Where a file's bytes are."""

    released: bool
    """only in S3"""
    archived: bool
    """in S3; here too, unless released"""


@dataclass(frozen=True)
class Stripes:
    """A stretch of a file, and over how many storage targets it is spread."""

    end: int | None
    """first byte after it; None: the file's"""
    count: int
    """-1: all targets"""
    size: int
    """bytes on one target before the next one's turn"""


def there() -> bool:
    """Whether this machine has the tool."""
    return shutil.which("lfs") is not None


def states(paths: Iterable[Path]) -> dict[Path, State]:
    """Of files on Lustre. Raises ConfigError where ``lfs`` does not know them."""
    found: dict[Path, State] = {}
    for batch in batches(list(paths)):
        for path, bits in parse_states(_run("hsm_state", batch)).items():
            found[Path(path)] = State(bool(bits & RELEASED), bool(bits & ARCHIVED))
    return found


def parse_states(text: str) -> dict[str, int]:
    """Bits by file of what ``lfs hsm_state`` prints."""
    return {found["path"]: int(found["bits"], 16) for found in STATE.finditer(text)}


def restore(paths: Sequence[Path]) -> None:
    """Ask for files to be brought from S3; returns at once. Raises ConfigError where refused."""
    for batch in batches(paths):
        _run("hsm_restore", batch)


def stripes(path: Path) -> list[Stripes]:
    """The layout of a file or a folder, stretch by stretch."""
    return parse_stripes(_run("getstripe", ["-d", path] if path.is_dir() else [path]))


def parse_stripes(text: str) -> list[Stripes]:
    """Of what ``lfs getstripe`` prints: one stretch, or those of a progressive layout."""
    found, end, count = [], None, None
    for name, value in re.findall(
        r"(lcme_extent\.e_end|(?:lmm_)?stripe_count|(?:lmm_)?stripe_size):\s+(-?\w+)", text
    ):
        if name == "lcme_extent.e_end":
            end = None if value == "EOF" else int(value)
        elif name.endswith("stripe_count"):
            count = int(value)
        elif count is not None:
            found.append(Stripes(end, count, int(value)))
            count = None
    return found


def batches(paths: Sequence[Path], size: int = BATCH) -> Iterable[Sequence[Path]]:
    return (paths[start : start + size] for start in range(0, len(paths), size))


def _run(verb: str, arguments: Sequence) -> str:
    done = subprocess.run(
        ["lfs", verb, *map(str, arguments)], capture_output=True, text=True, errors="replace"
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        denied = "Operation not permitted" in lines[-1] or "Permission denied" in lines[-1]
        fix = "; run it as root" if denied else ""
        raise ConfigError(f"lfs {verb}: {lines[-1]}{fix}")
    return done.stdout
