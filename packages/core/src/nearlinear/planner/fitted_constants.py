"""Constants of the time model that no data sheet gives, fitted once for all machines.

``data/parameters.toml`` holds them; `python -m ci.planner_validation.fit` writes it. No constant
belongs to one source or one model, and one to a generation of GPUs: `throttled_share`.
"""

import dataclasses
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..config.schema import to_toml as _fields_to_toml
from .cluster import Node

FILE = Path(__file__).parent / "data" / "parameters.toml"


@dataclass(frozen=True)
class FittedConstants:
    """Fractions of peak rates that training reaches, and latencies."""

    matmul_share: float
    """share of the best measured matrix product that large products reach in training"""
    throttled_share: float
    """share of that rate that remains where the power limit binds in training (Hopper and later)"""
    wave_share: float
    """share of the multiprocessors left idle by a product's last wave of tiles that stay idle"""
    memory_share: float
    """share of the memory bandwidth that elementwise kernels reach"""
    flash_share: float
    """share of the rate of large products that fused attention reaches"""
    kernel_seconds: float
    """seconds between the end of one kernel and the start of the next"""
    link_share: float
    """share of the bandwidth between GPUs of a node that collectives reach"""
    network_share: float
    """share of the network bandwidth that NCCL's rings reach"""
    hop_inside: float
    """seconds of a ring hop between GPUs of a node"""
    hop_between: float
    """seconds of a ring hop between nodes"""
    borrowed_share: float
    """share of the compute rate lost while a collective runs concurrently"""
    straggler: float
    """standard deviation of a rank's time over its mean: all ranks wait for the slowest"""
    fresh_seconds: float = 0.0
    """seconds per GB of memory written for the first time, to clear its pages; 0 on GPUs, where
    freed memory is reused"""


BOUNDS = {
    "matmul_share": (0.6, 1.0),
    "throttled_share": (0.8, 1.0),
    "wave_share": (0.0, 1.0),
    "memory_share": (0.4, 1.0),
    "flash_share": (0.2, 1.0),
    "kernel_seconds": (1e-6, 2e-5),
    "link_share": (0.4, 0.95),
    "network_share": (0.4, 0.95),
    "hop_inside": (1e-6, 2e-5),
    "hop_between": (5e-6, 1e-4),
    "borrowed_share": (0.0, 24 / 108),
    "straggler": (0.0, 0.05),
}
"""Physical bounds of the fit. A collective takes at most the multiprocessors it occupies, 24 of an
A100's 108 (AWS, "Enable faster training with Amazon SageMaker data parallel library", 2023)."""

EXPECTED = {
    "matmul_share": 0.92,
    "throttled_share": 0.95,
    "wave_share": 0.3,
    "memory_share": 0.8,
    "flash_share": 0.5,
    "kernel_seconds": 5e-6,
    "link_share": 0.8,
    "network_share": 0.8,
    "hop_inside": 3e-6,
    "hop_between": 2e-5,
    "borrowed_share": 0.15,
    "straggler": 0.01,
}
"""Prior values, kept by the fit for constants that no run determines. The network share is AWS's
figure for NCCL on 32 p4d nodes (same source)."""


def load_constants() -> FittedConstants:
    """Return the fitted constants."""
    return FittedConstants(**_table()["parameters"])


def constants_for(node: Node) -> FittedConstants:
    """Return the fitted constants, overridden by the values measured on ``node``."""
    return dataclasses.replace(load_constants(), **node.measured)


def leave_one_out_constants() -> dict[str, FittedConstants]:
    """Return, by source, the constants fitted without the rows of that source."""
    rows = _table().get("left_out", {})
    return {name: FittedConstants(**values) for name, values in rows.items()}


def fit_errors(table: str = "errors") -> dict[str, float]:
    """Return number of runs, median error and 90th percentile.

    ``table``: ``errors`` for the runs of the fit, ``held_out`` for runs that no fit has seen.
    """
    return _table()[table]


def to_toml(
    constants: FittedConstants,
    without: dict[str, FittedConstants],
    errors: dict[str, float],
    held_out: dict[str, float],
) -> str:
    """Return the text of ``data/parameters.toml``, each number with its meaning."""
    header = "# Written by python -m ci.planner_validation.fit. Do not edit: fit again."
    lines = [header, "", "[parameters]"]
    lines += _fields_to_toml(constants).splitlines()
    lines += ["", "[errors]   # of step times, as fractions of the published ones"]
    lines += [f"{name} = {value:.4g}" for name, value in errors.items()]
    lines += ["", "[held_out]   # of runs that no fit has seen"]
    lines += [f"{name} = {value:.4g}" for name, value in held_out.items()]
    for name, each in without.items():
        lines += ["", f'[left_out."{name}"]   # fitted without the rows of this source']
        lines += [f"{key} = {value:.6g}" for key, value in dataclasses.asdict(each).items()]
    return "\n".join(lines) + "\n"


@cache
def _table() -> dict:
    return tomllib.loads(FILE.read_text(encoding="utf-8"))
