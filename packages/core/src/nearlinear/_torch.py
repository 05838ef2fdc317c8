"""The only module that uses private names of torch, each with the versions it was checked on.

Everything else in nearlinear uses torch's documented API. When a torch release moves a name, an
import here fails, tests/core/test_torch_shim.py names it, and only this module changes. On the
CPU torch 2.8 is the oldest supported release: FSDP2 of 2.6 does not run there, and FSDP2 of 2.7
not with replicas.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import fake_tensor
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef as WeakStorage  # noqa: F401  2.8.0, 2.13.0
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: F401  sees every operator; 2.8.0, 2.13.0

# torch 2.13 deprecates the old names, which are the only ones before it.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Return ``tree`` (dicts, lists, model outputs) with ``function`` applied to every tensor.

    2.8.0, 2.13.0.
    """
    return _pytree.tree_map_only(torch.Tensor, function, tree)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of ``tree``, in order. 2.8.0, 2.13.0."""
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def map_instances(kind: type, function: Callable[[Any], Any], tree: Any) -> Any:
    """Return ``tree`` with ``function`` applied to every instance of ``kind``. 2.8.0, 2.13.0."""
    return _pytree.tree_map_only(kind, function, tree)


def after_backward(function: Callable[[], None]) -> None:
    """Call ``function`` at the end of the backward pass that is running on this thread. 2.13.0."""
    torch.autograd.Variable._execution_engine.queue_callback(function)  # pyright: ignore[reportAttributeAccessIssue] no stub


def in_backward() -> bool:
    """Return whether a backward pass is running on this thread. 2.8.0, 2.13.0."""
    return torch._C._current_graph_task_id() != -1


@contextlib.contextmanager
def seeing_saved_tensors(see: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Call ``see`` with every tensor that is saved for a backward pass. 2.13.0.

    Saved-tensor hooks that are installed already still apply.
    """
    autograd = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue] not in the stub
    outer = autograd._top_saved_tensors_default_hooks(True)
    pack, unpack = outer or (lambda tensor: tensor, lambda tensor: tensor)

    def pack_and_see(tensor: torch.Tensor):
        see(tensor)
        return pack(tensor)

    with torch.autograd.graph.saved_tensors_hooks(pack_and_see, unpack):
        yield


def shards_on_cpu() -> bool:
    """Return whether FSDP2 of this torch release runs on the CPU, also with replicas."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)


def communication_classes() -> tuple[type, type]:
    """Return FSDP2's interfaces of a unit's all-gather and reduce-scatter.

    ``object`` where there are none, see `supports_custom_collectives`. 2.12.1, 2.13.0, 2.14.1.
    """
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
    except ImportError:
        return object, object
    return AllGather, ReduceScatter


def supports_custom_collectives() -> bool:
    """Return whether FSDP2 units of this torch release accept custom collectives (not 2.8.0)."""
    return communication_classes() != (object, object) and hasattr(
        FSDPModule, "set_custom_reduce_scatter"
    )


def enable_async_all_gather(root: nn.Module) -> None:
    """Make FSDP2 wait for an all-gather when its parameters are used, not at once. 2.13.0."""
    _as_unit(root)._set_unshard_async_op(True)


@contextlib.contextmanager
def recomputing(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Wrap forward passes of ``modules`` that recompute activations inside a backward pass.

    FSDP2 units among them do not prefetch units whose backward pass is over. Recomputation stops
    when it has produced the saved tensors; the end of the backward pass resets the units that this
    leaves in the middle of their forward pass. Checked on torch 2.13.0.
    """
    units = [unit for module in modules for unit in module.modules()]
    states = [unit._get_fsdp_state() for unit in units if isinstance(unit, FSDPModule)]
    prefetched = [state._states_to_forward_prefetch for state in states]
    for state, targets in zip(states, prefetched, strict=True):
        state._states_to_forward_prefetch = [each for each in targets if each in states]
    try:
        yield
    finally:
        for state, targets in zip(states, prefetched, strict=True):
            state._states_to_forward_prefetch = targets


def abandon_backward(root: nn.Module) -> None:
    """Drop everything a sharded model holds of an unfinished step.

    These are queued reductions (`FSDPModule.reset_iter_state`, not in older releases), partial
    sums, and gradients of gathered parameters whose backward pass was cut short. Checked on torch
    2.8.0 and 2.13.0.
    """
    unit = _as_unit(root)
    if not hasattr(unit._get_fsdp_state()._comm_ctx, "all_gather_state"):
        return  # before the first forward pass
    if hasattr(unit, "reset_iter_state"):
        unit.reset_iter_state()
    else:
        _reset_iteration(unit)
    for group in _param_groups(unit):
        group._partial_reduce_output = None
        for entry in group.fsdp_params:
            entry.unsharded_accumulated_grad = None
            if hasattr(entry, "_unsharded_param"):
                entry._unsharded_param.grad = None


def _reset_iteration(root: Any) -> None:
    """Reset units whose forward or backward pass was cut short, on torch 2.8.0."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    for module in root.modules():
        for group in _groups_of(module):
            module._get_fsdp_state()._training_state = TrainingState.IDLE
            group._wait_for_post_backward()
            group.finalize_backward()  # waits for an all-gather that nobody has used
            group._training_state = TrainingState.IDLE
            group._to_sharded()
    state = root._get_fsdp_state()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False
    state._comm_ctx.all_gather_state = state._comm_ctx.reduce_scatter_state = None
    state._comm_ctx.post_forward_order.clear()


def reduce_unused_parameters(root: nn.Module) -> None:
    """Include parameters without a gradient in every reduction, as zeros.

    Micro-batches may use different parameters, and their partial sums must keep one layout. torch
    2.13.0 has a switch for it; in earlier releases every parameter group fills in the zeros.
    Checked on torch 2.8.0 and 2.13.0.
    """
    unit = _as_unit(root)
    if hasattr(unit, "set_reduce_scatter_unused_params"):
        unit.set_reduce_scatter_unused_params(True)
        return
    for group in _param_groups(unit):
        group.post_backward = _with_zeros(group)


def _with_zeros(group: Any) -> Callable[..., None]:
    """Return ``group.post_backward``, preceded by filling in the missing gradients."""
    reduce = group.post_backward

    def post_backward(*unused) -> None:
        for entry in group.fsdp_params if group.reduce_grads else ():
            if entry.unsharded_accumulated_grad is None and hasattr(entry, "_unsharded_param"):
                parameter = entry._unsharded_param
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        reduce(*unused)

    return post_backward


def hold_unreduced_gradients(unit: nn.Module | FSDPModule) -> None:
    """Move gradients that ``unit`` did not reduce into FSDP2's own sums, in the reduction's dtype.

    The next backward pass adds to the sums, and the next reduction includes them. 2.8.0, 2.13.0.
    """
    for group in _groups_of(unit):
        for entry in group.fsdp_params:
            if not hasattr(entry, "_unsharded_param"):
                continue  # not yet gathered once
            parameter = entry._unsharded_param
            if parameter.grad is None:
                continue
            if entry.unsharded_accumulated_grad is None:
                dtype = entry.reduce_dtype or parameter.grad.dtype
                entry.unsharded_accumulated_grad = parameter.grad.to(dtype)
            else:
                entry.unsharded_accumulated_grad += parameter.grad
            parameter.grad = None


def compute_in_place(unit: nn.Module | FSDPModule) -> None:
    """Let a unit whose parameters this rank does not share compute with them, not with copies.

    FSDP2 copies them at every gather. Where the copy has another dtype or device it remains.
    2.13.0; without effect on 2.8.0, which gathers from one rank.
    """
    for group in _groups_of(unit):
        for entry in group.fsdp_params:
            in_place = _InPlace(entry)
            entry.init_all_gather_outputs = in_place.init_output
            entry.free_unsharded_param = in_place.free


class _InPlace:
    """Replaces the allocation of one of FSDP2's gathered parameters by the parameter's memory."""

    def __init__(self, entry: Any):
        self.entry = entry
        self.own: torch.Tensor | None = None
        """The parameter, if it is the gathered one, too."""

    def init_output(self, *arguments) -> None:
        entry, own = self.entry, self.entry._sharded_param_data
        copies = entry.param_dtype is not None or entry.offload_to_cpu
        copies = copies or hasattr(entry._sharded_local_tensor, "fsdp_pre_all_gather")
        # FSDP2 resizes the output's storage to the size of the output.
        if copies or own.untyped_storage().nbytes() != own.nbytes:
            own = None
        if own is not self.own:  # also if a checkpoint replaced the parameter
            self.own = own
            entry.all_gather_outputs = [] if own is None else [own]
            vars(entry).pop("_unsharded_param", None)  # it has the former memory
        type(entry).init_all_gather_outputs(entry, *arguments)

    def free(self) -> None:
        if self.own is None:
            type(self.entry).free_unsharded_param(self.entry)


def sharded_parameters(unit: nn.Module | FSDPModule) -> list[nn.Parameter]:
    """Return the sharded parameters that ``unit`` itself gathers. 2.13.0."""
    return [entry.sharded_param for group in _groups_of(unit) for entry in group.fsdp_params]


def gathered_bytes(unit: nn.Module) -> int:
    """Return the bytes of the gathered parameters of ``unit`` itself. 2.8.0, 2.13.0."""
    total = 0
    for group in _groups_of(unit):
        for entry in group.fsdp_params:
            if not hasattr(entry, "_unsharded_param"):
                break  # not yet gathered once
            if storage_of(entry._unsharded_param) == storage_of(entry._sharded_param_data):
                continue  # see `compute_in_place`
            total += entry._unsharded_param.untyped_storage().nbytes()
            if total == 0:
                break  # parameters of a group are gathered and freed together
    return total


def _as_unit(module: nn.Module) -> Any:
    assert isinstance(module, FSDPModule)
    return module


def _param_groups(root: nn.Module) -> list[Any]:
    """Return the parameter groups of all sharded units in ``root``."""
    return [group for module in root.modules() for group in _groups_of(module)]


def _groups_of(module: nn.Module | FSDPModule) -> list[Any]:
    if not isinstance(module, FSDPModule):
        return []
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def storage_of(tensor: torch.Tensor) -> int:
    """Return an identifier of the storage of ``tensor``.

    It is unique while the storage, or a `WeakStorage` of it, is alive, and survives resizing.
    2.8.0, 2.13.0.
    """
    return tensor.untyped_storage()._cdata


def is_only_user(tensor: torch.Tensor) -> bool:
    """Return whether no other tensor uses the memory of ``tensor``. 2.8.0, 2.13.0."""
    storage = tensor.untyped_storage()  # a user, too
    return torch._C._storage_Use_Count(storage._cdata) == 2  # pyright: ignore[reportAttributeAccessIssue] no stub


def local_block(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape and the offset of a DTensor's block on this rank. 2.8.0, 2.13.0."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )


COMPOSED_INITIALIZERS = ("trunc_normal_", "orthogonal_", "sparse_", "dirac_")
"""Functions of ``torch.nn.init`` that do nothing to tensors without memory."""


@contextlib.contextmanager
def instead_of_initializers(function: Callable) -> Iterator[None]:
    """Replace `COMPOSED_INITIALIZERS`, under any name they were imported by, by ``function``.

    ``function`` receives the original as its first argument. 2.8.0, 2.13.0.
    """
    with contextlib.ExitStack() as stack:
        for name in COMPOSED_INITIALIZERS:
            inner = getattr(torch.nn.init, f"_no_grad_{name}", None) or getattr(torch.nn.init, name)
            stack.enter_context(replaced_code(inner, function))
        yield


@contextlib.contextmanager
def replaced_code(replaced: Any, function: Callable) -> Iterator[None]:
    """Replace the code of ``replaced``, to which other modules hold references.

    ``function`` receives the original as its first argument. 2.8.0, 2.13.0.
    """
    code, defaults, name = (
        replaced.__code__,
        replaced.__defaults__,
        f"_instead_of_{replaced.__name__}",
    )
    original = types.FunctionType(code, replaced.__globals__, replaced.__name__, defaults)
    original.__kwdefaults__ = replaced.__kwdefaults__
    namespace: dict[str, Any] = {}
    exec(f"def call(*args, **kwargs): return {name}(*args, **kwargs)", namespace)
    replaced.__globals__[name] = functools.partial(function, original)
    replaced.__code__, replaced.__defaults__ = namespace["call"].__code__, None
    try:
        yield
    finally:
        replaced.__code__, replaced.__defaults__ = code, defaults
        del replaced.__globals__[name]


def activation_wrappers() -> types.ModuleType:
    """Return the module with ``apply_activation_checkpointing`` and ``offload_wrapper``.

    2.8.0, 2.13.0.
    """
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper

    return checkpoint_wrapper


def thread_group_base() -> tuple[type, Callable[[], None], Callable[[], None], Callable[[], bool]]:
    """Return the process group class whose ranks are threads, and functions to manage it.

    Returns (group class, install(), uninstall(), ending()). ``ending()`` returns whether a rank
    failed. Checked on torch 2.8.0 and 2.13.0.
    """
    from torch._C._distributed_c10d import (
        _set_thread_isolation_mode,  # pyright: ignore[reportAttributeAccessIssue] not in the stub
    )
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    def install() -> None:
        _set_thread_isolation_mode(True)
        threaded._install_threaded_pg()

    def uninstall() -> None:
        threaded._uninstall_threaded_pg()
        if threaded._ctx_manager is not None:  # older releases leave autograd single-threaded
            threaded._ctx_manager.__exit__(None, None, None)
            threaded._ctx_manager = None
        _set_thread_isolation_mode(False)

    _share_inferred_results()
    group = threaded.ProcessLocalGroup
    return group, install, uninstall, group._terminate.is_set


def _share_inferred_results() -> None:
    """Let ranks that are threads share DTensor's inference of shapes, strides and dtypes.

    DTensor keeps sharding decisions per thread, so every new thread runs each operator again on
    fake tensors. 2.13.0; nothing changes in releases without the method.
    """
    from torch.distributed.tensor import _dtensor_spec, _sharding_prop

    propagator = _sharding_prop.ShardingPropagator
    infer = getattr(propagator, "_propagate_tensor_meta_non_cached", None)
    if infer is None or hasattr(infer, "__wrapped__"):
        return
    known: dict[tuple, Any] = {}

    def key(value: Any) -> Any:
        if isinstance(value, _dtensor_spec.DTensorSpec):
            return value.tensor_meta
        if isinstance(value, (list, tuple)):
            return type(value), *map(key, value)
        return type(value), value

    @functools.wraps(infer)
    def infer_once(self, op_schema):
        keywords = tuple((name, key(value)) for name, value in op_schema.kwargs_schema.items())
        call = (op_schema.op, key(op_schema.args_schema), keywords, torch.get_default_dtype())
        try:
            if call not in known:
                known[call] = infer(self, op_schema)
        except TypeError:  # an argument without a hash, such as a symbolic size
            return infer(self, op_schema)
        return known[call]

    propagator._propagate_tensor_meta_non_cached = infer_once


def job_store() -> dist.Store:
    """Return the store through which this job's ranks found each other. 2.8.0, 2.13.0."""
    return distributed_c10d._get_default_store()


def name_of_group(group: dist.ProcessGroup) -> str:
    """Return torch's name of the process group ``group``. 2.8.0, 2.13.0."""
    return distributed_c10d._world.pg_names[group]


def has_flash_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Return whether a flash kernel takes q (B, H, Q, D) and k, v (B, K, S, D), H a multiple of K.

    On the CPU any floating dtype; on CUDA half precision, from the Ampere generation on.
    """
    if not q.shape[-1] == k.shape[-1] == v.shape[-1]:
        return False
    if q.device.type == "cpu":
        return q.dtype in (torch.float32, torch.bfloat16, torch.float16)
    halves = q.dtype in (torch.bfloat16, torch.float16)
    fits = halves and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return q.device.type == "cuda" and fits and torch.cuda.get_device_capability(q.device) >= (8, 0)


def flash_attention(q, k, v, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one block's output (B, H, Q, D) in q's dtype, and lse (B, H, Q) in float32.

    Checked on torch 2.13.0; on CUDA its declared shapes only.
    """
    if q.device.type == "cpu":
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(q, k, v, 0.0, causal, scale=scale)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse, *_ = kernel(q, k, v, 0.0, causal, scale=scale)
    return out, lse


def flash_attention_backward(grad, q, k, v, out, lse, causal: bool, scale: float):
    """Return the gradients of q, k and v.

    ``out`` and ``lse`` may be those of a softmax over more keys than ``k``. Checked as
    `flash_attention`.
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


_MEAN, _NODES_ABOVE_LOSS = 1, 64
_LOSSES = (
    "NllLoss", "NllLoss2D", "MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy",
    "BinaryCrossEntropyWithLogits",
)  # fmt: skip


def divisors_of_mean_losses(loss: torch.Tensor) -> list[tuple[torch.Tensor | int, int]] | None:
    """Return the number of elements (or sum of class weights) of each mean that ``loss`` adds up.

    Beside each stands the label that the mean ignores, 0 if it ignores none.
    Read from the autograd graph next to ``loss``. Empty if no loss function of
    ``torch.nn.functional`` is there; None if one of them is not a mean. 2.13.0.
    """
    names = {f"{name}Backward0" for name in _LOSSES}
    found, level, seen = [], [loss.grad_fn], 0
    while level and seen < _NODES_ABOVE_LOSS:
        below = []
        for node in dict.fromkeys(filter(None, level)):
            seen += 1
            saved: Any = node
            if node.name() not in names:
                below += [next_node for next_node, _ in node.next_functions]
            elif saved._saved_reduction != _MEAN:
                return None
            elif hasattr(node, "_saved_total_weight"):
                # an unsigned number in Python
                ignored = ctypes.c_int64(saved._saved_ignore_index).value
                found.append((saved._saved_total_weight, ignored))
            else:
                found.append((saved._saved_target.numel(), 0))
        level = below
    return found


def fake_tensors() -> fake_tensor.FakeTensorMode:
    """Return a mode in which new tensors have no memory; real tensors may take part. 2.13.0."""
    return fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(tensor: object) -> bool:
    """Return whether ``tensor`` has no memory. 2.13.0."""
    return isinstance(tensor, fake_tensor.FakeTensor)


def unset_fake():
    """Return a context in which operators run for real inside `fake_tensors`. 2.13.0."""
    return fake_tensor.unset_fake_temporarily()


def forget_layouts() -> None:
    """Clear the sharding caches of DTensor, which confuse meshes of successive jobs. 2.13.0.

    A cached mesh over the same ranks keeps process groups that no longer exist.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


@contextlib.contextmanager
def watching_resizes(see: Callable[[int, int], None]) -> Iterator[None]:
    """Call ``see(storage, bytes)`` before Python code resizes a storage. 2.13.0.

    ``storage`` is the identifier that `storage_of` returns.
    """
    original = torch.UntypedStorage.resize_

    def resize_(storage, size):
        see(storage._cdata, size)
        return original(storage, size)

    torch.UntypedStorage.resize_ = resize_  # pyright: ignore[reportAttributeAccessIssue] parameter names
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original
