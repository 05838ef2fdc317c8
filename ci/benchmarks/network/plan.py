"""What is measured, and the arithmetic of links: how many bytes must cross a node's NIC."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass

OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce")
CEILING = 0.955  # of a link's rate is left to data by Ethernet, IP and TCP headers
DTYPE = "float32"

_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


@dataclass(frozen=True)
class Plan:
    """What every rank is told. ``sizes`` are bytes per node, ``rate`` is in bits per second."""

    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    backends: tuple[str, ...]  # [LABEL=]NAME
    plugins: tuple[str, ...]  # packages that register backends when imported
    rate: int
    blocks: int
    block_seconds: float
    timeout_seconds: float

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        lists = ("operations", "sizes", "backends", "plugins")
        return cls(**{k: tuple(v) if k in lists else v for k, v in json.loads(text).items()})


def parse_rate(text: str) -> int:
    """Bits per second of a rate as tc writes it, ``200mbit`` say; ValueError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?bit)", text.strip().lower())
    if not match or float(match[1]) == 0:
        raise ValueError(f"{text!r} is not a rate: write 200mbit or 1gbit")
    return round(float(match[1]) * _UNITS[match[2]])


def show_rate(rate: int) -> str:
    """``200000000`` as ``200 Mbit/s``."""
    unit = next(u for u in ("gbit", "mbit", "kbit", "bit") if rate >= _UNITS[u])
    return f"{rate / _UNITS[unit]:g} {unit.capitalize()}/s"


def necessary_bytes(operation: str, nodes: int, size: int) -> int:
    """Bytes that each node's NIC must send, and as many receive, in one collective.

    ``size`` is bytes per node. all_gather: a node lacks what the other nodes contribute, each
    ``size`` bytes, whatever its number of ranks. reduce_scatter: the same seen backwards, a sum
    made on the node for every other node. all_reduce: the one after the other.
    """
    return (2 if operation == "all_reduce" else 1) * size * (nodes - 1)
