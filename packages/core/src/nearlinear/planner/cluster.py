"""Accelerators, nodes and clusters: data-sheet rates and measurements.

Nodes come from the table `nearlinear.hardware`, or from a file that ``nearlinear tune --machine``
wrote: see `parse_cluster`. A GPU with a lowered power limit runs at a lower clock: dynamic power
grows with the cube of the clock, because voltage follows it (Hennessy and Patterson, Computer
Architecture, 1.5).
"""

import dataclasses
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Literal

from ..errors import ConfigError
from ..hardware import load_table

BYTES_PER_GIGABIT = 1e9 / 8

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"
EXCHANGE = "exchange"
"""Kinds of measured collectives. ``exchange`` is a reduce-scatter in which ranks exchange parts and
add them up themselves: `distributed.collectives`."""


@dataclass(frozen=True)
class MeasuredCollective:
    """Timings of one collective for one placement of ranks, at several sizes."""

    kind: Literal["all-gather", "reduce-scatter", "all-reduce", "exchange"]
    backend: str
    ranks: int
    nodes: int
    sharing: int
    """groups of this kind that use one node's adapters at the same time"""
    points: list[list[float]]
    """[bytes of the whole tensor, seconds], ascending"""

    def seconds(self, size: float) -> float:
        """Seconds for ``size`` bytes, interpolated and extrapolated linearly."""
        points = self.points
        if len(points) == 1:
            return points[0][1] * size / points[0][0]
        place = 1
        while place < len(points) - 1 and points[place][0] < size:
            place += 1
        (low, first), (high, second) = points[place - 1], points[place]
        slope = max(0.0, (second - first) / (high - low))
        return max(first + slope * (size - low), min(each for _, each in points) / 2)

    @property
    def crossing(self) -> float:
        """Bytes over a node's adapters, or out of a rank, per byte of the whole tensor."""
        if self.nodes == 1:
            return (self.ranks - 1) / self.ranks
        return (self.ranks - 1) / self.ranks * self.sharing


@dataclass(frozen=True)
class MeasuredContention:
    """Slowdown of compute by collectives for one placement of ranks."""

    backend: str
    ranks: int
    nodes: int
    sharing: int
    """groups of this kind that use one node's adapters at the same time"""
    turn_share: float = 0.0
    """fractional slowdown of compute interleaved with collectives: cores switch between ranks"""
    turn_seconds: float = 0.0
    """seconds lost per interleaved collective of any size, to wake waiting ranks"""
    borrowed_share: float = 0.0
    """compute seconds lost per second of a concurrent collective; more than 1 where the cores of
    several ranks move bytes"""
    borrowed_seconds: float = 0.0
    """seconds lost per concurrent collective of any size"""

    def interleaved_cost(self, computing: float, count: float) -> float:
        """Seconds lost by ``computing`` seconds of compute to ``count`` interleaved collectives."""
        return self.turn_share * computing + self.turn_seconds * count

    def concurrent_cost(self, moving: float, count: float) -> float:
        """Seconds lost by compute to ``count`` concurrent collectives of ``moving`` seconds."""
        return self.borrowed_share * moving + self.borrowed_seconds * count


CONTENTION_COSTS = tuple(f.name for f in fields(MeasuredContention) if f.default == 0.0)
"""Names of the measured costs."""


@dataclass(frozen=True)
class Accelerator:
    """GPU, or one rank's part of a CPU."""

    name: str
    peak_tflops: dict[str, float]
    """dense peak by precision: fp32, fp16, bf16, fp8"""
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
    """best measured matrix product, by precision"""
    older_kernels: float = 1.0
    """share of its rate reached by kernels that use the previous generation's instructions"""
    products: dict[str, list[list[float]]] = field(default_factory=dict)
    """[edge of a cube, TFLOPS] as measured, by precision"""
    throttled: bool = False
    """the power limit binds in training: see `FittedConstants.throttled_share`"""

    @property
    def model(self) -> str:
        """Name without memory and power limit: H100 for H100-80GB."""
        return self.name.split("-")[0]

    @property
    def is_cpu(self) -> bool:
        """True if this is one rank's part of a measured CPU, with a single multiprocessor."""
        return self.multiprocessors == 1

    def peak(self, precision: str) -> float:
        """Return the peak FLOPS. Raises ConfigError if the GPU lacks the precision."""
        if precision not in self.peak_tflops:
            raise ConfigError(
                f"{self.name} does not support {precision}; it computes in "
                f"{', '.join(self.peak_tflops)}"
            )
        return self.peak_tflops[precision] * 1e12

    def best_product(self, precision: str) -> float:
        """Return the FLOPS of the best matrix product, measured or from the mean share of peak."""
        peak = self.peak(precision)
        measured = self.matmul_tflops.get(precision)
        return measured * 1e12 if measured else peak * _mean_matmul_share()


@dataclass(frozen=True)
class Node:
    """Machine with identical accelerators."""

    name: str
    gpu: Accelerator
    gpus: int
    network_gbps: float
    """total of all adapters, each way"""
    sources: list[str] = field(default_factory=list)
    usd_per_hour: float = 0.0
    """on demand; 0 = not known"""
    priced: str = ""
    """date and region of the price"""
    measured: dict[str, float] = field(default_factory=dict)
    """constants of the time model that replace the fitted ones here"""
    contention: list[MeasuredContention] = field(default_factory=list)
    collectives: list[MeasuredCollective] = field(default_factory=list)

    @property
    def network(self) -> float:
        """Network bandwidth in bytes per second, each way."""
        return self.network_gbps * BYTES_PER_GIGABIT


@dataclass(frozen=True)
class Cluster:
    """Identical nodes."""

    node: Node
    nodes: int
    gpus: int = 0
    """Ranks in total; 0 means every GPU of every node."""

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.gpus or self.nodes * self.node.gpus

    @property
    def gpu(self) -> Accelerator:
        return self.node.gpu

    def resized(self, nodes: int) -> "Cluster":
        """Return a cluster of ``nodes`` nodes of the same kind."""
        return dataclasses.replace(self, nodes=nodes, gpus=0)


def node_names() -> list[str]:
    """Return the names of all nodes in the table."""
    return list(_table()["node"])


def find_node(name: str) -> Node:
    """Return the node ``name``, with or without SageMaker's ``ml.``. Raises ConfigError."""
    nodes = _table()["node"]
    name = name.removeprefix("ml.")
    if name not in nodes:
        raise ConfigError(f"--cluster {name}: unknown node. Known nodes: {', '.join(nodes)}.")
    values = _known_fields(Node, nodes[name])
    return Node(name=name, **{**values, "gpu": find_accelerator(nodes[name]["gpu"])})


def find_accelerator(name: str) -> Accelerator:
    """Return the GPU ``name`` of the table. Raises ConfigError."""
    gpus = _table()["gpu"]
    if name not in gpus:
        raise ConfigError(f"unknown GPU {name!r}. Known GPUs: {', '.join(gpus)}.")
    return Accelerator(name=name, **_known_fields(Accelerator, gpus[name]))


def _known_fields(kind: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Drop the table's keys that only the launcher uses."""
    names = {each.name for each in fields(kind)}
    return {key: value for key, value in values.items() if key in names}


@cache
def _mean_matmul_share() -> float:
    """Mean share of peak of the best bf16 product, over the GPUs where it was measured."""
    shares = {
        (gpu["matmul_tflops"]["bf16"], gpu["peak_tflops"]["bf16"])
        for gpu in _table()["gpu"].values()
        if "matmul_tflops" in gpu
    }
    return sum(best / peak for best, peak in shares) / len(shares)


def _table() -> dict[str, Any]:
    return load_table()
