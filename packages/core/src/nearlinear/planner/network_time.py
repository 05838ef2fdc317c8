"""Time of collectives: bytes over the narrowest link, plus the latency of every hop.

In a ring, (ranks - 1) / ranks of a tensor crosses every link, and all groups of a node share its
network adapters. A hierarchical all-gather goes across nodes first, then inside them, so that a
node receives only the data held by other nodes, (nodes - 1) / nodes of the tensor. A direct
all-gather (SMDDP) sends to all nodes at once: it has one hop between nodes, and reaches 90 % of the
network rate where NCCL reaches 80 % (AWS, "Enable faster training with Amazon SageMaker data
parallel library", 2023).

Measured nodes use measured timings instead of data sheets: see `MeasuredNetwork`.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..distributed.mesh import PLACED, Mesh
from ..errors import ConfigError
from .cluster import (
    ALL_GATHER,
    ALL_REDUCE,
    EXCHANGE,
    REDUCE_SCATTER,
    MeasuredCollective,
    MeasuredContention,
    Node,
)
from .fitted_constants import FittedConstants
from .workload import Workload

DIRECT = 0.9 / 0.8  # network rate of the direct all-gather over that of a ring
DIRECT_BORROWS = 9 / 24  # multiprocessors it occupies, over those of NCCL (same source)


@dataclass(frozen=True)
class RankGroup:
    """Placement of the ranks of a collective."""

    ranks: int
    nodes: int
    sharing: int
    """Groups of the same kind that use one node's adapters at the same time."""

    @property
    def on_node(self) -> int:
        """Ranks per node."""
        return -(-self.ranks // self.nodes)


def rank_group(mesh: Mesh, *axes: str) -> RankGroup:
    """Return the placement of the group over ``axes``, which are adjacent in the mesh's order.

    ``axes`` may also be ``expert`` or ``expert_sharing``, which are derived from shard and context
    (see `distributed.mesh.AXIS_GROUPS`).
    """
    order = [axis for letter in mesh.placement for axis in PLACED[letter]]
    of_experts = axes[0] in ("expert", "expert_sharing")
    last = order.index("context") if of_experts else max(order.index(axis) for axis in axes)
    stride = math.prod(getattr(mesh, axis) for axis in order[last + 1 :])
    if axes[0] == "expert_sharing":
        stride *= mesh.expert
    ranks = math.prod(getattr(mesh, axis) for axis in axes)
    node = mesh.ranks_per_node or mesh.world
    on_node = max(1, min(ranks, node // stride))
    nodes = -(-ranks // on_node)
    return RankGroup(ranks, nodes, max(1, min(node, mesh.world) // on_node))


def network_for(
    node: Node, constants: FittedConstants, work: Workload
) -> "DataSheetNetwork | MeasuredNetwork":
    """Return the network model of ``node``: measured timings if it has them, else data sheets."""
    if node.measured:
        return MeasuredNetwork(node, work.backend, work.overlapped_reduce)
    return DataSheetNetwork(node, constants)


class DataSheetNetwork:
    """Collective times from data-sheet rates; sizes are bytes of the whole gathered tensor."""

    all_reduce_slows_compute = False
    """Published runs show no slowdown of compute by the all-reduce over the replicas. With it, the
    two hybrid runs of fms-fsdp, left out of the fit, are off by 4.7 and 14.5 %; without it, by 0.2
    and 8.9 %."""

    def __init__(self, node: Node, constants: FittedConstants):
        self.constants = constants
        self.intra_node: float = node.gpu.link_gb_s * 1e9 * constants.link_share
        self.inter_node: float = node.network * constants.network_share
        self.per_gpu: float = self.inter_node / node.gpus
        self.host: float = node.gpu.host_gb_s * 1e9 * constants.link_share

    def all_gather(
        self, size: float, group: RankGroup, direct: bool = False, hierarchical: bool = False
    ) -> float:
        """Seconds of an all-gather of ``size`` bytes in total."""
        if group.ranks == 1:
            return 0.0
        if group.nodes == 1:
            return self._around(size, group) / self.intra_node + self._turns(group.ranks - 1)
        if not (direct or hierarchical):
            return self._ring(size, group) + self._hops(group.nodes)
        inside = size * (group.on_node - 1) / group.on_node / self.intra_node
        across = size * (group.nodes - 1) / group.nodes * group.sharing / self.inter_node
        if direct:
            return max(across / DIRECT, inside) + self._hops(1) + self._turns(group.on_node - 1)
        return across + inside + self._hops(group.nodes - 1) + self._turns(group.on_node - 1)

    def reduce_scatter(self, size: float, group: RankGroup) -> float:
        """Seconds of a reduce-scatter of ``size`` bytes in total: a reversed all-gather."""
        return self.all_gather(size, group)

    def all_reduce(self, size: float, group: RankGroup) -> float:
        """Seconds of an all-reduce: a ring in both directions, with the hops of a tree."""
        if group.ranks == 1:
            return 0.0
        if group.nodes == 1:
            return 2 * (self._around(size, group) / self.intra_node + self._turns(group.ranks - 1))
        across = self._around(size, group) * group.sharing / self.inter_node
        inside = self._around(size, group) / self.intra_node
        hops = self._hops(math.log2(group.nodes)) + self._turns(group.on_node)
        return 2 * (max(across, inside) + hops)

    def all_to_all(self, size: float, group: RankGroup) -> float:
        """Seconds of a balanced all-to-all of ``size`` bytes on each rank.

        All GPUs of a node send to other nodes at once, each over its share of the adapters.
        """
        if group.ranks == 1:
            return 0.0
        each = size / group.ranks
        inside = each * (group.on_node - 1) / self.intra_node
        if group.nodes == 1:
            return inside + self.constants.hop_inside
        across = each * (group.ranks - group.on_node) / self.per_gpu
        return max(across, inside) + self.constants.hop_between

    def send(self, size: float, across: bool) -> float:
        """Seconds of a point-to-point send, while every GPU of the node sends as much."""
        if across:
            return size / self.per_gpu + self.constants.hop_between
        return size / self.intra_node + self.constants.hop_inside

    def interleaved_cost(self, group: RankGroup, computing: float, count: float) -> float:
        """Seconds lost by compute to interleaved collectives: none on GPUs."""
        return 0.0

    def concurrent_cost(
        self, group: RankGroup, moving: float, count: float, direct: bool = False
    ) -> float:
        """Seconds lost by compute to ``count`` concurrent collectives of ``moving`` seconds in all.

        Collectives occupy multiprocessors while they run.
        """
        return self.constants.borrowed_share * moving * (DIRECT_BORROWS if direct else 1.0)

    def _ring(self, size: float, group: RankGroup) -> float:
        """Seconds of a ring over several nodes, without the hops between them."""
        moved = self._around(size, group)
        across, inside = moved * group.sharing / self.inter_node, moved / self.intra_node
        return max(across, inside) + self._turns(group.ranks - group.nodes)

    @staticmethod
    def _around(size: float, group: RankGroup) -> float:
        """Bytes over each link of a ring."""
        return size * (group.ranks - 1) / group.ranks

    def _turns(self, count: float) -> float:
        return count * self.constants.hop_inside

    def _hops(self, count: float) -> float:
        return count * self.constants.hop_between


class MeasuredNetwork:
    """Collective times from measurements; same interface as `DataSheetNetwork`.

    A group that was not measured uses the nearest measured group, scaled by the bytes that cross
    its links and by the latency of its number of ranks.
    """

    all_reduce_slows_compute = True  # CPU cores carry it, too

    def __init__(self, node: Node, backend: str, exchanged: bool):
        """Select the rows of ``backend``; ``exchanged``: reduce-scatter by exchanging parts."""
        self.name: str = node.name
        self.host: float = node.gpu.host_gb_s * 1e9
        self.rows: list[MeasuredCollective] = _of_backend(backend, node.collectives)
        self.contention: list[MeasuredContention] = _of_backend(backend, node.contention)
        kinds = {row.kind for row in self.rows}
        self.reduce_scatter_kind = EXCHANGE if exchanged and EXCHANGE in kinds else REDUCE_SCATTER

    def all_gather(
        self, size: float, group: RankGroup, direct: bool = False, hierarchical: bool = False
    ) -> float:
        """Seconds of an all-gather of ``size`` bytes in total."""
        staged = hierarchical and group.nodes > 1 and group.on_node > 1
        if not staged:
            return self._seconds(ALL_GATHER, size, group)
        across = dataclasses.replace(
            group, ranks=group.nodes, sharing=group.sharing * group.on_node
        )
        inside = dataclasses.replace(group, ranks=group.on_node, nodes=1)
        first = self._seconds(ALL_GATHER, size / group.on_node, across)
        return first + group.nodes * self._seconds(ALL_GATHER, size / group.nodes, inside)

    def reduce_scatter(self, size: float, group: RankGroup) -> float:
        """Seconds of a reduce-scatter of ``size`` bytes in total."""
        return self._seconds(self.reduce_scatter_kind, size, group)

    def all_reduce(self, size: float, group: RankGroup) -> float:
        """Seconds of an all-reduce of ``size`` bytes."""
        return self._seconds(ALL_REDUCE, size, group)

    def all_to_all(self, size: float, group: RankGroup) -> float:
        """Seconds of an all-to-all of ``size`` bytes per rank: the traffic of a reduce-scatter."""
        kinds = {row.kind for row in self.rows}
        return self._seconds(EXCHANGE if EXCHANGE in kinds else REDUCE_SCATTER, size, group)

    def interleaved_cost(self, group: RankGroup, computing: float, count: float) -> float:
        """Seconds lost by ``computing`` seconds of compute to ``count`` interleaved collectives."""
        row = nearest_row(self.contention, group) if group.ranks > 1 else None
        return row.interleaved_cost(computing, count) if row else 0.0

    def concurrent_cost(
        self, group: RankGroup, moving: float, count: float, direct: bool = False
    ) -> float:
        """Seconds lost by compute to ``count`` concurrent collectives of ``moving`` seconds."""
        row = nearest_row(self.contention, group) if group.ranks > 1 else None
        return row.concurrent_cost(moving, count) if row else 0.0

    def send(self, size: float, across: bool) -> float:
        """Seconds of a send: half of an all-gather between two ranks, each sending one half."""
        return self.all_gather(2 * size, RankGroup(2, 2 if across else 1, 1))

    def _seconds(self, kind: str, size: float, group: RankGroup) -> float:
        if group.ranks == 1:
            return 0.0
        row = self._nearest(kind, group)
        scaled = dataclasses.replace(
            row, ranks=group.ranks, nodes=group.nodes, sharing=group.sharing
        )
        latency = row.seconds(0.0) * ((group.ranks - 1) / (row.ranks - 1) - 1.0)
        return row.seconds(size * scaled.crossing / row.crossing) + latency

    def _nearest(self, kind: str, group: RankGroup) -> MeasuredCollective:
        row = nearest_row([row for row in self.rows if row.kind == kind], group)
        if row is None:
            where = "between nodes" if group.nodes > 1 else "inside a node"
            raise ConfigError(
                f"{self.name} has no measured {kind} {where}. Run nearlinear tune --machine on "
                "ranks with that placement."
            )
        return row


Row = TypeVar("Row", MeasuredCollective, MeasuredContention)


def nearest_row(rows: Sequence[Row], group: RankGroup) -> Row | None:
    """Return the measured row whose placement is nearest to ``group``, or None.

    An inter-node group only matches inter-node rows, and an intra-node group intra-node rows.
    """
    names = "ranks", "nodes", "sharing"

    def distance(row: Row) -> list[float]:
        return [abs(math.log(getattr(row, name) / getattr(group, name))) for name in names]

    like = [row for row in rows if (row.nodes > 1) == (group.nodes > 1)]
    return min(like, key=distance, default=None)


def _of_backend(backend: str, rows: list[Row]) -> list[Row]:
    """Return the rows of ``backend``, or of the first backend if ``backend`` was not measured."""
    here = [row for row in rows if row.backend == backend] or rows
    return [row for row in here if row.backend == here[0].backend]
