"""FSDP2: its collectives, its units' parameters, and what an unfinished step leaves in it."""

import contextlib

import torch
from torch.distributed.fsdp import FSDPModule


def shards_on_cpu() -> bool:
    """Whether this torch's FSDP2 runs on the CPU, with replicas too."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)


def communication_classes() -> tuple[type, type]:
    """FSDP2's interfaces of a unit's all-gather and reduce-scatter. 2.12.1, 2.13.0, 2.14.1.

    Plain ``object`` where there are none, see `communicates_by_hooks`.
    """
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
    except ImportError:
        return object, object
    return AllGather, ReduceScatter


def communicates_by_hooks() -> bool:
    """Whether units of this torch's FSDP2 can be given their collectives. Not those of 2.8.0."""
    return communication_classes() != (object, object) and hasattr(
        FSDPModule, "set_custom_reduce_scatter"
    )


def gather_asynchronously(root) -> None:
    """Have FSDP2 wait for an all-gather when its parameters are used, not at once. 2.13.0."""
    root._set_unshard_async_op(True)


@contextlib.contextmanager
def recomputing(modules):
    """Around forward passes of ``modules`` inside a backward pass, whose graphs nobody needs.

    FSDP2 units among them do not gather units ahead that have been through their backward pass.
    What recomputation, which ends when it has all that was saved, leaves half-way there, the end of
    the backward pass puts right. Checked on torch 2.13.0.
    """
    units = [unit for module in modules for unit in module.modules()]
    states = [unit._get_fsdp_state() for unit in units if isinstance(unit, FSDPModule)]
    ahead = [state._states_to_forward_prefetch for state in states]
    for state, targets in zip(states, ahead, strict=True):
        state._states_to_forward_prefetch = [each for each in targets if each in states]
    try:
        yield
    finally:
        for state, targets in zip(states, ahead, strict=True):
            state._states_to_forward_prefetch = targets


def abandon_backward(root) -> None:
    """Drop what a sharded model holds of an unfinished step.

    That is queued reductions (`FSDPModule.reset_iter_state`, not in older releases), partial sums,
    and gradients of gathered parameters whose backward was cut short. Checked on torch 2.8.0 and
    2.13.0.
    """
    if not hasattr(root._get_fsdp_state()._comm_ctx, "all_gather_state"):
        return  # no forward pass has been yet
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
    else:
        _reset_iteration(root)
    for group in _param_groups(root):
        group._partial_reduce_output = None
        for entry in group.fsdp_params:
            entry.unsharded_accumulated_grad = None
            if hasattr(entry, "_unsharded_param"):
                entry._unsharded_param.grad = None


def _reset_iteration(root) -> None:
    """What torch 2.8.0 lacks: units whose forward or backward was cut short begin anew."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    for module in root.modules():
        for group in _groups_of(module):
            module._get_fsdp_state()._training_state = TrainingState.IDLE
            group._wait_for_post_backward()
            group.finalize_backward()  # waits for a gather that nobody has used
            group._training_state = TrainingState.IDLE
            group._to_sharded()
    state = root._get_fsdp_state()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False
    state._comm_ctx.all_gather_state = state._comm_ctx.reduce_scatter_state = None
    state._comm_ctx.post_forward_order.clear()


def reduce_unused_parameters(root) -> None:
    """Let parameters without a gradient take part in every reduction, as zeros.

    Micro-batches may use different parameters, and their partial sums must keep one layout. torch
    2.13.0 has a switch for that; before it, every parameter group fills the zeros in itself.
    Checked on torch 2.8.0 and 2.13.0.
    """
    if hasattr(root, "set_reduce_scatter_unused_params"):
        root.set_reduce_scatter_unused_params(True)
        return
    for group in _param_groups(root):
        group.post_backward = _with_zeros(group)


def _with_zeros(group):
    """``group.post_backward``, which reduces the gradients there are, after completing them."""
    reduce = group.post_backward

    def post_backward(*unused):
        for entry in group.fsdp_params if group.reduce_grads else ():
            if entry.unsharded_accumulated_grad is None and hasattr(entry, "_unsharded_param"):
                parameter = entry._unsharded_param
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        reduce(*unused)

    return post_backward


def sharded_parameters(unit) -> list:
    """The parameters that ``unit`` itself gathers, as they are now. 2.13.0."""
    return [entry.sharded_param for group in _groups_of(unit) for entry in group.fsdp_params]


def gathered_bytes(unit) -> int:
    """Bytes of the parameters that ``unit`` itself has gathered now, beside its shards. 2.8.0,
    2.13.0."""
    total = 0
    for group in _groups_of(unit):
        for entry in group.fsdp_params:
            if not hasattr(entry, "_unsharded_param"):
                break  # not yet gathered once
            total += entry._unsharded_param.untyped_storage().nbytes()
            if total == 0:
                break  # those of a group come and go together
    return total


def _param_groups(root) -> list:
    """The parameter groups of all sharded units in ``root``."""
    return [group for module in root.modules() for group in _groups_of(module)]


def _groups_of(module) -> list:
    if not hasattr(module, "_get_fsdp_state"):
        return []
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
