"""Clip gradients by their global norm, whatever meshes the parameters live on.

``torch.nn.utils.clip_grad_norm_`` refuses gradients from different meshes. Here each rank squares
the norms of its shards, the squares are summed over the axes a mesh shards on (never over the ones
it replicates on), and the sums of all meshes add up to one norm, the same on every rank.
"""

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from .. import runtime
from . import layout, optimizer_guard, slices


@torch.no_grad()
def clip_grad_norm_(model: nn.Module | Iterable[torch.Tensor], max_norm: float) -> float:
    """Scale all gradients so that their joint L2 norm is at most ``max_norm``; return the norm.

    ``model`` is a module or its parameters; ``max_norm = math.inf`` measures only. A norm that is
    not finite is returned as it is and leaves the gradients alone. Raises RuntimeError inside an
    unfinished `accumulate`, where there are no gradients yet.
    """
    given = model.parameters() if isinstance(model, nn.Module) else model
    parameters = [slices.of(parameter) for parameter in given]
    optimizer_guard.check(parameters)
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = _global_norm(parameters)
    if math.isfinite(norm) and norm > max_norm:
        torch._foreach_mul_([layout.local(g) for g in gradients], max_norm / (norm + 1e-6))
    return norm


def _global_norm(parameters: list[nn.Parameter]) -> float:
    alike = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None and not getattr(parameter, "_nearlinear_copy", False):
            alike[_spread(parameter)].append(layout.local(parameter.grad))
    total = 0.0
    for (mesh, sharded, axes), shards in alike.items():
        squares = torch.nn.utils.get_total_norm(shards).double().square()
        if mesh is not None:  # gradients of offloaded parameters are in host memory
            squares = squares.to(mesh.device_type)
        for dim in sharded:
            dist.all_reduce(squares, group=mesh.get_group(dim))
        for axis in axes:
            dist.all_reduce(squares, group=runtime.current().group(axis))
        total += squares.item()
    if runtime.is_initialized() and runtime.current().mesh.pipeline > 1:
        now = runtime.current()
        stages = torch.tensor(total, dtype=torch.float64, device=now.device)
        dist.all_reduce(stages, group=now.group("pipeline"))
        total = stages.item()
    return math.sqrt(total) if total >= 0 else math.nan


def _spread(parameter: nn.Parameter):
    """(mesh, the mesh dims it is sharded on, axes it is cut on): equal keys reduce together."""
    axes = tuple(sorted({cut.axis for cut in layout.cuts_of(parameter)}))
    gradient = parameter.grad
    if not isinstance(gradient, DTensor):
        return None, (), axes
    dims = tuple(i for i, place in enumerate(gradient.placements) if place.is_shard())
    return gradient.device_mesh, dims, axes
