"""Machines that were measured: files that ``nearlinear tune --machine`` writes, and links by them.

A file has the tables of ``data/hardware.toml``, ``[gpu.NAME]`` and ``[node.NAME]``, with what was
reached in place of what data sheets promise; and beside them what no data sheet tells: products by
size, collectives by size and place, and the parameters of the time model that were measured there
in place of the fitted ones.
"""

import dataclasses
import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from .. import schema
from ..errors import ConfigError
from . import contention
from .contention import nearest

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"
EXCHANGE = "exchange"
"""A reduce-scatter of parts that ranks exchange and add up themselves: `parallel.scatter`."""

SHARES = ("matmul_share", "memory_share", "flash_share", "link_share", "network_share")
"""Parameters that a rate is multiplied by."""


@dataclass(frozen=True)
class Collective:
    """One kind of collective between ranks that stand in one way, timed for several sizes."""

    kind: Literal["all-gather", "reduce-scatter", "all-reduce", "exchange"]
    backend: str
    ranks: int
    nodes: int
    sharing: int
    """groups of that kind over one node's adapters, all at once"""
    points: list[list[float]]
    """[bytes of the whole tensor, seconds], ascending"""

    def seconds(self, size: float) -> float:
        """Of ``size`` bytes: between the points and beyond them in straight lines."""
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
        """Of a byte of the whole tensor, how many cross a node's adapters, or leave a rank."""
        if self.nodes == 1:
            return (self.ranks - 1) / self.ranks
        return (self.ranks - 1) / self.ranks * self.sharing


class MeasuredLinks:
    """Seconds of collectives between ranks of a measured node; as `links.Links`.

    A group that was not measured is taken for the nearest that was: as many more bytes as cross
    its links, and as many more pauses as it has ranks.
    """

    second_hop_borrows = True  # cores carry it, too

    def __init__(self, node, backend: str, exchanged: bool):
        rows, self.name = node.collectives, node.name
        self.host = node.gpu.host_gb_s * 1e9
        self.rows = _of(backend, rows)
        self.contention = _of(backend, node.contention)
        kinds = {row.kind for row in self.rows}
        self.scattering = EXCHANGE if exchanged and EXCHANGE in kinds else REDUCE_SCATTER

    def gather(self, size: float, group, direct=False, hierarchical=False) -> float:
        """All-gather of ``size`` bytes in all."""
        staged = hierarchical and group.nodes > 1 and group.on_node > 1
        if not staged:
            return self._seconds(ALL_GATHER, size, group)
        across = dataclasses.replace(
            group, ranks=group.nodes, sharing=group.sharing * group.on_node
        )
        inside = dataclasses.replace(group, ranks=group.on_node, nodes=1)
        first = self._seconds(ALL_GATHER, size / group.on_node, across)
        return first + group.nodes * self._seconds(ALL_GATHER, size / group.nodes, inside)

    def scatter(self, size: float, group) -> float:
        """Reduce-scatter of ``size`` bytes in all."""
        return self._seconds(self.scattering, size, group)

    def reduce(self, size: float, group) -> float:
        """All-reduce."""
        return self._seconds(ALL_REDUCE, size, group)

    def exchange(self, size: float, group) -> float:
        """All-to-all of ``size`` bytes on each rank: as much crosses as in a reduce-scatter."""
        kinds = {row.kind for row in self.rows}
        return self._seconds(EXCHANGE if EXCHANGE in kinds else REDUCE_SCATTER, size, group)

    def lost_in_turn(self, group, computing: float, count: float) -> float:
        """Seconds that ``computing`` takes longer with ``count`` collectives between it."""
        row = nearest(self.contention, group) if group.ranks > 1 else None
        return row.in_turn(computing, count) if row else 0.0

    def lost_beside(self, group, moving: float, count: float, direct=False) -> float:
        """Seconds that computation loses to ``count`` collectives of ``moving`` seconds in all."""
        row = nearest(self.contention, group) if group.ranks > 1 else None
        return row.beside(moving, count) if row else 0.0

    def send(self, size: float, across: bool) -> float:
        """From one rank to another: half of a gather between two, where each sends a half."""
        from .groups import Group

        return self.gather(2 * size, Group(2, 2 if across else 1, 1))

    def _seconds(self, kind: str, size: float, group) -> float:
        if group.ranks == 1:
            return 0.0
        row = self._nearest(kind, group)
        asked = dataclasses.replace(
            row, ranks=group.ranks, nodes=group.nodes, sharing=group.sharing
        )
        pause = row.seconds(0.0) * ((group.ranks - 1) / (row.ranks - 1) - 1.0)
        return row.seconds(size * asked.crossing / row.crossing) + pause

    def _nearest(self, kind: str, group) -> Collective:
        row = nearest([row for row in self.rows if row.kind == kind], group)
        if row is None:
            where = "between nodes" if group.nodes > 1 else "inside a node"
            raise ConfigError(
                f"{self.name} was measured without any {kind} {where}: run nearlinear tune "
                "--machine on ranks that stand so"
            )
        return row


def _of(backend: str, rows: list) -> list:
    """Those of ``backend``; where it was not measured, of whichever was first."""
    here = [row for row in rows if row.backend == backend] or rows
    return [row for row in here if row.backend == here[0].backend]


def read(path: str | Path):
    """The `Node` that a file of ``nearlinear tune --machine`` tells of. Raises ConfigError."""
    return of_tables(schema.read(path), str(path))


def of_tables(data: dict, where: str):
    """The one node of ``data``, with its GPU. Raises ConfigError."""
    from .hardware import Accelerator, Node

    gpus, nodes = data.get("gpu"), data.get("node")
    if not isinstance(gpus, dict) or not isinstance(nodes, dict) or len(nodes) != 1:
        raise ConfigError(
            f"{where}: expected a table [gpu.NAME] and one [node.NAME], as nearlinear tune "
            "--machine writes them"
        )
    ((name, table),) = nodes.items()
    if not isinstance(table, dict) or table.get("gpu") not in list(gpus):
        raise ConfigError(f"{where}: [node.{name}] needs gpu = one of {', '.join(gpus)}")
    gpu = gpus[table["gpu"]]
    if not isinstance(gpu, dict):
        raise ConfigError(f"{where}: [gpu.{table['gpu']}] is no table")
    accelerator = schema.build(
        Accelerator, {"name": table["gpu"], **gpu}, f"{where}: gpu.{table['gpu']}"
    )
    found = schema.build(Node, {"name": name, **table, "gpu": accelerator}, f"{where}: node.{name}")
    _check(found, where)
    return found


def _check(node, where: str) -> None:
    """Raise ConfigError for what no machine is, by which nothing could be divided."""
    from .parameters import Parameters

    gpu = f"{where}: gpu.{node.gpu.name}"
    here = f"{where}: node.{node.name}"
    _check_rates(node, gpu, here)
    known = {each.name for each in dataclasses.fields(Parameters)}
    for key, value in node.measured.items():
        if key not in known:
            raise schema.unknown_key(key, here, known)
        most = 1.0 if key in SHARES or key == "straggler" else math.inf
        _within(value, f"{here}.{key}", above=0.0 if key in SHARES else None, most=most)
    for precision, points in node.gpu.products.items():
        if not _ascending(points):
            raise ConfigError(
                f"{where}: products.{precision} are [edge, TFLOPS], both above 0 and each edge "
                "above the one before: measure again"
            )
    for row in (*node.collectives, *node.contention):
        if row.ranks < 2 or not 1 <= row.nodes <= row.ranks or row.sharing < 1:
            raise ConfigError(
                f"{where}: a collective between {row.ranks} ranks on {row.nodes} nodes, "
                f"{row.sharing} at once: measure again"
            )
    for row in node.contention:
        for key in contention.MEASURED:
            _within(getattr(row, key), f"{here}.contention.{key}")
    for row in node.collectives:
        if not _ascending(row.points):
            raise ConfigError(
                f"{where}: the points of a collective are [bytes, seconds], both above 0 and each "
                "size above the one before: measure again"
            )


def _check_rates(node, gpu: str, here: str) -> None:
    """What a data sheet has. Links that ``tune`` could not measure are 0, as watts are."""
    for name in ("memory_gib", "hbm_gb_s", "host_gb_s", "multiprocessors"):
        _within(getattr(node.gpu, name), f"{gpu}.{name}", above=0.0)
    for name in ("peak_tflops", "matmul_tflops"):
        for precision, value in getattr(node.gpu, name).items():
            _within(value, f"{gpu}.{name}.{precision}", above=0.0)
    _within(node.gpu.older_kernels, f"{gpu}.older_kernels", above=0.0, most=1.0)
    _within(node.gpu.watts, f"{gpu}.watts", above=0.0 if node.gpu.held_to_watts else None)
    _within(node.gpu.held_to_watts, f"{gpu}.held_to_watts", most=node.gpu.watts)
    unmeasured = None if node.measured else 0.0
    _within(node.gpu.link_gb_s, f"{gpu}.link_gb_s", above=unmeasured)
    _within(node.network_gbps, f"{here}.network_gbps", above=unmeasured)
    _within(node.gpus, f"{here}.gpus", above=0.0)
    _within(node.usd_per_hour, f"{here}.usd_per_hour")


def _within(value: float, key: str, above: float | None = None, most: float = math.inf) -> None:
    """Raise ConfigError unless ``value`` is finite, at least 0 or ``above`` it, and ``most``."""
    low = value >= 0 if above is None else value > above  # NaN is neither
    if not low or not value <= most or value == math.inf:
        least = "0 or more" if above is None else f"above {above:g}"
        limit = f", and {most:g} at most" if most < math.inf else ""
        raise ConfigError(f"{key} = {value:g}: must be a number {least}{limit}")


def _ascending(points: list[list[float]]) -> bool:
    """Whether they are pairs of finite numbers above 0, the first of each above the last one's."""
    if not points or any(len(p) != 2 or not all(0 < v < math.inf for v in p) for p in points):
        return False
    return all(low < high for (low, _), (high, _) in itertools.pairwise(points))


@dataclass(frozen=True)
class BySize:
    """Rates of products, in FLOPS, over the edges of the cubes they were measured with."""

    points: list[list[float]]
    """[edge, TFLOPS], ascending"""

    def rate(self, m: float, k: float, n: float) -> float:
        """Of [m, k] with [k, n]: that of the cube with as many operations."""
        edge = math.log(m * k * n) / 3
        logs = self._logs
        if edge <= logs[0][0]:
            return math.exp(logs[0][1])
        for (low, first), (high, second) in zip(logs, logs[1:], strict=False):
            if edge <= high:
                share = (edge - low) / (high - low)
                return math.exp(first + share * (second - first))
        return math.exp(logs[-1][1])

    @cached_property
    def _logs(self) -> list[tuple[float, float]]:
        return [(math.log(edge), math.log(rate * 1e12)) for edge, rate in self.points]
