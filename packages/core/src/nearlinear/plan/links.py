"""Seconds of collectives: the bytes that cross the narrowest link, and the hops of a ring.

A ring takes every part but one over each of its links, so that (ranks - 1) / ranks of a tensor go
from node to node, over adapters that all groups of the node share. What sends across nodes first
and inside them then brings a node only what other nodes hold, (nodes - 1) / nodes. The all-gather
that sends to every node at once (SMDDP) has one hop between nodes and comes closer to the network's
rate: 90 % where NCCL reaches 80 % (AWS, "Enable faster training with Amazon SageMaker data parallel
library", 2023).
"""

import math

from .groups import Group
from .hardware import Node
from .machine import MeasuredLinks
from .parameters import Parameters
from .workload import Workload

DIRECT = 0.9 / 0.8  # its rate, over that of a ring
DIRECT_BORROWS = 9 / 24  # multiprocessors it takes, over those that NCCL takes (the same source)


def links_of(node: Node, fitted: Parameters, work: Workload) -> "Links | MeasuredLinks":
    """As the data sheet has them, or as they were measured."""
    if node.measured:
        return MeasuredLinks(node, work.backend, work.overlapped_reduce)
    return Links(node, fitted)


class Links:
    """Of ``node``s; sizes are bytes of the whole gathered tensor."""

    second_hop_borrows = False
    """from computation beside it: published runs show no sign of it. With it, the two hybrids of
    fms-fsdp, left out of the fit, are 4.7 and 14.5 % off; without it 0.2 and 8.9 %."""

    def __init__(self, node: Node, fitted: Parameters):
        self.fitted = fitted
        self.inside = node.gpu.link_gb_s * 1e9 * fitted.link_share
        self.between = node.network * fitted.network_share
        self.per_gpu = self.between / node.gpus
        self.host = node.gpu.host_gb_s * 1e9 * fitted.link_share

    def gather(self, size: float, group: Group, direct=False, hierarchical=False) -> float:
        """All-gather, or reduce-scatter, of ``size`` bytes in all."""
        if group.ranks == 1:
            return 0.0
        if group.nodes == 1:
            return self._around(size, group) / self.inside + self._turns(group.ranks - 1)
        if not (direct or hierarchical):
            return self._ring(size, group) + self._hops(group.nodes)
        inside = size * (group.on_node - 1) / group.on_node / self.inside
        across = size * (group.nodes - 1) / group.nodes * group.sharing / self.between
        if direct:
            return max(across / DIRECT, inside) + self._hops(1) + self._turns(group.on_node - 1)
        return across + inside + self._hops(group.nodes - 1) + self._turns(group.on_node - 1)

    def scatter(self, size: float, group: Group) -> float:
        """Reduce-scatter of ``size`` bytes in all: an all-gather backwards."""
        return self.gather(size, group)

    def reduce(self, size: float, group: Group) -> float:
        """All-reduce: there and back; between nodes the hops are those of a tree."""
        if group.ranks == 1:
            return 0.0
        if group.nodes == 1:
            return 2 * (self._around(size, group) / self.inside + self._turns(group.ranks - 1))
        across = self._around(size, group) * group.sharing / self.between
        inside = self._around(size, group) / self.inside
        hops = self._hops(math.log2(group.nodes)) + self._turns(group.on_node)
        return 2 * (max(across, inside) + hops)

    def exchange(self, size: float, group: Group) -> float:
        """All-to-all of ``size`` bytes on each rank, as much for one as for another.

        Every GPU of a node sends to other nodes at once, over its part of the adapters.
        """
        if group.ranks == 1:
            return 0.0
        each = size / group.ranks
        inside = each * (group.on_node - 1) / self.inside
        if group.nodes == 1:
            return inside + self.fitted.hop_inside
        across = each * (group.ranks - group.on_node) / self.per_gpu
        return max(across, inside) + self.fitted.hop_between

    def send(self, size: float, across: bool) -> float:
        """From one rank to another, while every GPU of the node sends as much."""
        if across:
            return size / self.per_gpu + self.fitted.hop_between
        return size / self.inside + self.fitted.hop_inside

    def lost_in_turn(self, group: Group, computing: float, count: float) -> float:
        """Seconds that ``computing`` takes longer with collectives between it: none on GPUs."""
        return 0.0

    def lost_beside(self, group: Group, moving: float, count: float, direct=False) -> float:
        """Seconds that computation loses to ``count`` collectives of ``moving`` seconds in all: the
        multiprocessors that they run on."""
        return self.fitted.borrowed_share * moving * (DIRECT_BORROWS if direct else 1.0)

    def _ring(self, size: float, group: Group) -> float:
        """Round all ranks of several nodes, without the hops between them."""
        moved = self._around(size, group)
        across, inside = moved * group.sharing / self.between, moved / self.inside
        return max(across, inside) + self._turns(group.ranks - group.nodes)

    @staticmethod
    def _around(size: float, group: Group) -> float:
        """Bytes over each link of a ring."""
        return size * (group.ranks - 1) / group.ranks

    def _turns(self, count: float) -> float:
        return count * self.fitted.hop_inside

    def _hops(self, count: float) -> float:
        return count * self.fitted.hop_between
