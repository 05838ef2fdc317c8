"""A torch.distributed backend for host memory: shared memory on a node, all-to-all between nodes.

    import nearlinear_collectives
    torch.distributed.init_process_group("nearlinear")            # or "cpu:nearlinear,cuda:nccl"

All-gather, reduce-scatter, all-reduce, broadcast and barrier on CPU tensors are its own;
everything else goes to gloo (CPU) or NCCL (CUDA).
"""

from nearlinear_collectives.backend import register
from nearlinear_collectives.build import BuildError
from nearlinear_collectives.doctor import doctor
from nearlinear_collectives.engine_library import trace

__all__ = ["AllGather", "BuildError", "ReduceScatter", "doctor", "trace", "use_in"]

register()


def __getattr__(name: str):
    if name in ("AllGather", "ReduceScatter", "use_in"):  # FSDP2 takes a second to import
        from nearlinear_collectives import fsdp

        return getattr(fsdp, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
