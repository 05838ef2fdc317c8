"""Hardware table: GPUs, nodes and EC2 instance types, each figure with its source.

The figures are in ``hardware.toml``. The planner reads rates and prices, the launcher reads GPU and
EFA counts of instance types, and the trainer reads the peak FLOPS that MFU is relative to.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class InstanceType:
    """Devices of one EC2 instance type."""

    gpus: int
    """Number of GPUs."""
    efa_interfaces: int
    """Maximum number of network interfaces with EFA; 0 if EFA is not supported."""
    local_gb: int = 0
    """Total size of the local disks in GB; 0 if there are none or their size is unknown."""


@cache
def load_table() -> dict[str, Any]:
    """Return the parsed ``hardware.toml``. Callers must not modify it."""
    return tomllib.loads(Path(__file__).with_name("hardware.toml").read_text(encoding="utf-8"))


@cache
def instance_types() -> dict[str, InstanceType]:
    """Return all EC2 instance types with GPUs by name, without SageMaker's ``ml.`` prefix."""
    table = load_table()
    records = {**table["instance_type"], **table["node"]}
    return {
        name: InstanceType(record["gpus"], record["efa_interfaces"], record.get("local_gb", 0))
        for name, record in records.items()
        if "efa_interfaces" in record  # nodes outside EC2, such as a DGX, have no EFA record
    }


def find_instance_type(name: str) -> InstanceType | None:
    """Return the instance type ``name``, with or without ``ml.``, or None if it is unknown."""
    return instance_types().get(name.removeprefix("ml."))


def offering_regions(name: str) -> list[str]:
    """Return the regions in which EC2 offers instance type ``name``; empty if they are unknown."""
    table, name = load_table()["offered_in"], name.removeprefix("ml.")
    return (table.get(name) or table.get(name.partition(".")[0], "")).split()


def is_recorded_region(region: str) -> bool:
    """Return True if `offering_regions` covers ``region``."""
    return region in load_table()["offered_in"]["recorded"].split()


def peak_tflops(device_name: str, precision: str) -> float | None:
    """Return the dense peak of a GPU in TFLOPS, or None if the table has no figure.

    Args:
        device_name: Device name as CUDA reports it, such as "NVIDIA A100-SXM4-80GB".
        precision: One of fp32 (without TF32), fp16, bf16 or fp8.
    """
    table = load_table()
    peaks = {name: gpu["peak_tflops"] for name, gpu in table["gpu"].items()}
    models = {name.partition("-")[0]: rates for name, rates in peaks.items()}  # "A100-80GB": "A100"
    models |= table["peak_tflops"]
    for model in sorted(models, key=len, reverse=True):  # "B200" is a part of "GB200"
        if model in device_name and precision in models[model]:
            return models[model][precision]
    return None
