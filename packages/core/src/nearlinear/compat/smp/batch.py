"""Batches of ranks that compute one batch together, as SMP v1 distributes them.

Only the first rank of a pipeline needs the batch. With ``prescaled_batch = false`` each tensor rank
has a part of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ... import _torch
from ...distributed.consensus import all_gather_ints
from ...distributed.objects import unsupported_type
from ...distributed.runtime import Runtime
from ...errors import DataError
from ...pipeline_parallel.microbatch import batch_of_first_stage


def share_batch(
    arguments: Mapping[str, Any],
    runtime: Runtime,
    not_split: Collection[str],
    dims: Mapping[str, int],
) -> dict[str, Any]:
    """Return the arguments of a step function with the whole batch. A collective call.

    Arguments that cannot be sent, such as models, stay those of this rank.

    Args:
        arguments: Arguments by name, for the batch that this rank was given.
        runtime: This rank's runtime.
        not_split: Names of arguments that are not split into micro-batches.
        dims: Dim of the rows by name of the argument; default 0.

    Raises:
        DataError: The parts of tensor ranks differ in shape.
    """
    result = dict(arguments)
    if runtime.mesh.pipeline > 1 and runtime.config.pipeline_batch == "first_stage":
        sendable = {n: value for n, value in arguments.items() if not unsupported_type(value)}
        result |= batch_of_first_stage(sendable, runtime)
    if runtime.mesh.tensor > 1 and not runtime.config.prescaled_batch:
        for name, value in result.items():
            if name not in not_split:
                result[name] = _gather_parts(name, value, dims.get(name, 0), runtime)
    return result


def _gather_parts(name: str, value: Any, dim: int, runtime: Runtime) -> Any:
    """Return ``value`` with each tensor concatenated along ``dim`` over the tensor ranks."""
    group = runtime.group("tensor")

    def gather(part: torch.Tensor) -> torch.Tensor:
        if not part.dim():
            return part
        part = part.to(runtime.device).contiguous()
        shapes = all_gather_ints(part.shape, runtime.device, group)
        if any(shape != list(part.shape) for shape in shapes):
            raise DataError(
                f"prescaled_batch = false: {name} has the shapes {shapes} on the tensor ranks "
                f"{runtime.mesh.group('tensor', runtime.rank)}. Give all of them equally many rows "
                "of one length."
            )
        parts = [torch.empty_like(part) for _ in shapes]
        dist.all_gather(parts, part, group=group)
        return torch.cat(parts, dim)

    return _torch.map_tensors(gather, value)
