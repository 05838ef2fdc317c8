"""Where the ranks of a collective stand: how many, on how many nodes, next to how many others."""

import math
from dataclasses import dataclass

from ..mesh import PLACED, Mesh


@dataclass(frozen=True)
class Group:
    """Where the ranks of a collective stand."""

    ranks: int
    nodes: int
    sharing: int
    """groups of the kind that send over one node's adapters at the same time"""

    @property
    def on_node(self) -> int:
        """Ranks of one node."""
        return -(-self.ranks // self.nodes)


def group(mesh: Mesh, *axes: str) -> Group:
    """The ranks that differ on ``axes``, neighbours in the mesh's order; or on ``expert`` or
    ``expert_sharing``, which are made of shard and context (see `mesh.JOINT`)."""
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
    return Group(ranks, nodes, max(1, min(node, mesh.world) // on_node))
