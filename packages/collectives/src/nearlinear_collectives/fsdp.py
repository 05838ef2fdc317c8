"""FSDP2 all-gather and reduce-scatter in the backend's own memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from .c10d_compat import all_gather_single, reduce_scatter_single

try:  # private; checked with torch 2.12, 2.13 and 2.14
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather as _AllGather
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as _ReduceScatter
except ImportError as error:
    raise ImportError(
        f"torch {torch.__version__} has no FSDP2 classes AllGather and ReduceScatter in "
        "torch.distributed.fsdp._fully_shard._fsdp_api (checked with 2.12 to 2.14). Call "
        "module.set_allocate_memory_from_process_group_for_comm(True) instead of use_in()"
    ) from error


def use_in(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Make every FSDP2 module in ``model`` gather and reduce over ``group``, in its memory.

        nearlinear_collectives.use_in(model, mesh.get_group())      # after fully_shard

    Gathered parameters of at least 32 KiB per rank then exist once per node, and gradients are
    reduced from the memory FSDP2 wrote them to.
    ``module.set_allocate_memory_from_process_group_for_comm(True)`` enables only the second part
    and works only with the mesh's own group; do not combine the two.

    Args:
        model: Model with at least one module that `fully_shard` was applied to.
        group: Group of the ranks of the modules' shard mesh, in the same order: the mesh's own
            group, or a separate one if the mesh uses another backend.

    Raises:
        ValueError: ``model`` has no FSDP2 module.
    """
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise ValueError("use_in() found no FSDP2 module: call fully_shard() on the model first")
    gather, reduce = AllGather(group), ReduceScatter(group)
    for module in modules:
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(reduce)


class _GroupCollective:
    """A collective with a process group of its own and that group's memory."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        backend: Any = self.group._get_backend(device)  # the stubs lack its allocators
        if not backend.supports_tensor_alloc(device):
            return torch.empty(*size, dtype=dtype, device=device)
        return backend.allocate_tensor(math.prod(size), dtype=dtype, device=device).view(*size)

    def check_ranks(self, group: dist.ProcessGroup) -> None:
        own_ranks = dist.get_process_group_ranks(self.group)
        module_ranks = dist.get_process_group_ranks(group)
        if own_ranks != module_ranks:
            raise ValueError(
                f"{type(self).__name__} has a group of ranks {own_ranks}, but the module is "
                f"sharded over {module_ranks}. Use a group of the module's shard mesh"
            )


class AllGather(_GroupCollective, _AllGather):
    """FSDP2 all-gather into memory that exists once per node.

    Pass an instance to ``module.set_custom_all_gather`` of an FSDP2 module.
    """

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        backend: Any = self.group._get_backend(device)  # the stubs lack its allocators
        if hasattr(backend, "allocate_shared") and backend.supports_tensor_alloc(device):
            # Shared memory is safe here: FSDP2 gathers in place and only reads the result.
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


class ReduceScatter(_GroupCollective, _ReduceScatter):
    """FSDP2 reduce-scatter from the memory that the gradients were written to.

    Pass an instance to ``module.set_custom_reduce_scatter`` of an FSDP2 module.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,  # ReduceOp or RedOpType
        async_op: bool = False,
    ) -> dist.Work | None:
        self.check_ranks(group)
        return reduce_scatter_single(
            output_tensor, input_tensor, op=op, group=self.group, async_op=async_op
        )
