"""The seam to FSDP2: the all-gather and the reduce-scatter that a sharded module can be given."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from nearlinear_collectives.c10d_names import all_gather_single, reduce_scatter_single

try:  # the private imports of this package; checked with 2.12, 2.13, 2.14
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather as _AllGather
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as _ReduceScatter
except ImportError as error:
    raise ImportError(
        f"torch {torch.__version__} keeps FSDP2's classes AllGather and ReduceScatter elsewhere or "
        "has none: use module.set_allocate_memory_from_process_group_for_comm(True) instead, and "
        "mend nearlinear_collectives/fsdp.py"
    ) from error


def use_in(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Have every FSDP2 module in ``model`` gather and reduce over ``group``, in its memory.

        nearlinear_collectives.use_in(model, mesh.get_group())      # after fully_shard

    Gathers of at least 32 KiB per rank then exist once per node, and what is reduced is read where
    FSDP2 wrote it. ``group`` holds the ranks of the modules' shard mesh, in the same order; it may
    be the mesh's own or, where that is of another backend, one made aside.
    ``module.set_allocate_memory_from_process_group_for_comm(True)``, which needs the mesh's own,
    does the second half; the two exclude each other.
    """
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise ValueError("use_in() found no FSDP2 module: call fully_shard() on the model first")
    gather, reduce = AllGather(group), ReduceScatter(group)
    for module in modules:
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(reduce)


class _OverGroup:
    """What both have in common: a group of their own, and its memory."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        backend = self.group._get_backend(device)
        if not backend.supports_tensor_alloc(device):
            return torch.empty(*size, dtype=dtype, device=device)
        return backend.allocate_tensor(math.prod(size), dtype=dtype, device=device).view(*size)

    def check_ranks(self, group: dist.ProcessGroup) -> None:
        mine, its = dist.get_process_group_ranks(self.group), dist.get_process_group_ranks(group)
        if mine != its:
            raise ValueError(
                f"{type(self).__name__} was given a group of ranks {mine}, but the module is "
                f"sharded over {its}"
            )


class AllGather(_OverGroup, _AllGather):
    """Gathers an FSDP2 module's parameters over ``group``, once per node: for
    ``module.set_custom_all_gather``."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        backend = self.group._get_backend(device)
        if hasattr(backend, "allocate_shared") and backend.supports_tensor_alloc(device):
            # FSDP2 gathers in place and only reads the result.
            return backend.allocate_shared(math.prod(size), dtype).view(*size)
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.check_ranks(group)
        return all_gather_single(output_tensor, input_tensor, group=self.group, async_op=async_op)


class ReduceScatter(_OverGroup, _ReduceScatter):
    """Reduces an FSDP2 module's gradients over ``group``, from where they were written: for
    ``module.set_custom_reduce_scatter``."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.check_ranks(group)
        return reduce_scatter_single(
            output_tensor, input_tensor, op=op, group=self.group, async_op=async_op
        )
