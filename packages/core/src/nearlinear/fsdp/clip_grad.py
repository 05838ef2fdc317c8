"""Gradient clipping by the global norm over parameters on different meshes.

``torch.nn.utils.clip_grad_norm_`` refuses gradients from different meshes. Here each rank computes
the squared norms of its shards and sums them over the axes on which their mesh shards, never over
the axes on which it replicates. The sum over all meshes is one norm, equal on every rank.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..distributed import runtime as runtimes
from ..distributed.runtime import Runtime
from .accumulate import check_gradients_complete
from .model_state import local_tensor, model_state, optimizer_parameter, parameter_state


@torch.no_grad()
def clip_grad_norm_(model: nn.Module | Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale all gradients so that their joint L2 norm is at most ``max_norm``; return the norm.

    A collective call. A norm that is infinite or NaN is returned and leaves the gradients
    unchanged.

    Args:
        model: A module or its parameters.
        max_norm: Largest norm; ``math.inf`` only measures it.

    Raises RuntimeError inside an unfinished `accumulate`, where there are no gradients yet.

    Example::

        for batch in nl.accumulate(model, micro_batches):
            model(**batch).loss.backward()
        norm = nl.clip_grad_norm_(model, 1.0)
    """
    given = list(model.parameters() if isinstance(model, nn.Module) else model)
    runtime = _runtime_of(model if isinstance(model, nn.Module) else None, given)
    parameters = [optimizer_parameter(parameter) for parameter in given]
    check_gradients_complete(parameters)
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = _global_norm(parameters, runtime)
    if math.isfinite(norm) and norm > max_norm:
        torch._foreach_mul_([local_tensor(g) for g in gradients], max_norm / (norm + 1e-6))
    return norm


_lock = threading.Lock()
_clips_in_steps = False


def clip_in_optimizer_steps() -> None:
    """Make ``optimizer.step()`` clip to ``sdp_gradient_clipping``, once per process."""
    global _clips_in_steps
    with _lock:
        if not _clips_in_steps:
            register_optimizer_step_pre_hook(_clip_before_step)
            _clips_in_steps = True


def _clip_before_step(optimizer: torch.optim.Optimizer, args, kwargs) -> None:
    """Clip the optimizer's gradients together, as SMP does. A collective call if the key is set."""
    by_norm = defaultdict(list)
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        model = parameter_state(parameter).model
        if model is not None and model.runtime is not None:
            by_norm[model.runtime.config.sdp_gradient_clipping].append(parameter)
    for max_norm, parameters in by_norm.items():
        if max_norm:
            clip_grad_norm_(parameters, max_norm)


def _runtime_of(model: nn.Module | None, parameters: list[nn.Parameter]) -> Runtime | None:
    """Return the runtime over which the model or its parameters are sharded, if they are."""
    states = (parameter_state(parameter).model for parameter in parameters)
    sharded = (state.runtime for state in states if state is not None)
    own = None if model is None else model_state(model).runtime
    return own or next(sharded, None) or runtimes.current_or_none()


def _global_norm(parameters: list[nn.Parameter], runtime: Runtime | None) -> float:
    alike = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None and not parameter_state(parameter).is_tied_copy:
            alike[_spread(parameter, parameter.grad)].append(local_tensor(parameter.grad))
    total = 0.0
    for (mesh, sharded, axes), shards in alike.items():
        squares = torch.nn.utils.get_total_norm(shards).double().square()
        if mesh is not None:  # gradients of offloaded parameters are in host memory
            squares = squares.to(mesh.device_type)
            for dim in sharded:
                dist.all_reduce(squares, group=mesh.get_group(dim))
        for axis in axes:
            assert runtime is not None
            dist.all_reduce(squares, group=runtime.group(axis))
        total += squares.item()
    if runtime is not None and runtime.mesh.pipeline > 1:
        stages = torch.tensor(total, dtype=torch.float64, device=runtime.device)
        dist.all_reduce(stages, group=runtime.group("pipeline"))
        total = stages.item()
    return math.sqrt(total) if total >= 0 else math.nan


def _spread(
    parameter: nn.Parameter, gradient: torch.Tensor
) -> tuple[DeviceMesh | None, tuple[int, ...], tuple[str, ...]]:
    """Return (mesh, its dims that shard, axes of splits); equal ones are reduced together."""
    axes = tuple(sorted({split.axis for split in parameter_state(parameter).splits}))
    if not isinstance(gradient, DTensor):
        return None, (), axes
    dims = tuple(i for i, place in enumerate(gradient.placements) if place.is_shard())
    return gradient.device_mesh, dims, axes
