"""The seam to FSDP2: an all-gather that a sharded module can be given instead of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

try:  # the one private import of this package; checked on 2.12 to 2.15
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather as _AllGather
except ImportError as error:
    raise ImportError(
        f"torch {torch.__version__} keeps FSDP2's AllGather class elsewhere or has none: use "
        "module.set_allocate_memory_from_process_group_for_comm(True) instead, and mend "
        "nearlinear_collectives/fsdp.py"
    ) from error

# Its name before torch 2.13.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class AllGather(_AllGather):
    """Gathers the parameters of an FSDP2 module over ``group``, in memory of that group.

        for module in model.modules():
            if isinstance(module, FSDPModule):  # the setting is per module
                module.set_custom_all_gather(nearlinear_collectives.AllGather(group))

    Where the module's mesh is of the nearlinear backend already,
    ``module.set_allocate_memory_from_process_group_for_comm(True)`` does as much in one line, for
    reduce-scatters too. This class is for the other cases: all-gathers shall run over a group of
    their own (the mesh is of another backend, or gathers and reductions shall not wait for each
    other), or reduce-scatters shall keep their ordinary memory. ``group`` holds the ranks of the
    module's shard mesh, in the same order; the two settings exclude each other.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        backend, count = self.group._get_backend(device), math.prod(size)
        if not backend.supports_tensor_alloc(device):
            return torch.empty(*size, dtype=dtype, device=device)
        if hasattr(backend, "allocate_shared"):  # FSDP2 gathers in place and only reads the result
            return backend.allocate_shared(count, dtype).view(*size)
        return backend.allocate_tensor(count, dtype=dtype, device=device).view(*size)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        mine, its = dist.get_process_group_ranks(self.group), dist.get_process_group_ranks(group)
        if mine != its:
            raise ValueError(
                f"AllGather was given a group of ranks {mine}, but the module is sharded over {its}"
            )
        return all_gather_single(output_tensor, input_tensor, group=self.group, async_op=async_op)
