"""The few numbers of the time model that no data sheet gives: fitted once, for all machines.

``data/parameters.toml`` holds them; `python -m ci.planner.fit` writes it. None belongs to one
source, one model or one kind of GPU.
"""

import dataclasses
import tomllib
from dataclasses import dataclass
from functools import cache

from .hardware import DATA

FILE = DATA / "parameters.toml"


@dataclass(frozen=True)
class Parameters:
    """How close training comes to what hardware can do at most."""

    matmul_share: float
    """of the best matrix product measured, that large products reach within training"""
    wave_share: float
    """of the multiprocessors that a product's last wave of tiles leaves idle, that stay idle"""
    memory_share: float
    """of the memory's rate, that kernels of one pass reach"""
    flash_share: float
    """of the rate of large products, that fused attention reaches"""
    kernel_seconds: float
    """seconds from one kernel's end to the next one's work"""
    link_share: float
    """of the rate between GPUs of a node, that collectives reach"""
    network_share: float
    """of the network's rate, that rings of NCCL reach"""
    hop_inside: float
    """seconds a ring takes from GPU to GPU in a node"""
    hop_between: float
    """seconds a ring takes from node to node"""
    borrowed_share: float
    """of the compute rate, that a collective takes while it runs beside computation"""
    straggler: float
    """standard deviation of a rank's time over its mean: all wait for the slowest"""
    fresh_seconds: float = 0.0
    """seconds for each GB of memory that is written for the first time: its pages are cleared; 0 on
    GPUs, where memory that was given back is kept"""


BOUNDS = {
    "matmul_share": (0.6, 1.0),
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
"""What is possible: the fit stays within. A collective borrows at most the multiprocessors that it
occupies, 24 of an A100's 108 (AWS, "Enable faster training with Amazon SageMaker data parallel
library", 2023)."""

EXPECTED = {
    "matmul_share": 0.92,
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
"""What is to be expected of such machines: where the fit stays for what no run tells. The network's
share is AWS's for NCCL on 32 p4d nodes (the same source)."""


def load() -> Parameters:
    """The fitted ones."""
    return Parameters(**_table()["parameters"])


def on(node) -> Parameters:
    """The fitted ones, with what was measured on ``node`` itself in their place."""
    return dataclasses.replace(load(), **node.measured)


def left_out() -> dict[str, Parameters]:
    """By source: those fitted without its rows."""
    return {name: Parameters(**values) for name, values in _table().get("left_out", {}).items()}


def errors(of: str = "errors") -> dict[str, float]:
    """How many runs, the median error and its 90th percentile: of those that were fitted, or of
    those that no fit has seen (``held_out``)."""
    return _table()[of]


def to_toml(
    fitted: Parameters,
    without: dict[str, Parameters],
    errors: dict[str, float],
    held_out: dict[str, float],
) -> str:
    """The text of the file, each number with its meaning."""
    from ..schema import to_toml

    lines = ["# Written by python -m ci.planner.fit. Do not edit: fit again.", "", "[parameters]"]
    lines += to_toml(fitted).splitlines()
    lines += ["", "[errors]   # of step times, as shares of the published ones"]
    lines += [f"{name} = {value:.4g}" for name, value in errors.items()]
    lines += ["", "[held_out]   # of runs that no fit has seen"]
    lines += [f"{name} = {value:.4g}" for name, value in held_out.items()]
    for name, each in without.items():
        lines += ["", f'[left_out."{name}"]   # fitted without the rows of that source']
        lines += [f"{key} = {value:.6g}" for key, value in dataclasses.asdict(each).items()]
    return "\n".join(lines) + "\n"


@cache
def _table() -> dict:
    return tomllib.loads(FILE.read_text(encoding="utf-8"))
