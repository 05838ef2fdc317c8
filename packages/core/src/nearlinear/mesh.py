"""Which rank stands where: five named axes over the ranks of a job.

The axes are (pipeline, replicate, shard, context, tensor), tensor fastest, as in SMP's rank
placement: ``grid = arange(world).reshape(pipeline, replicate, shard, context, tensor)``. Ranks of
one shard group therefore fill consecutive nodes, whether a group is smaller or larger than a node.
The arithmetic needs no torch; `Mesh.device_mesh` creates the process groups.
"""

import math
from dataclasses import dataclass

import numpy as np

from .config import Config

AXES = ("pipeline", "replicate", "shard", "context", "tensor")


@dataclass(frozen=True)
class Mesh:
    """The size of every axis, and how many ranks a node holds (0 = all on one node)."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    ranks_per_node: int = 0

    @classmethod
    def from_config(cls, config: Config, world: int, ranks_per_node: int = 0) -> "Mesh":
        """The mesh ``config`` asks for on ``world`` ranks. Raises ConfigError if it cannot be."""
        return cls(**config.degrees(world), ranks_per_node=ranks_per_node)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def world(self) -> int:
        return math.prod(self.shape)

    @property
    def data_ranks(self) -> int:
        """How many different batches are read per micro-step."""
        return self.replicate * self.shard

    @property
    def nodes(self) -> int:
        return -(-self.world // self.ranks_per_node) if self.ranks_per_node else 1

    @property
    def grid(self) -> np.ndarray:
        """Every rank at its coordinates: int array of shape `Mesh.shape`."""
        return np.arange(self.world).reshape(self.shape)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where ``rank`` stands on every axis."""
        place = np.unravel_index(rank, self.shape)
        return dict(zip(AXES, map(int, place), strict=True))

    def data_rank(self, rank: int) -> int:
        """Which slice of every batch ``rank`` reads, in ``range(data_ranks)``."""
        at = self.coordinates(rank)
        return at["replicate"] * self.shard + at["shard"]

    def node(self, rank: int) -> int:
        return rank // self.ranks_per_node if self.ranks_per_node else 0

    def group(self, axis: str, rank: int) -> list[int]:
        """The ranks that differ from ``rank`` on ``axis`` only, ``rank`` among them."""
        at = self.coordinates(rank)
        index = tuple(slice(None) if name == axis else at[name] for name in AXES)
        return self.grid[index].tolist()

    def groups(self, axis: str) -> list[list[int]]:
        """All groups of ``axis``, in rank order: together they hold every rank once."""
        lines = np.moveaxis(self.grid, AXES.index(axis), -1).reshape(-1, getattr(self, axis))
        return sorted(lines.tolist())

    def nodes_spanned(self, axis: str) -> int:
        """The most nodes any group of ``axis`` touches: 1 means its traffic stays in the node."""
        return max(len({self.node(rank) for rank in group}) for group in self.groups(axis))

    def device_mesh(self, device_type: str):
        """A torch ``DeviceMesh`` with the axes larger than one, and always ``shard``.

        A collective call: every rank of the default process group makes it.
        """
        from torch.distributed.device_mesh import init_device_mesh

        axes = [axis for axis in AXES if getattr(self, axis) > 1 or axis == "shard"]
        sizes = tuple(getattr(self, axis) for axis in axes)
        return init_device_mesh(device_type, sizes, mesh_dim_names=tuple(axes))

    def __str__(self) -> str:
        """The rank grid: one line per replica (and pipeline stage), one cell per shard."""
        counts = " x ".join(f"{getattr(self, a)} {a}" for a in AXES if getattr(self, a) > 1)
        where = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        ranks = "rank" if self.world == 1 else "ranks"
        lines = [f"{self.world} {ranks}{where}" + (f" = {counts}" if counts else "")]
        cells = self.grid.reshape(self.pipeline * self.replicate, self.shard, -1)
        width = len(str(self.world - 1))
        for row, shards in enumerate(cells[:_ROWS_SHOWN]):
            stage, replica = divmod(row, self.replicate)
            label = f"  stage {stage}" if self.pipeline > 1 else " "
            texts = [_cell(ranks, width) for ranks in shards]
            if len(" ".join(texts)) > _WIDTH_SHOWN:
                texts = [*texts[:4], "..", *texts[-4:]]
            nodes = sorted({self.node(rank) for rank in shards.flatten().tolist()})
            span = f"   node {_span(nodes)}" if self.nodes > 1 else ""
            lines.append(f"{label} replica {replica}: {' '.join(texts)}{span}")
        if len(cells) > _ROWS_SHOWN:
            lines.append(f"  .. {len(cells) - _ROWS_SHOWN} more rows")
        return "\n".join(lines)


_ROWS_SHOWN = 16
_WIDTH_SHOWN = 80


def _cell(ranks, width: int) -> str:
    return "[" + " ".join(f"{rank:>{width}}" for rank in ranks) + "]"


def _span(nodes: list[int]) -> str:
    return str(nodes[0]) if len(nodes) == 1 else f"{nodes[0]}-{nodes[-1]}"
