"""What each replica updates of a shard: a slice, where the optimizer's state is sharded too.

Replicas hold equal shards. Here each of them has a slice of every parameter's shard, a parameter of
its own for the optimizer: ``torch.chunk`` of the shard, one chunk per replica, so that a DTensor
over the mesh (shard, replicate) says exactly what of the whole it is. A slice lies in the shard's
memory where a chunk is contiguous there, and elsewhere where it is not. (torch's own
``full_tensor`` fails where two mesh dims cut one dim unevenly; `nearlinear.save` does not use it.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from .layout import cuts_of, local

EVEN_ENOUGH = 8  # rows per replica, at least, for which one more on some of them is not much


@dataclass
class Slice:
    """This replica's slice of ``shard``, a sharded parameter on ``mesh`` (shard, replicate)."""

    shard: nn.Parameter
    mesh: DeviceMesh
    values: nn.Parameter = field(init=False)
    """what the optimizer updates; a DTensor"""
    dim: int = field(init=False)
    """of the tensor, that replicas cut"""
    elements: int = field(init=False)
    """of the largest slice of this shard: what replicas send one another"""

    def __post_init__(self):
        self.ranks, self.rank = self.mesh.size(1), self.mesh.get_local_rank(1)
        self.dim = _dim_to_cut(self.padded_shape, self.ranks)
        self.elements = max(part.numel() for part in self.parts(local(self.shard.data)))
        self.values = nn.Parameter(self.wrap(self._here().contiguous()))
        self.values._nearlinear_cuts = cuts_of(self.shard)
        self.shard._nearlinear_slice = self.values

    @property
    def padded_shape(self) -> list[int]:
        """The largest shard of this parameter on any rank: what FSDP2 sends."""
        (place,), ranks = self.shard.placements, self.mesh.size(0)
        shape = list(self.shard.shape)
        shape[place.dim] = -(-shape[place.dim] // ranks)
        return shape

    def parts(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """``shard``, of the parameter or of its gradient, as all replicas' slices: views."""
        size = shard.size(self.dim)
        each = -(-size // self.ranks)
        firsts = [min(rank * each, size) for rank in range(self.ranks)]
        return [shard.narrow(self.dim, at, min(each, size - at)) for at in firsts]

    def wrap(self, values: torch.Tensor) -> DTensor:
        """What is in this rank's memory of a slice, as the slice."""
        places, whole = (self.shard.placements[0], Shard(self.dim)), self.shard
        return DTensor.from_local(
            values, self.mesh, places, run_check=False, shape=whole.shape, stride=whole.stride()
        )

    def refresh(self) -> None:
        """Take the shard's values, where the slice does not lie in its memory."""
        here, mine = self._here(), local(self.values.data)
        if here.data_ptr() != mine.data_ptr():
            mine.copy_(here)

    def add_gradient(self, values: torch.Tensor) -> None:
        """Add ``values`` (flat, `elements`) to the slice's gradient."""
        mine = local(self.values.data)
        values = values[: mine.numel()].view(mine.shape)
        if self.values.grad is None:
            self.values.grad = self.wrap(values)
        else:
            local(self.values.grad).add_(values)

    def _here(self) -> torch.Tensor:
        """Where this replica's slice is in the shard."""
        return self.parts(local(self.shard.data))[self.rank]


def of(parameter: nn.Parameter) -> nn.Parameter:
    """What an optimizer updates of ``parameter`` on this rank: its slice, or itself."""
    return getattr(parameter, "_nearlinear_slice", parameter)


def mesh_of_slices(mesh: DeviceMesh) -> DeviceMesh:
    """(shard, replicate) of ``mesh``, which has them the other way round; the groups are its own.

    A DTensor cuts in its mesh's order, and replicas cut what shards have cut.
    """
    two = mesh["replicate", "shard"]
    return DeviceMesh.from_group(
        [two.get_group("shard"), two.get_group("replicate")],
        mesh.device_type,
        mesh=two.mesh.T.contiguous(),
        mesh_dim_names=("shard", "replicate"),
    )


def pairs(
    flat: torch.Tensor, slices: Sequence[Slice], shards: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Where in ``flat`` (replicas, elements of a slice of each) the parts of ``shards`` travel.

    Two lists of views, of ``flat`` and of ``shards``, to copy either way.
    """
    travelling, lying = [], []
    columns = flat.split([each.elements for each in slices], dim=1)
    for each, shard, column in zip(slices, shards, columns, strict=True):
        for row, part in zip(column, each.parts(shard), strict=True):
            if part.numel():
                travelling.append(row[: part.numel()].view(part.shape))
                lying.append(part)
    return travelling, lying


def _dim_to_cut(shape: Sequence[int], ranks: int) -> int:
    """The first dim, unless its rows are few and another one is cut more evenly.

    There are few experts on a rank. ``shape`` is the largest shard's: all ranks must agree.
    """
    if shape[0] % ranks == 0 or shape[0] >= EVEN_ENOUGH * ranks:
        return 0

    def waste(dim: int) -> float:
        return -(-shape[dim] // ranks) * ranks / shape[dim]

    return min(range(len(shape)), key=waste)
