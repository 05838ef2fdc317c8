"""Values that only rank 0 has: each parameter is broadcast when it is needed, and then cut.

So one rank reads a pretrained model, and the others, which build theirs under `delayed_init`, never
hold more of it than a parameter beside their shards.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from .. import c10d_names
from ..errors import ConfigError
from ..runtime import Runtime


@dataclass
class OfFirst:
    """Takes the place of a parameter's `history.History`."""

    kept: torch.Tensor | None
    """the values, on rank 0"""
    device: torch.device

    def values(self, name: str, like: nn.Parameter, shape: tuple[int, ...]) -> torch.Tensor:
        """The values on every rank. A collective call."""
        if self.kept is None:
            values = torch.empty(shape, dtype=like.dtype, device=self.device)
        else:
            values, self.kept = self.kept.to(self.device).contiguous(), None
        dist.broadcast(values, src=0)
        return values


def prepare(model: nn.Module, now: Runtime) -> None:
    """Leave ``model`` without values: `materialise` gets them from rank 0, buffers come now.

    A collective call; all ranks must have built the same model. Raises ConfigError on all of them.
    """
    if now.mesh.pipeline > 1:
        raise ConfigError(
            "load_state_dict_from_rank0 = True with pipeline_parallel_degree > 1: stages need "
            "other parts of the model at other times; save it with nl.save on one rank, and "
            "nl.load it here"
        )
    _agree(model, now)
    new = {}
    for parameter in model.parameters():
        meta = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        meta._nearlinear_history = OfFirst(
            parameter.detach() if now.rank == 0 else None, now.device
        )
        new[parameter] = meta
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[key] = new[parameter]
    for buffer in model.buffers():
        values = buffer.to(now.device).contiguous()
        dist.broadcast(values, src=0)
        buffer.copy_(values)


def _agree(model: nn.Module, now: Runtime) -> None:
    """Raise ConfigError on all ranks unless rank 0 has values, and all have the same model."""
    empty = any(parameter.is_meta for parameter in model.parameters())
    described = [
        (name, tuple(p.shape), str(p.dtype), p.requires_grad)
        for name, p in model.named_parameters()
    ]
    described += [(name, tuple(b.shape), str(b.dtype)) for name, b in model.named_buffers()]
    mine = torch.tensor([zlib.crc32(repr(described).encode()), empty], device=now.device)
    all_ranks = mine.new_empty(dist.get_world_size() * 2)
    c10d_names.all_gather(all_ranks, mine)
    sums, empties = all_ranks.view(-1, 2).T.tolist()
    if empties[0]:
        raise ConfigError(
            "load_state_dict_from_rank0 = True, but the model has no values on rank 0: load it "
            "there, outside nl.delayed_init()"
        )
    others = [rank for rank, found in enumerate(sums) if found != sums[0]]
    if others:
        raise ConfigError(
            f"load_state_dict_from_rank0 = True, but rank {others[0]} has built another model than "
            "rank 0, or with another dtype, or frozen otherwise: do the same on all ranks"
        )
