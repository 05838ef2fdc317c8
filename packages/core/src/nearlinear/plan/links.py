"""Seconds of collectives: the bytes that cross the narrowest link, and the hops of a ring.

In a ring over nodes every byte enters every node once, over adapters that all groups of the node
share; a ring has a hop for each rank. The all-gather that sends to every rank at once (SMDDP) has
one hop between nodes, and comes closer to the network's rate: 90 % where NCCL reaches 80 % (AWS,
"Enable faster training with Amazon SageMaker data parallel library", 2023).
"""

import math

from .hardware import Node
from .machine import MeasuredLinks
from .parameters import Parameters
from .workload import Group, Workload

DIRECT = 0.9 / 0.8  # its rate, over that of a ring
DIRECT_BORROWS = 9 / 24  # multiprocessors it takes, over those that NCCL takes (the same source)


def links_of(node: Node, fitted: Parameters, work: Workload) -> "Links | MeasuredLinks":
    """As the data sheet has them, or as they were measured."""
    if node.measured:
        return MeasuredLinks(node, work.backend, work.overlapped_reduce)
    return Links(node, fitted)


class Links:
    """Of ``node``s; sizes are bytes of the whole gathered tensor."""

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
        inside = size * (group.on_node - 1) / max(group.on_node, 1) / self.inside
        if group.nodes == 1:
            return inside + (group.ranks - 1) * self.fitted.hop_inside
        rate = self.between * (DIRECT if direct else 1.0)
        between = size * (group.nodes - 1) / group.nodes * group.sharing / rate
        hops = group.nodes * self.fitted.hop_between
        if direct:
            return max(between, inside) + self.fitted.hop_between + hops / 8
        if hierarchical:
            return between + inside + hops + (group.on_node - 1) * self.fitted.hop_inside
        turns = (group.ranks - group.nodes) * self.fitted.hop_inside
        return max(between, inside) + hops + turns

    def scatter(self, size: float, group: Group) -> float:
        """Reduce-scatter of ``size`` bytes in all: an all-gather backwards."""
        return self.gather(size, group)

    def reduce(self, size: float, group: Group) -> float:
        """All-reduce: there and back; the hops are those of a tree."""
        if group.ranks == 1:
            return 0.0
        if group.nodes == 1:
            return (
                2 * (size * (group.ranks - 1) / group.ranks / self.inside)
                + 2 * (group.ranks - 1) * self.fitted.hop_inside
            )
        inside = size * (group.on_node - 1) / group.on_node / self.inside
        between = size * (group.nodes - 1) / group.nodes * group.sharing / self.between
        hops = math.log2(group.nodes) * self.fitted.hop_between
        return 2 * (max(between, inside) + hops + group.on_node * self.fitted.hop_inside)

    def send(self, size: float, across: bool) -> float:
        """From one rank to another, while every GPU of the node sends as much."""
        if across:
            return size / self.per_gpu + self.fitted.hop_between
        return size / self.inside + self.fitted.hop_inside
