"""The only module that imports private names of torch, each with the versions it was checked on.

Everything else in nearlinear uses torch's documented API. When a torch release moves a name, the
import here fails, tests/core/test_torch_shim.py says which one, and only this file changes.
On the CPU torch 2.8 is the oldest: FSDP2 of 2.6 does not run there, that of 2.7 not with replicas.
"""

import contextlib

import torch
from torch._subclasses import fake_tensor
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing.reductions import StorageWeakRef as WeakStorage  # 2.8.0, 2.13.0
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode  # sees every operator; 2.8.0, 2.13.0

__all__ = [
    "TorchDispatchMode",
    "WeakStorage",
    "abandon_backward",
    "after_backward",
    "communicates_by_hooks",
    "communication_classes",
    "flash_attention",
    "flash_attention_backward",
    "forget_layouts",
    "gather_asynchronously",
    "gathered_bytes",
    "has_flash_attention",
    "fake_tensors",
    "in_backward",
    "instead_of_truncated_normal",
    "is_fake",
    "job_store",
    "local_block",
    "map_instances",
    "map_tensors",
    "name_of_group",
    "recomputing",
    "reduce_unused_parameters",
    "seeing_saved_tensors",
    "sharded_parameters",
    "shards_on_cpu",
    "storage_of",
    "tensors_in",
    "thread_group_base",
    "unset_fake",
    "watching_resizes",
]


def thread_group_base():
    """The process group whose ranks are threads of one process, and how to install and remove it.

    Returns (group class, install(), uninstall(), ending()); the last says whether a rank failed.
    Checked on torch 2.8.0 and 2.13.0.
    """
    from torch._C._distributed_c10d import _set_thread_isolation_mode
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    def install():
        _set_thread_isolation_mode(True)
        threaded._install_threaded_pg()

    def uninstall():
        threaded._uninstall_threaded_pg()
        if threaded._ctx_manager is not None:  # older releases leave autograd single-threaded
            threaded._ctx_manager.__exit__(None, None, None)
            threaded._ctx_manager = None
        _set_thread_isolation_mode(False)

    group = threaded.ProcessLocalGroup
    return group, install, uninstall, group._terminate.is_set


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


def after_backward(function) -> None:
    """Call ``function`` at the end of the backward pass that is running on this thread. 2.13.0."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


@contextlib.contextmanager
def instead_of_truncated_normal(function):
    """Have ``torch.nn.init.trunc_normal_``, by whatever name it was imported, call ``function``.

    That gets the original as its first argument. 2.8.0, 2.13.0.
    """
    original = torch.nn.init._no_grad_trunc_normal_

    def instead(*args, **kwargs):
        return function(original, *args, **kwargs)

    torch.nn.init._no_grad_trunc_normal_ = instead
    try:
        yield
    finally:
        torch.nn.init._no_grad_trunc_normal_ = original


def local_block(tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and offset of a DTensor's block on this rank. 2.8.0, 2.13.0."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )


def job_store():
    """The store by which this job's ranks found each other. 2.8.0, 2.13.0."""
    return distributed_c10d._get_default_store()


def name_of_group(group) -> str:
    """By which torch knows the process group ``group``. 2.8.0, 2.13.0."""
    return distributed_c10d._world.pg_names[group]


def map_tensors(function, tree):
    """``tree`` (dicts, lists, model outputs) with every tensor replaced. 2.8.0, 2.13.0."""
    return _pytree.tree_map_only(torch.Tensor, function, tree)


def tensors_in(tree) -> list:
    """The tensors of ``tree``, in order. 2.8.0, 2.13.0."""
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def map_instances(kind, function, tree):
    """``tree`` with every instance of ``kind`` replaced. 2.8.0, 2.13.0."""
    return _pytree.tree_map_only(kind, function, tree)


def storage_of(tensor) -> int:
    """A number of the memory that ``tensor`` is a view of, its own as long as that is alive, or a
    `WeakStorage` of it, also when it is resized. 2.8.0, 2.13.0."""
    return tensor.untyped_storage()._cdata


def in_backward() -> bool:
    """Whether a backward pass is running on this thread. 2.8.0, 2.13.0."""
    return torch._C._current_graph_task_id() != -1


@contextlib.contextmanager
def seeing_saved_tensors(see):
    """Show every tensor that is saved for a backward pass to ``see``, too.

    Hooks that are there already do with it what they do. 2.13.0.
    """
    there = torch._C._autograd._top_saved_tensors_default_hooks(True)
    pack, unpack = there or (lambda tensor: tensor, lambda tensor: tensor)

    def pack_and_see(tensor):
        see(tensor)
        return pack(tensor)

    with torch.autograd.graph.saved_tensors_hooks(pack_and_see, unpack):
        yield


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


def fake_tensors():
    """A mode in which tensors have shapes and no memory; real ones may stand beside them.
    2.13.0."""
    return fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)


def forget_layouts() -> None:
    """Drop what DTensors remember of meshes: they take one of the same ranks for another's of an
    earlier job, whose groups are gone. 2.13.0."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


def is_fake(tensor) -> bool:
    """Whether ``tensor`` has no memory. 2.13.0."""
    return isinstance(tensor, fake_tensor.FakeTensor)


def unset_fake():
    """Inside, operators that come to `fake_tensors` run for real. 2.13.0."""
    return fake_tensor.unset_fake_temporarily()


@contextlib.contextmanager
def watching_resizes(see):
    """Call ``see`` with the number (`storage_of`) of every storage that Python code resizes, and
    its new bytes, before. 2.13.0."""
    original = torch.UntypedStorage.resize_

    def resize_(storage, size):
        see(storage._cdata, size)
        return original(storage, size)

    torch.UntypedStorage.resize_ = resize_
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original


def has_flash_attention(q, k, v) -> bool:
    """Whether a flash kernel takes these: (B, H, Q, D), (B, K, S, D), any multiple H of K.

    On the CPU any floating dtype; on CUDA half precision, from the Ampere generation on.
    """
    if not q.shape[-1] == k.shape[-1] == v.shape[-1]:
        return False
    if q.device.type == "cpu":
        return q.dtype in (torch.float32, torch.bfloat16, torch.float16)
    halves = q.dtype in (torch.bfloat16, torch.float16)
    fits = halves and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return q.device.type == "cuda" and fits and torch.cuda.get_device_capability(q.device) >= (8, 0)


def flash_attention(q, k, v, causal: bool, scale: float):
    """Output (B, H, Q, D) in q's dtype and lse (B, H, Q) in float32 of one block of attention.

    Checked on torch 2.13.0; on CUDA its declared shapes only.
    """
    if q.device.type == "cpu":
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(q, k, v, 0.0, causal, scale=scale)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse, *_ = kernel(q, k, v, 0.0, causal, scale=scale)
    return out, lse


def flash_attention_backward(grad, q, k, v, out, lse, causal: bool, scale: float):
    """Gradients of q, k and v; ``out`` and ``lse`` may be of a softmax over more keys than these.

    Checked as `flash_attention`.
    """
    if q.device.type == "cpu":
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return kernel(grad, q, k, v, out, lse, 0.0, causal, scale=scale)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_backward
    no_dropout = torch.empty(2, dtype=torch.uint64, device=q.device)  # the generator's state
    return kernel(
        *(grad.contiguous(), q, k, v, out.contiguous(), lse.contiguous()),
        *(None, None, q.shape[2], k.shape[2], 0.0, causal, no_dropout, no_dropout),
        scale=scale,
    )


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


def shards_on_cpu() -> bool:
    """Whether this torch's FSDP2 runs on the CPU, with replicas too."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)


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
