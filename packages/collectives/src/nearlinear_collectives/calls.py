"""c10d's arguments as the engine takes them: dtypes, reductions, timeouts, memory."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from nearlinear_collectives import engine_library as engine
from nearlinear_collectives.group import Group

DTYPES = {getattr(torch, name): code for code, name in enumerate(engine.DTYPES)}
REDUCTIONS = {getattr(dist.ReduceOp, name): code for code, name in enumerate(engine.REDUCTIONS)}
SUM, AVG = REDUCTIONS[dist.ReduceOp.SUM], REDUCTIONS[dist.ReduceOp.AVG]
BITWISE = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)
CPU = torch.device("cpu")


def foreign(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu" or tensor.is_sparse


def engine_reduction(
    op: dist.ReduceOp, tensor: torch.Tensor, size: int
) -> tuple[int, float] | None:
    """(reduction, scale) of the engine for a c10d reduction; ``None`` if it leaves it to others."""
    dtype, kind = tensor.dtype, op.op
    if foreign(tensor) or dtype not in DTYPES:
        return None
    floating = dtype.is_floating_point
    if kind in (dist.ReduceOp.AVG, dist.ReduceOp.PREMUL_SUM) and not floating:
        # Said here, for gloo would communicate before it finds out.
        raise ValueError(f"{kind.name} needs a floating dtype, not {dtype}: use SUM, then scale")
    if kind == dist.ReduceOp.PREMUL_SUM:
        return SUM, float(op.__getstate__()[1])
    if kind == dist.ReduceOp.AVG:
        return AVG, 1.0 / size
    if kind in BITWISE and floating:
        return None
    return (REDUCTIONS[kind], 1.0) if kind in REDUCTIONS else None


def bytes_call(kind: int, tensor: torch.Tensor, timeout: timedelta) -> engine.Call:
    """A call that moves bytes only: a dtype the engine does not know travels as bytes."""
    dtype = DTYPES.get(tensor.dtype)
    call = engine.Call(kind=kind, scale=1.0, timeout_ms=own_or(timeout))
    if dtype is None:
        call.dtype, call.count = DTYPES[torch.uint8], tensor.nbytes
    else:
        call.dtype, call.count = dtype, tensor.numel()
    return call


def reduce_call(
    kind: int, tensor: torch.Tensor, reduction: tuple[int, float], timeout: timedelta
) -> engine.Call:
    call = bytes_call(kind, tensor, timeout)
    call.reduce, call.scale = reduction
    return call


def own_or(timeout: timedelta) -> int:
    """c10d says "the group's own timeout" with a negative one."""
    return engine.OWN_TIMEOUT if timeout < timedelta(0) else int(timeout.total_seconds() * 1000)


def adjacent(parts: list[torch.Tensor]) -> bool:
    """Whether tensors lie one after the other in one memory, as chunk views do."""
    expected = parts[0].data_ptr()
    for part in parts:
        if not part.is_contiguous() or part.data_ptr() != expected:
            return False
        expected += part.nbytes
    return True


def allocate_pooled(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory shared with the ranks of this node, or ordinary memory if none is left."""
    library, size = engine.library(), count * dtype.itemsize
    memory = library.nlc_pool_allocate(size) if size else None
    if not memory:
        return torch.empty(count, dtype=dtype)
    return tensor_at(memory, size, dtype, library.nlc_pool_free)


def allocate_shared(group: Group, ranks: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """The output of an all-gather that exists once per node (see nlc_shared_allocate)."""
    each, rest = divmod(count, ranks)
    memory = None if rest else group.allocate_shared(each * dtype.itemsize)
    if not memory:
        return allocate_pooled(count, dtype)
    return tensor_at(memory, count * dtype.itemsize, dtype, engine.library().nlc_shared_free)


def tensor_at(memory: int, size: int, dtype: torch.dtype, free: Callable) -> torch.Tensor:
    """A tensor over ``size`` bytes of the engine's memory, which it gives back with ``free``."""
    block = (ctypes.c_char * size).from_address(memory)
    weakref.finalize(block, free, memory).atexit = False
    return torch.frombuffer(block, dtype=dtype)
