"""Settings of the network benchmark, and the bytes that must cross a node's NIC."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass

OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
CEILING = 0.955  # share of the link rate available to data after Ethernet, IP and TCP headers
DTYPE = "float32"

_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


@dataclass(frozen=True)
class NetworkConfig:
    """Settings passed to every rank as JSON."""

    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    """Bytes per node."""
    backends: tuple[str, ...]
    """Backends as [LABEL=]NAME."""
    plugins: tuple[str, ...]
    """Packages that register backends when imported."""
    rate: int
    """Link rate in bits per second."""
    blocks: int
    block_seconds: float
    timeout_seconds: float

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> NetworkConfig:
        lists = ("operations", "sizes", "backends", "plugins")
        return cls(**{k: tuple(v) if k in lists else v for k, v in json.loads(text).items()})


def parse_rate(text: str) -> int:
    """Return the bits per second of a rate in tc's notation, such as ``200mbit``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?bit)", text.strip().lower())
    if not match or float(match[1]) == 0:
        raise ValueError(f"{text!r} is not a rate. Expected a rate such as 200mbit or 1gbit.")
    return round(float(match[1]) * _UNITS[match[2]])


def show_rate(rate: int) -> str:
    """Format a rate: ``200000000`` as ``200 Mbit/s``."""
    unit = next(u for u in ("gbit", "mbit", "kbit", "bit") if rate >= _UNITS[u])
    return f"{rate / _UNITS[unit]:g} {unit.capitalize()}/s"


def necessary_bytes(operation: str, nodes: int, size: int) -> int:
    """Return the bytes that each node's NIC must send, and receive, in one collective.

    In an all-gather every node receives ``size`` bytes (per node) from each other node, independent
    of its number of ranks. A reduce-scatter is the reverse: a node sends a partial sum to every
    other node. An all-reduce is a reduce-scatter followed by an all-gather. In an all-to-all the
    ranks of a node together send ``size`` bytes to those of each other node.
    """
    return (2 if operation == "all_reduce" else 1) * size * (nodes - 1)
