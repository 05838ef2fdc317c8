"""The mesh: five named axes over the ranks of a job.

The axes are (pipeline, replicate, shard, context, tensor). With the default placement the last
axis varies fastest: ``grid = arange(world).reshape(pipeline, replicate, shard, context, tensor)``.
The ranks of one shard group then fill consecutive nodes, whether a group is smaller or larger than
a node. Some groups span several axes, see `AXIS_GROUPS`. The arithmetic needs no torch;
`Mesh.device_mesh` creates the process groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ..config.parallel import ParallelConfig
from ..errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

EVEN_ENOUGH = 8
"""Rows per replica from which one row more on some replicas is negligible."""

AXES = ("pipeline", "replicate", "shard", "context", "tensor")

AXIS_GROUPS = ("sharing", "expert", "expert_sharing", "data", "model", "stage")
"""Groups across axes. ``sharing``: the ranks that share one copy of the model states, shard x
context. Mixtures of experts divide it into ``expert``, neighbors that hold different experts, and
``expert_sharing``, ranks that share the states of the same experts. ``data``: ranks that read
different batches, replicate x shard. ``model``: ranks that compute one batch together, pipeline x
context x tensor. ``stage``: all ranks of one pipeline stage."""

_PRODUCTS = {
    "data": ("replicate", "shard"),
    "model": ("pipeline", "context", "tensor"),
    "stage": ("replicate", "shard", "context", "tensor"),
}
"""Axes of the groups that are products of whole axes."""

PLACED = {"P": ("pipeline",), "D": ("replicate", "shard", "context"), "T": ("tensor",)}
"""Letters of SMP's placement strategies and their axes."""


def dim_to_shard(shape: Sequence[int], ranks: int) -> int:
    """Return the dim of a parameter of ``shape`` that sharding divides among ``ranks``.

    Rows of vectors and matrices are many, so that padding them to a multiple wastes little. Stacked
    experts are few: 8 of them would occupy 64 rows on 64 ranks. Their first dim that ``ranks``
    divides is divided instead; there is no padding on other dims than the first.
    """
    if len(shape) < 3:
        return 0
    return next((i for i, size in enumerate(shape) if size % ranks == 0), 0)


def dim_to_slice(shape: Sequence[int], ranks: int) -> int:
    """Return the dim of a shard that the optimizer states of ``ranks`` replicas divide.

    The first, or the most even one if the first has few rows (stacked experts). ``shape`` is that
    of the largest shard, so that all ranks choose alike.
    """
    if shape[0] % ranks == 0 or shape[0] >= EVEN_ENOUGH * ranks:
        return 0

    def waste(dim: int) -> float:
        return -(-shape[dim] // ranks) * ranks / shape[dim]

    return min(range(len(shape)), key=waste)


@dataclass(frozen=True)
class Mesh:
    """Size of every axis, and ranks per node (0 = all ranks on one node).

    Example::

        mesh = nl.Mesh.from_config(nl.ParallelConfig(hybrid_shard_degree=8), 256, ranks_per_node=8)
        print(mesh)
    """

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    ranks_per_node: int = 0
    expert: int = 1
    """Ranks of `sharing` that hold different experts."""
    placement: str = "PDT"
    """Letters of `PLACED`, slowest axis first."""
    ranks: tuple[int, ...] | None = None
    """Global ranks in the order of the placement; None: 0, 1, 2, ..."""

    @classmethod
    def from_config(cls, config: ParallelConfig, world: int, ranks_per_node: int = 0) -> Mesh:
        """Lay out ``world`` ranks by ``config``. Raises ConfigError if degrees do not divide."""
        degrees = config.degrees(world)
        return cls(
            *(degrees[axis] for axis in AXES),
            ranks_per_node=ranks_per_node,
            expert=config.expert_parallel_degree,
            placement=config.placement,
        )

    @classmethod
    def from_device_mesh(cls, device_mesh: DeviceMesh, ranks_per_node: int = 0) -> Mesh:
        """Return the mesh of a torch ``DeviceMesh`` ("shard",) or ("replicate", "shard")."""
        names = device_mesh.mesh_dim_names
        if names not in (("shard",), ("replicate", "shard")):
            raise ConfigError(
                f"nl.shard(mesh=...): the mesh has the dims {names}; allowed are ('shard',) and "
                "('replicate', 'shard'), as in init_device_mesh('cuda', (2, 8), mesh_dim_names="
                "('replicate', 'shard'))"
            )
        ranks = device_mesh.mesh
        return cls(
            replicate=ranks.shape[0] if ranks.ndim > 1 else 1,
            shard=ranks.shape[-1],
            ranks_per_node=ranks_per_node,
            ranks=tuple(ranks.flatten().tolist()),
        )

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in AXES)

    @cached_property
    def world(self) -> int:
        return math.prod(self.shape)

    @property
    def data_ranks(self) -> int:
        """Number of different batches per micro-step."""
        return self.replicate * self.shard

    @property
    def data(self) -> int:
        """Number of ranks in a group of ``data``."""
        return self.data_ranks

    @property
    def model(self) -> int:
        """Number of ranks that compute one batch together."""
        return self.pipeline * self.context * self.tensor

    @property
    def stage(self) -> int:
        """Number of ranks of one pipeline stage."""
        return self.world // self.pipeline

    @property
    def sharing(self) -> int:
        """Number of ranks that share one copy of the model states."""
        return self.shard * self.context

    @property
    def expert_sharing(self) -> int:
        """Number of ranks that share one copy of the states of the same experts."""
        return self.sharing // self.expert

    @property
    def nodes(self) -> int:
        return -(-self.world // self.ranks_per_node) if self.ranks_per_node else 1

    @property
    def grid(self) -> np.ndarray:
        """Ranks by coordinates: int array of shape `Mesh.shape`."""
        placed = list(self._placed)
        ranks = np.arange(self.world) if self.ranks is None else np.asarray(self.ranks)
        ranks = ranks.reshape(list(self._placed.values()))
        return ranks.transpose([placed.index(axis) for axis in AXES])

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinate of ``rank`` on every axis."""
        index = rank if self.ranks is None else self.ranks.index(rank)
        place = map(int, np.unravel_index(index, list(self._placed.values())))
        at = dict(zip(self._placed, place, strict=True))
        return {axis: at[axis] for axis in AXES}

    @property
    def _placed(self) -> dict[str, int]:
        """Sizes of the axes, slowest first."""
        axes = (axis for letter in self.placement for axis in PLACED[letter])
        return {axis: getattr(self, axis) for axis in axes}

    def data_rank(self, rank: int) -> int:
        """Index of the slice of every batch that ``rank`` reads, in ``range(data_ranks)``."""
        at = self.coordinates(rank)
        return at["replicate"] * self.shard + at["shard"]

    def state_rank(self, rank: int) -> int:
        """Index of the shard of the model states on ``rank``, in ``range(sharing)``."""
        at = self.coordinates(rank)
        return at["shard"] * self.context + at["context"]

    def node(self, rank: int) -> int:
        return rank // self.ranks_per_node if self.ranks_per_node else 0

    def group(self, axis: str, rank: int) -> list[int]:
        """Ranks of the group of ``rank`` on ``axis``, which may be one of `AXIS_GROUPS`."""
        lines = self._lines(axis)
        return lines[(lines == rank).any(axis=1)][0].tolist()

    def groups(self, axis: str) -> list[list[int]]:
        """All groups of ``axis`` in rank order; together they contain every rank once."""
        return sorted(self._lines(axis).tolist())

    def _lines(self, axis: str) -> np.ndarray:
        """Groups of ``axis`` as an int array (groups, ranks per group)."""
        if axis in AXES:
            grid, at = self.grid, AXES.index(axis)
        elif axis in _PRODUCTS:
            axes = [AXES.index(name) for name in _PRODUCTS[axis]]
            lines = np.moveaxis(self.grid, axes, range(-len(axes), 0))
            return np.sort(lines.reshape(-1, getattr(self, axis)), axis=1)
        elif axis == "sharing":
            grid, at = self._of_experts(1, self.sharing), 3
        else:
            grid = self._of_experts(self.expert_sharing, self.expert)
            at = {"expert_sharing": 2, "expert": 3}[axis]
        return np.moveaxis(grid, at, -1).reshape(-1, getattr(self, axis))

    def _of_experts(self, outer: int, inner: int) -> np.ndarray:
        """The grid with shard x context divided into ``outer`` x ``inner``."""
        return self.grid.reshape(self.pipeline, self.replicate, outer, inner, self.tensor)

    def nodes_spanned(self, axis: str) -> int:
        """Largest number of nodes of any group of ``axis``; 1 means no traffic between nodes."""
        return max(len({self.node(rank) for rank in group}) for group in self.groups(axis))

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """Create the torch ``DeviceMesh`` that FSDP2 shards over.

        Its axes are pipeline, replicate, shard and tensor. Axes of size one are left out, except
        for shard. The ranks of a context group share model states, so the shard axis includes them.
        A collective call of all ranks of the default process group.
        """
        grid = self._of_experts(self.sharing, 1).squeeze(3)
        return _device_mesh(device_type, grid, ("pipeline", "replicate", "shard", "tensor"))

    def expert_mesh(self, device_type: str) -> DeviceMesh:
        """Create the `device_mesh` for expert states, sharded over ``expert_sharing`` ranks."""
        grid = self._of_experts(self.expert_sharing, self.expert)
        names = ("pipeline", "replicate", "shard", "expert", "tensor")
        return _device_mesh(device_type, grid, names)

    def __str__(self) -> str:
        """Render the rank grid: one line per replica (and stage), one cell per shard."""
        counts = " x ".join(f"{getattr(self, a)} {a}" for a in AXES if getattr(self, a) > 1)
        where = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        ranks = "rank" if self.world == 1 else "ranks"
        lines = [f"{self.world} {ranks}{where}" + (f" = {counts}" if counts else "")]
        cells = self.grid.reshape(self.pipeline * self.replicate, self.shard, -1)
        width = len(str(self.world - 1))
        for row, shards in enumerate(cells[:_ROWS_SHOWN]):
            stage, replica = divmod(row, self.replicate)
            label = f"  stage {stage}" if self.pipeline > 1 else " "
            texts = [_cell(cell, width) for cell in shards]
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


def _device_mesh(device_type: str, grid: np.ndarray, names: tuple[str, ...]) -> DeviceMesh:
    """Create a DeviceMesh from ``grid`` without axes of size one, except for shard."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    kept = [i for i, name in enumerate(names) if grid.shape[i] > 1 or name == "shard"]
    ranks = torch.from_numpy(grid.reshape([grid.shape[i] for i in kept]).copy())
    return DeviceMesh(device_type, ranks, mesh_dim_names=tuple(names[i] for i in kept))


def _cell(ranks, width: int) -> str:
    return "[" + " ".join(f"{rank:>{width}}" for rank in ranks) + "]"


def _span(nodes: list[int]) -> str:
    return str(nodes[0]) if len(nodes) == 1 else f"{nodes[0]}-{nodes[-1]}"
