"""Ranks that compute one batch together must be given one batch.

Where they are not, nothing fails: the loss is that of no batch. So the first batch of a model is
compared, once; reading by rank instead of by data rank, the usual cause, shows there.
"""

from __future__ import annotations

import zlib

import torch

from .. import _torch
from ..errors import DataError
from ..runtime import Runtime
from .exchange import gathered


class SameBatch:
    """Compares what it is first called with among the ranks of some axes of the mesh."""

    def __init__(self, now: Runtime, *axes: str):
        self.now = now
        self.axes = [axis for axis in axes if getattr(now.mesh, axis) > 1]

    def __call__(self, given):
        """``given``, any tree of tensors. Collective the first time. Raises DataError."""
        if not self.axes:
            return given
        mine = torch.tensor([_checksum(given)], device=self.now.device)
        sums = {axis: gathered(mine, self.now.group(axis)) for axis in self.axes}
        self.axes = []
        for axis, everyones in sums.items():
            if len(everyones.unique()) > 1:
                raise DataError(
                    f"the {axis} parallel ranks {self.now.mesh.group(axis, self.now.rank)} were "
                    "given different batches, and compute one together: read slice "
                    "mesh.data_rank(rank) of mesh.data_ranks instead of rank of world size "
                    "(mesh is what nl.init returns), with the same shuffling on all"
                )
        return given


def _checksum(tree) -> int:
    """Of the shapes and values of its tensors; rounding may differ, so not of floating ones."""
    found = 0
    for tensor in _torch.tensors_in(tree):
        if not tensor.is_floating_point():
            found = zlib.crc32(repr(tuple(tensor.shape)).encode(), found)
            found = zlib.crc32(tensor.cpu().contiguous().numpy(), found)
    return found
