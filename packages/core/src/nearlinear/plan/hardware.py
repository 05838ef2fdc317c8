"""Accelerators, nodes and clusters: what they can do at most, read from ``data/hardware.toml``.

A GPU held below its power limit keeps a lower clock: the power of switching grows with the cube of
the clock, because the voltage follows it (Hennessy and Patterson, Computer Architecture, 1.5).
"""

import dataclasses
import re
import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from ..errors import ConfigError
from . import machine
from .contention import Contention

DATA = Path(__file__).parent / "data"
BYTES_PER_GIGABIT = 1e9 / 8


@dataclass(frozen=True)
class Accelerator:
    """One GPU."""

    name: str
    peak_tflops: dict[str, float]
    """dense, by precision: fp32, fp16, bf16, fp8"""
    memory_gib: float
    hbm_gb_s: float
    link_gb_s: float
    """to the other GPUs of its node, each way"""
    host_gb_s: float
    """to host memory, each way"""
    multiprocessors: int
    watts: float
    sources: list[str]
    matmul_tflops: dict[str, float] = field(default_factory=dict)
    """the best that was measured of a matrix product, by precision"""
    older_kernels: float = 1.0
    """share of its rate that kernels reach which use the generation before's instructions"""
    products: dict[str, list[list[float]]] = field(default_factory=dict)
    """[edge of a cube, TFLOPS] as measured, by precision: see `machine`"""
    held_to_watts: float = 0.0
    """a lower power limit than the maker's; 0 = none"""

    @property
    def is_cpu(self) -> bool:
        """Whether it is a rank's part of a CPU that was measured, one multiprocessor by itself."""
        return self.multiprocessors == 1

    @property
    def clock(self) -> float:
        """Share of the usual clock that the power limit leaves under load."""
        return (self.held_to_watts / self.watts) ** (1 / 3) if self.held_to_watts else 1.0

    def peak(self, precision: str) -> float:
        """FLOPS. Raises ConfigError for a precision it does not have."""
        if precision not in self.peak_tflops:
            raise ConfigError(
                f"{self.name} has no {precision}: it computes in {', '.join(self.peak_tflops)}"
            )
        return self.peak_tflops[precision] * 1e12

    def best_product(self, precision: str) -> float:
        """FLOPS of the best matrix product: as measured, or by the mean share of those that are."""
        peak = self.peak(precision)
        measured = self.matmul_tflops.get(precision)
        best = measured * 1e12 if measured else peak * _mean_share()
        return best * self.clock


@dataclass(frozen=True)
class Node:
    """One machine."""

    name: str
    gpu: Accelerator
    gpus: int
    network_gbps: float
    """of all its adapters, each way"""
    sources: list[str] = field(default_factory=list)
    usd_per_hour: float = 0.0
    """on demand; 0 = not known"""
    priced: str = ""
    """when, and where"""
    measured: dict[str, float] = field(default_factory=dict)
    """parameters of the time model that hold here in place of the fitted ones"""
    contention: list[Contention] = field(default_factory=list)
    collectives: list[machine.Collective] = field(default_factory=list)

    @property
    def network(self) -> float:
        """Bytes per second, each way."""
        return self.network_gbps * BYTES_PER_GIGABIT


@dataclass(frozen=True)
class Cluster:
    """Equal nodes."""

    node: Node
    nodes: int
    gpus: int = 0
    """ranks in all; 0 = every GPU of every node"""

    @property
    def world(self) -> int:
        return self.gpus or self.nodes * self.node.gpus

    @property
    def gpu(self) -> Accelerator:
        return self.node.gpu


def names() -> list[str]:
    """Of all nodes in the table."""
    return list(_table()["node"])


def node(name: str) -> Node:
    """The node called ``name``, with or without SageMaker's ``ml.``. Raises ConfigError."""
    known = _table()["node"]
    found = known.get(name.removeprefix("ml."))
    if found is None:
        raise ConfigError(f"--cluster {name}: no such node here; known are {', '.join(known)}")
    return Node(name=name.removeprefix("ml."), **{**found, "gpu": accelerator(found["gpu"])})


def accelerator(name: str) -> Accelerator:
    """The GPU called ``name`` in the table. Raises ConfigError."""
    known = _table()["gpu"]
    if name not in known:
        raise ConfigError(f"no GPU {name!r} here: known are {', '.join(known)}")
    return Accelerator(name=name, **known[name])


def parse_cluster(text: str, tables: dict | None = None) -> Cluster:
    """``p4d.24xlarge:32`` is 32 of those nodes; without a number, one. Raises ConfigError.

    ``machine.toml:2`` is two of what ``nearlinear tune --machine machine.toml`` measured.
    ``tables``: what stands in such a file; the node they tell of goes by its name there.
    """
    found = re.fullmatch(r"([^:]+)(?::(\d{1,7}))?", text.strip())
    if not found or found[2] is not None and int(found[2]) < 1:
        raise ConfigError(f"--cluster {text}: expected NODE or NODE:NUMBER, as in p4d.24xlarge:32")
    name, nodes = found[1], int(found[2] or 1)
    if name.endswith(".toml"):
        return Cluster(machine.read(name), nodes)
    own = machine.of_tables(tables, "plan.machine") if tables else None
    return Cluster(own if own and own.name == name else node(name), nodes)


def resized(cluster: Cluster, nodes: int) -> Cluster:
    """As many nodes of the same kind."""
    return dataclasses.replace(cluster, nodes=nodes, gpus=0)


@cache
def _mean_share() -> float:
    """Of the peak that the best 16-bit product reaches, over the GPUs where it was measured."""
    shares = {
        (gpu["matmul_tflops"]["bf16"], gpu["peak_tflops"]["bf16"])
        for gpu in _table()["gpu"].values()
        if "matmul_tflops" in gpu
    }
    return sum(best / peak for best, peak in shares) / len(shares)


@cache
def _table() -> dict:
    return tomllib.loads((DATA / "hardware.toml").read_text(encoding="utf-8"))
