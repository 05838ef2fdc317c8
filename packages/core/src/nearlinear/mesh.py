"""Which rank stands where: five named axes over the ranks of a job.

The axes are (pipeline, replicate, shard, context, tensor). Unless a placement says otherwise the
last is the fastest: ``grid = arange(world).reshape(pipeline, replicate, shard, context, tensor)``,
so that ranks of one shard group fill consecutive nodes, whether a group is smaller or larger than a
node. Some groups are made of parts of axes, see `JOINT`. The arithmetic needs no torch;
`Mesh.device_mesh` creates the process groups.
"""

import math
from dataclasses import dataclass

import numpy as np

from .config import Config

AXES = ("pipeline", "replicate", "shard", "context", "tensor")

JOINT = ("sharing", "expert", "expert_sharing")
"""Groups across axes. ``sharing``: the ranks that share one copy of the model states, shard x
context. It is cut in two for the experts of a mixture: ``expert``, neighbours that hold different
ones, and ``expert_sharing``, ranks that share the same ones."""

PLACED = {"P": ("pipeline",), "D": ("replicate", "shard", "context"), "T": ("tensor",)}
"""SMP's letters of a placement, and the axes they stand for."""


@dataclass(frozen=True)
class Mesh:
    """The size of every axis, and how many ranks a node holds (0 = all on one node)."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    ranks_per_node: int = 0
    expert: int = 1  # ranks of `sharing` that hold different experts
    placement: str = "PDT"  # letters of `PLACED`, slowest first

    @classmethod
    def from_config(cls, config: Config, world: int, ranks_per_node: int = 0) -> "Mesh":
        """The mesh ``config`` asks for on ``world`` ranks. Raises ConfigError if it cannot be."""
        return cls(
            **config.degrees(world),
            ranks_per_node=ranks_per_node,
            expert=config.expert_parallel_degree,
            placement=config.placement,
        )

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
    def sharing(self) -> int:
        """How many ranks share one copy of the model states."""
        return self.shard * self.context

    @property
    def expert_sharing(self) -> int:
        """How many ranks share one copy of the states of the experts that they hold."""
        return self.sharing // self.expert

    @property
    def nodes(self) -> int:
        return -(-self.world // self.ranks_per_node) if self.ranks_per_node else 1

    @property
    def grid(self) -> np.ndarray:
        """Every rank at its coordinates: int array of shape `Mesh.shape`."""
        placed = list(self._placed)
        ranks = np.arange(self.world).reshape(list(self._placed.values()))
        return ranks.transpose([placed.index(axis) for axis in AXES])

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where ``rank`` stands on every axis."""
        place = map(int, np.unravel_index(rank, list(self._placed.values())))
        at = dict(zip(self._placed, place, strict=True))
        return {axis: at[axis] for axis in AXES}

    @property
    def _placed(self) -> dict[str, int]:
        """The axes and their sizes, slowest first."""
        axes = (axis for letter in self.placement for axis in PLACED[letter])
        return {axis: getattr(self, axis) for axis in axes}

    def data_rank(self, rank: int) -> int:
        """Which slice of every batch ``rank`` reads, in ``range(data_ranks)``."""
        at = self.coordinates(rank)
        return at["replicate"] * self.shard + at["shard"]

    def state_rank(self, rank: int) -> int:
        """Which shard of the model states ``rank`` holds, in ``range(sharing)``."""
        at = self.coordinates(rank)
        return at["shard"] * self.context + at["context"]

    def node(self, rank: int) -> int:
        return rank // self.ranks_per_node if self.ranks_per_node else 0

    def group(self, axis: str, rank: int) -> list[int]:
        """The ranks that differ from ``rank`` on ``axis``, or in a `JOINT` group, only."""
        lines = self._lines(axis)
        return lines[(lines == rank).any(axis=1)][0].tolist()

    def groups(self, axis: str) -> list[list[int]]:
        """All groups of ``axis``, in rank order: together they hold every rank once."""
        return sorted(self._lines(axis).tolist())

    def _lines(self, axis: str) -> np.ndarray:
        """The groups of ``axis``: int array [groups, ranks of one]."""
        if axis in AXES:
            grid, at = self.grid, AXES.index(axis)
        elif axis == "sharing":
            grid, at = self._of_experts(1, self.sharing), 3
        else:
            grid = self._of_experts(self.expert_sharing, self.expert)
            at = {"expert_sharing": 2, "expert": 3}[axis]
        return np.moveaxis(grid, at, -1).reshape(-1, getattr(self, axis))

    def _of_experts(self, outer: int, inner: int) -> np.ndarray:
        """The grid with shard x context cut anew: pipeline, replicate, outer, inner, tensor."""
        return self.grid.reshape(self.pipeline, self.replicate, outer, inner, self.tensor)

    def nodes_spanned(self, axis: str) -> int:
        """The most nodes any group of ``axis`` touches: 1 means its traffic stays in the node."""
        return max(len({self.node(rank) for rank in group}) for group in self.groups(axis))

    def device_mesh(self, device_type: str):
        """What FSDP2 shards over, and its neighbours, as a torch ``DeviceMesh``.

        Its axes are pipeline, replicate, shard and tensor, without those of size one, but always
        shard; the ranks of a context group share states as well, so that they are part of it. A
        collective call: every rank of the default process group makes it.
        """
        grid = self._of_experts(self.sharing, 1).squeeze(3)
        return _device_mesh(device_type, grid, ("pipeline", "replicate", "shard", "tensor"))

    def expert_mesh(self, device_type: str):
        """`device_mesh` for the states of experts: each is on ``expert_sharing`` ranks only."""
        grid = self._of_experts(self.expert_sharing, self.expert)
        names = ("pipeline", "replicate", "shard", "expert", "tensor")
        return _device_mesh(device_type, grid, names)

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


def _device_mesh(device_type: str, grid: np.ndarray, names: tuple[str, ...]):
    """``grid`` without axes of size one, but for shard."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    kept = [i for i, name in enumerate(names) if grid.shape[i] > 1 or name == "shard"]
    ranks = torch.from_numpy(grid.reshape([grid.shape[i] for i in kept]).copy())
    return DeviceMesh(device_type, ranks, mesh_dim_names=tuple(names[i] for i in kept))


def _cell(ranks, width: int) -> str:
    return "[" + " ".join(f"{rank:>{width}}" for rank in ranks) + "]"


def _span(nodes: list[int]) -> str:
    return str(nodes[0]) if len(nodes) == 1 else f"{nodes[0]}-{nodes[-1]}"
