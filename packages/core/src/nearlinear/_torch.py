"""The only module that imports private names of torch, each with the versions it was checked on.

Everything else in nearlinear uses torch's documented API. When a torch release moves a name, the
import here fails, tests/core/test_torch_shim.py says which one, and only this file changes.
"""

import torch
from torch.distributed import distributed_c10d as _c10d
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode  # sees every operator; 2.13.0

__all__ = [
    "TorchDispatchMode",
    "abandon_backward",
    "holds_partial_sums",
    "map_tensors",
    "store_barrier",
    "thread_group_base",
]


def thread_group_base():
    """The process group whose ranks are threads of one process, and how to install and remove it.

    Returns (group class, install(), uninstall()). Checked on torch 2.13.0.
    """
    from torch._C._distributed_c10d import _set_thread_isolation_mode
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    def install():
        _set_thread_isolation_mode(True)
        threaded._install_threaded_pg()

    def uninstall():
        threaded._uninstall_threaded_pg()
        _set_thread_isolation_mode(False)

    return threaded.ProcessLocalGroup, install, uninstall


def store_barrier(rank: int, store, world: int, timeout) -> None:
    """Wait until all ``world`` ranks have reached this point. Checked on torch 2.13.0."""
    _c10d._store_based_barrier(rank, store, "", world, timeout)


def map_tensors(function, tree):
    """``tree`` (dicts, lists, model outputs) with every tensor replaced. Checked on 2.13.0."""
    return _pytree.tree_map_only(torch.Tensor, function, tree)


def abandon_backward(root) -> None:
    """Drop what a sharded model holds of an unfinished step: partial sums, queued reductions.

    Checked on torch 2.13.0 (`FSDPModule.reset_iter_state`); older releases keep the partial sums
    in ``_partial_reduce_output`` of every parameter group.
    """
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
    for module in root.modules():
        if hasattr(module, "_get_fsdp_state"):
            for group in _param_groups(module._get_fsdp_state()):
                group._partial_reduce_output = None


def holds_partial_sums(root) -> bool:
    """Whether gradients wait for the all-reduce across replicas. Checked on torch 2.13.0."""
    return any(
        group._partial_reduce_output is not None
        for module in root.modules()
        if hasattr(module, "_get_fsdp_state")
        for group in _param_groups(module._get_fsdp_state())
    )


def _param_groups(state) -> list:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = state._fsdp_param_group
    return [] if group is None else [group]
