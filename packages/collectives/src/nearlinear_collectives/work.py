"""Engine calls of the Python process group: argument conversion, staging, and Work objects.

The counterpart of glue/calls.h and glue/work.h. Futures hold a list of tensors, as DDP and its
hooks expect.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function

from . import engine_library as engine
from .group import EngineGroup, Transfer

DTYPES = {getattr(torch, name): code for code, name in enumerate(engine.DTYPES)}
REDUCTIONS = {getattr(dist.ReduceOp, name): code for code, name in enumerate(engine.REDUCTIONS)}
SUM, AVG = REDUCTIONS[dist.ReduceOp.SUM], REDUCTIONS[dist.ReduceOp.AVG]
BITWISE = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)
FACTORS = (dist.ReduceOp.AVG, dist.ReduceOp.PREMUL_SUM)
CPU = torch.device("cpu")

T = TypeVar("T")


def needs_fallback(tensor: torch.Tensor) -> bool:
    """Return True for tensors that the engine cannot handle: not on the CPU, or sparse."""
    return tensor.device.type != "cpu" or tensor.is_sparse


def element_of(dtype: torch.dtype) -> tuple[int, int]:
    """Return the dtype and the number of engine elements that make an element of ``dtype``.

    Complex numbers are two floats; a dtype unknown to the engine is moved as bytes.
    """
    real = dtype.to_real() if dtype.is_complex else dtype
    if real in DTYPES:
        return DTYPES[real], 1 + dtype.is_complex
    return DTYPES[torch.uint8], dtype.itemsize


def engine_reduction(op: Any, tensor: torch.Tensor, size: int) -> tuple[int, float] | None:
    """Convert a c10d reduction.

    Args:
        op: A ``ReduceOp``.
        tensor: Tensor to reduce.
        size: Ranks of the group.

    Returns:
        (reduction, scale) of the engine, or None if the reduction needs a fallback.
    """
    dtype, kind = tensor.dtype, op.op
    if needs_fallback(tensor) or (dtype.to_real() if dtype.is_complex else dtype) not in DTYPES:
        return None
    floating = dtype.is_floating_point
    if dtype.is_complex:
        if kind not in (dist.ReduceOp.SUM, *FACTORS):
            return None  # not an operation on its two floats
    elif kind in FACTORS and not floating:
        # Raised here because gloo would communicate before it raises.
        raise ValueError(f"{kind.name} needs a floating dtype, not {dtype}: use SUM, then scale")
    if kind == dist.ReduceOp.PREMUL_SUM:
        return SUM, float(op.__getstate__()[1])
    if kind == dist.ReduceOp.AVG:
        return AVG, 1.0 / size
    if kind in BITWISE and floating:
        return None
    return (REDUCTIONS[kind], 1.0) if kind in REDUCTIONS else None


def make_call(kind: int, tensor: torch.Tensor, timeout: timedelta) -> engine.Call:
    """Build a call without reduction."""
    dtype, units = element_of(tensor.dtype)
    call = engine.Call(kind=kind, scale=1.0, timeout_ms=timeout_ms(timeout))
    call.dtype, call.count = dtype, tensor.numel() * units
    return call


def make_reduce_call(
    kind: int, tensor: torch.Tensor, reduction: tuple[int, float], timeout: timedelta
) -> engine.Call:
    call = make_call(kind, tensor, timeout)
    call.reduce, call.scale = reduction
    return call


class Parts:
    """The parts that a rank exchanges with every rank, empty at first."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.array = (engine.Part * size)()
        self.units = element_of(dtype)[1]  # per element

    def set(self, rank: int, address: int, elements: int) -> None:
        self.array[rank] = engine.Part(address, elements * self.units)

    def elements(self) -> int:
        """Return the elements of all parts, as the engine counts them."""
        return sum(part.count for part in self.array)


def check_list(
    operation: str,
    parts: list[torch.Tensor],
    size: int,
    dtype: torch.dtype,
    elements: int | None = None,
) -> None:
    """Raise ValueError unless there is a tensor of ``dtype`` (and ``elements``) for every rank."""
    if len(parts) != size:
        raise ValueError(f"{operation}: {len(parts)} tensors for {size} ranks")
    for part in parts:
        if part.dtype != dtype:
            raise ValueError(
                f"{operation}: tensors of {dtype} and {part.dtype}; all must have one dtype"
            )
        if elements is not None and part.numel() != elements:
            raise ValueError(
                f"{operation}: tensors of {elements} and {part.numel()} elements; all must have "
                "one size"
            )


def split_parts(
    side: str, tensor: torch.Tensor, splits: list[int], size: int, address: int
) -> Parts:
    """Divide a tensor along its first dimension, equally without splits.

    Args:
        side: ``input`` or ``output``, for errors.
        tensor: Tensor of an all_to_all.
        splits: Rows for each rank, or empty.
        size: Ranks of the group.
        address: Memory of the tensor's contiguous copy.
    """
    rows = tensor.shape[0] if tensor.dim() else 1
    if any(split < 0 for split in splits):
        raise ValueError(f"all_to_all: an {side} split of {min(splits)} rows")
    if not splits and rows % size:
        raise ValueError(
            f"all_to_all: the {side}'s {rows} rows do not divide equally among {size} ranks: pass "
            "splits"
        )
    if splits and (len(splits) != size or sum(splits) != rows):
        raise ValueError(
            f"all_to_all: {len(splits)} {side} splits of {sum(splits)} rows in total, for {size} "
            f"ranks and {rows} rows"
        )
    row = tensor.numel() // rows if rows else 0
    parts = Parts(size, tensor.dtype)
    for rank, split in enumerate(splits or [rows // size] * size):
        parts.set(rank, address, row * split)
        address += row * split * tensor.element_size()
    return parts


def timeout_ms(timeout: timedelta) -> int:
    """Convert a timeout; c10d uses a negative one for the group's own timeout."""
    return engine.OWN_TIMEOUT if timeout < timedelta(0) else int(timeout.total_seconds() * 1000)


def single(operation: str, tensors: list[T]) -> T:
    """Return the tensor, or list, of a call; c10d's lists hold one per device of a rank."""
    if len(tensors) != 1:
        raise ValueError(
            f"{operation} takes one tensor per rank, not {len(tensors)}: call it once for each "
            "tensor"
        )
    return tensors[0]


def without_repetitions(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors without those that have the elements of an earlier one."""

    def place(tensor: torch.Tensor) -> Any:
        if tensor.layout != torch.strided or not tensor.numel():
            return id(tensor)
        return tensor.data_ptr(), tensor.shape, tensor.stride()

    return list({place(tensor): tensor for tensor in reversed(tensors)}.values())[::-1]


def are_adjacent(parts: list[torch.Tensor]) -> bool:
    """Return True if the tensors follow each other in memory, as the views of a chunk do."""
    expected = parts[0].data_ptr()
    for part in parts:
        if not part.is_contiguous() or part.data_ptr() != expected:
            return False
        expected += part.nbytes
    return True


def allocate_pooled(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocate memory shared with the ranks of this node, or ordinary memory if none is left."""
    library, size = engine.library(), count * dtype.itemsize
    memory = library.nlc_pool_allocate(size) if size else None
    if not memory:
        return torch.empty(count, dtype=dtype)
    return tensor_from_address(memory, size, dtype, library.nlc_pool_free)


def allocate_shared(group: EngineGroup, ranks: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocate an all-gather output that exists once per node (see nlc_shared_allocate)."""
    each, rest = divmod(count, ranks)
    memory = None if rest else group.allocate_shared(each * dtype.itemsize)
    if not memory:
        return allocate_pooled(count, dtype)
    return tensor_from_address(
        memory, count * dtype.itemsize, dtype, engine.library().nlc_shared_free
    )


def tensor_from_address(
    address: int, size: int, dtype: torch.dtype, free: Callable[[int], Any]
) -> torch.Tensor:
    """Wrap ``size`` bytes of engine memory, which ``free`` returns when the tensor is deleted."""
    block = (ctypes.c_char * size).from_address(address)
    weakref.finalize(block, free, address).atexit = False
    return torch.frombuffer(block, dtype=dtype)


class Staging:
    """Contiguous copies of strided tensors, and references that keep a call's memory alive."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def input(self, tensor: torch.Tensor) -> int:
        return self._keep(tensor.detach().contiguous())

    def output(self, tensor: torch.Tensor) -> int:
        if tensor.is_contiguous():
            return self._keep(tensor)
        return self._copy_back(tensor, torch.empty(tensor.shape, dtype=tensor.dtype))

    def in_place(self, tensor: torch.Tensor) -> int:
        if tensor.is_contiguous():
            return self._keep(tensor)
        return self._copy_back(tensor, tensor.detach().contiguous())

    def finish(self) -> None:
        """Copy results back to strided outputs and release all memory."""
        for tensor, copy in self.copies:
            tensor.detach().copy_(copy)
        self.kept.clear()
        self.copies.clear()

    def _keep(self, tensor: torch.Tensor) -> int:
        self.kept.append(tensor)
        return tensor.data_ptr()

    def _copy_back(self, tensor: torch.Tensor, copy: torch.Tensor) -> int:
        self.copies.append((tensor, copy))
        return self._keep(copy)


def profiler_event(call: engine.Call) -> contextlib.AbstractContextManager[Any]:
    """Record the block as an event of a call, if the profiler runs."""
    if not torch.autograd._profiler_enabled():
        return contextlib.nullcontext()
    name = engine.OPERATIONS[call.kind - engine.ALL_GATHER].removesuffix("_uneven")
    return record_function(f"nearlinear:{name}")


class EngineWork(dist.Work):
    """A collective, run on the caller's thread or started on an engine thread; or a message."""

    def __init__(self, outputs: list[torch.Tensor], staging: Staging) -> None:
        super().__init__()
        self.outputs, self.staging = outputs, staging
        self.failure: Exception | None = None
        self.ended: threading.Event | None = None  # None for a synchronous call, which is complete
        self.future: Any = None
        self.transfer: Transfer | None = None  # of a message

    def run(self, group: EngineGroup, call: engine.Call) -> None:
        group.run(call)
        self.staging.finish()

    def start(self, group: EngineGroup, call: engine.Call) -> None:
        self.ended, self.future = threading.Event(), torch.futures.Future()
        group.start(call, self.finish)

    def post(self, group: EngineGroup, call: engine.Call) -> None:
        """Post a message."""
        self.ended, self.future = threading.Event(), torch.futures.Future()
        self.transfer = group.post(call, self.finish)

    def finish(self, failure: Exception | None) -> None:
        """Complete a started call or a message; runs on an engine thread, or one that waits."""
        if failure is None:
            try:
                self.staging.finish()
            except Exception as error:
                failure = error
        self.failure = failure
        assert self.ended is not None  # set by start()
        self.ended.set()
        if failure is None:
            self.future.set_result(self.outputs)
        else:
            self.future.set_exception(failure)

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self.transfer is not None and not self.is_completed():
            # Driving it here is faster than a change of threads.
            self.transfer.wait(int(1000 * (timeout_seconds(timeout) or 0)))
        if self.ended is not None:
            if not self.ended.wait(timeout_seconds(timeout)):
                raise RuntimeError(
                    f"the collective did not complete within {timeout}; it is still running"
                )
            self.future.wait()  # complete by now; raises the collective's error
        return True

    def is_completed(self) -> bool:
        return self.ended is None or self.future.done()

    def is_success(self) -> bool:
        return self.is_completed() and self.failure is None

    def exception(self) -> Exception | None:
        return self.failure

    def _source_rank(self) -> int:
        if self.transfer is None:
            raise RuntimeError("only a receive has a source rank")
        return self.transfer.rank()

    def synchronize(self) -> None:
        """Do nothing: host memory has no streams."""

    def result(self) -> list[torch.Tensor]:
        return self.outputs

    def get_future(self) -> torch.futures.Future:
        if self.future is None:
            self.future = torch.futures.Future()
            self.future.set_result(self.outputs)
        return self.future


class CombinedWork(dist.Work):
    """Several works as one: the calls of a coalescing block, or of a coalesced collective."""

    def __init__(self, works: Sequence[dist.Work], outputs: list[torch.Tensor]) -> None:
        super().__init__()
        self.works, self.outputs = works, outputs

    def wait(self, timeout: timedelta | None = None) -> bool:
        return all(work.wait(timeout or timedelta(0)) for work in self.works)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self.works)

    def exception(self) -> Exception | None:
        return next((work.exception() for work in self.works if work.exception()), None)

    def synchronize(self) -> None:
        for work in self.works:
            work.synchronize()

    def result(self) -> list[torch.Tensor]:
        return self.outputs

    def get_future(self) -> torch.futures.Future:
        outputs = self.outputs

        def join(parts: torch.futures.Future) -> list[torch.Tensor]:
            for part in parts.value():
                part.value()  # raises the part's error
            return outputs

        return torch.futures.collect_all([work.get_future() for work in self.works]).then(join)


class CopyBackWork(CombinedWork):
    """A fallback's call on a contiguous copy; the first wait copies the result back."""

    def __init__(self, work: dist.Work, tensor: torch.Tensor, copy: torch.Tensor) -> None:
        super().__init__([work], [tensor])
        self.copy: torch.Tensor | None = copy
        self.lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        super().wait(timeout)
        self.copy_back()
        return True

    def get_future(self) -> torch.futures.Future:
        def copied(future: torch.futures.Future) -> list[torch.Tensor]:
            future.value()
            self.copy_back()
            return self.outputs

        return super().get_future().then(copied)

    def copy_back(self) -> None:
        with self.lock:
            if self.copy is not None:
                self.outputs[0].detach().copy_(self.copy)
                self.copy = None


def call_on_contiguous(
    call: Callable[..., dist.Work], output: torch.Tensor, *inputs: torch.Tensor
) -> dist.Work:
    """Run a fallback's reduction on contiguous tensors; gloo reduces strided ones wrongly.

    Args:
        call: Called with the output and the inputs, or with contiguous copies of them.
        output: Tensor that receives the result.
        inputs: Further tensor arguments.
    """
    if output.is_sparse or all(tensor.is_contiguous() for tensor in (output, *inputs)):
        return call(output, *inputs)
    copy = output.contiguous()
    work = call(copy, *(tensor.contiguous() for tensor in inputs))
    return work if copy is output else CopyBackWork(work, output, copy)


def combine(works: list[dist.Work], outputs: list[torch.Tensor]) -> dist.Work:
    return works[0] if len(works) == 1 else CombinedWork(works, outputs)


def timeout_seconds(timeout: timedelta | None) -> float | None:
    """Convert a wait timeout; c10d waits without limit on a timeout of zero."""
    return timeout.total_seconds() if timeout else None
