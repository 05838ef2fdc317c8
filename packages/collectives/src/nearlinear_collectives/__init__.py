"""A torch.distributed backend for host memory: shared memory on a node, all-to-all between nodes.

    torch.distributed.init_process_group("nearlinear")            # or "cpu:nearlinear,cuda:nccl"

torch itself imports the package (its entry points), unless TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set.
Operations on CPU tensors run on the package's own engine; those on sparse tensors are delegated to
gloo, and those on CUDA tensors to NCCL.
"""

from typing import TYPE_CHECKING

from .backend import register
from .build import BuildError
from .doctor import doctor
from .engine_library import trace

if TYPE_CHECKING:
    from .fsdp import AllGather, ReduceScatter, use_in

__all__ = ["AllGather", "BuildError", "ReduceScatter", "doctor", "trace", "use_in"]

register()

if not TYPE_CHECKING:

    def __getattr__(name: str):
        if name in ("AllGather", "ReduceScatter", "use_in"):  # importing FSDP2 takes a second
            from . import fsdp

            return getattr(fsdp, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
