"""The backend without a compiler: a process group in Python over the same engine.

It does what glue/backend.cc does, with the same checks, and costs some tens of microseconds more
per call. A synchronous call runs on the caller's thread, an asynchronous one on a thread of the
engine; neither holds the GIL meanwhile. torch takes a group that is written in Python as the whole
process group, so this one also answers for its name, its devices and its backends.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions  # the one not exported; 2.8 to 2.15

from nearlinear_collectives import engine_library as engine
from nearlinear_collectives.fallback import Fallbacks
from nearlinear_collectives.group import Group
from nearlinear_collectives.work import CopiedBack, EngineWork, ManyWorks, Staging

DTYPES = {getattr(torch, name): code for code, name in enumerate(engine.DTYPES)}
REDUCTIONS = {getattr(dist.ReduceOp, name): code for code, name in enumerate(engine.REDUCTIONS)}
SUM, AVG = REDUCTIONS[dist.ReduceOp.SUM], REDUCTIONS[dist.ReduceOp.AVG]
BITWISE = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)
CPU = torch.device("cpu")

Tensors = list[torch.Tensor]


def engine_reduction(op: dist.ReduceOp, dtype: torch.dtype, size: int) -> tuple[int, float] | None:
    """(reduction, scale) of the engine for a c10d reduction; ``None`` if it leaves it to others."""
    floating, kind = dtype.is_floating_point, op.op
    if kind in (dist.ReduceOp.AVG, dist.ReduceOp.PREMUL_SUM) and not floating:
        # Said here, for gloo would communicate before it finds out.
        raise ValueError(f"{kind.name} needs a floating dtype, not {dtype}: reduce with SUM, then scale")
    if kind == dist.ReduceOp.PREMUL_SUM:
        return SUM, float(op.__getstate__()[1])
    if kind == dist.ReduceOp.AVG:
        return AVG, 1.0 / size
    if kind in BITWISE and (floating or dtype == torch.bool):
        return None
    return (REDUCTIONS[kind], 1.0) if kind in REDUCTIONS else None


def foreign(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu" or tensor.is_sparse


def adjacent(parts: Tensors) -> bool:
    """Whether tensors lie one after the other in one memory, as chunk views do."""
    expected = parts[0].data_ptr()
    for part in parts:
        if not part.is_contiguous() or part.data_ptr() != expected:
            return False
        expected += part.nbytes
    return True


def bytes_call(kind: int, tensor: torch.Tensor, opts) -> engine.Call:
    """A call that moves bytes only: a dtype the engine does not know travels as bytes."""
    dtype = DTYPES.get(tensor.dtype)
    known = dtype is not None
    return engine.Call(
        kind=kind, scale=1.0, timeout_ms=own_or(opts.timeout),
        dtype=dtype if known else DTYPES[torch.uint8],
        count=tensor.numel() if known else tensor.nbytes,
    )


def own_or(timeout: timedelta) -> int:
    """c10d says "the group's own timeout" with a negative one."""
    return engine.OWN_TIMEOUT if timeout < timedelta(0) else int(timeout.total_seconds() * 1000)


class EngineProcessGroup(dist.ProcessGroup):
    """Owns ``group``; what the engine does not do goes to the backends that ``fallbacks`` makes."""

    def __init__(self, rank: int, size: int, group: Group, fallbacks: Fallbacks) -> None:
        super().__init__(rank, size)
        self._size, self._group, self._make_fallback = size, group, fallbacks.make
        self._fallbacks: dict[str, dist.Backend] = {}
        self._texts = {"name": "", "description": ""}
        self._sequence = 0
        self._coalesced: list[dist.Work] | None = None  # of the open coalescing block
        weakref.finalize(self, group.close)

    # --- what the engine does ------------------------------------------------------------------

    def broadcast(self, tensors: Tensors, opts=dist.BroadcastOptions()) -> dist.Work:
        [tensor] = tensors
        if foreign(tensor):
            return self._fallback(tensor).broadcast(tensors, opts)
        call, staging = bytes_call(engine.BROADCAST, tensor, opts), Staging()
        call.root = opts.rootRank
        call.output = staging.in_place(tensor)
        return self._launch(call, tensors, staging, opts.asyncOp)

    def allreduce(self, tensors: Tensors, opts=dist.AllreduceOptions()) -> dist.Work:
        [tensor] = tensors
        reduction = self._reduction(tensor, opts.reduceOp)
        if reduction is None:
            fallback = self._fallback(tensor)
            return on_contiguous(lambda tensor: fallback.allreduce([tensor], opts), tensor)
        call, staging = bytes_call(engine.ALL_REDUCE, tensor, opts), Staging()
        call.reduce, call.scale = reduction
        call.output = staging.in_place(tensor)
        return self._launch(call, tensors, staging, opts.asyncOp)

    def allreduce_coalesced(self, tensors: Tensors, opts=dist.AllreduceCoalescedOptions()):
        each = dist.AllreduceOptions()  # a fallback does not take the coalesced kind
        each.reduceOp, each.timeout, each.asyncOp = opts.reduceOp, opts.timeout, opts.asyncOp
        return together([self.allreduce([tensor], each) for tensor in tensors], tensors)

    def all_gather_single(self, output, input, opts=AllgatherOptions()) -> dist.Work:
        if foreign(input):
            return self._fallback(input)._allgather_base(output, input, opts)
        n, each = self._size, input.numel()
        if output.dtype != input.dtype:
            raise ValueError(f"all_gather: the output is {output.dtype}, the input {input.dtype}")
        if output.numel() != n * each:
            raise ValueError(
                f"all_gather: the output has {output.numel()} elements, but {n} ranks x {each} "
                f"elements of input make {n * each}")
        call, staging = bytes_call(engine.ALL_GATHER, input, opts), Staging()
        call.input, call.output = staging.input(input), staging.output(output)
        return self._launch(call, [output], staging, opts.asyncOp)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts=AllgatherOptions()):
        [parts], [input] = outputs, inputs
        if foreign(input):
            return self._fallback(input).allgather(outputs, inputs, opts)
        if len(parts) != self._size:
            raise ValueError(f"all_gather: {len(parts)} output tensors for {self._size} ranks")
        for part in parts:
            if part.numel() != input.numel() or part.dtype != input.dtype:
                raise ValueError(
                    f"all_gather: every output must have the input's dtype and {input.numel()} "
                    f"elements; one is {part.dtype} with {part.numel()}")
        call, staging = bytes_call(engine.ALL_GATHER, input, opts), Staging()
        call.input = staging.input(input)
        if adjacent(parts):
            call.output = staging.output(parts[0])
        else:
            call.outputs = (ctypes.c_void_p * self._size)(*map(staging.output, parts))
        return self._launch(call, parts, staging, opts.asyncOp)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts=AllgatherOptions()):
        # Here the lists run over ranks first: outputs[rank][tensor].
        by_tensor = [list(parts) for parts in zip(*outputs, strict=True)]
        works = [self.allgather([parts], [input], opts)
                 for parts, input in zip(by_tensor, inputs, strict=True)]
        return together(works, sum(by_tensor, []))

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts=AllgatherOptions()):
        works = [self.all_gather_single(output, input, opts)
                 for output, input in zip(outputs, inputs, strict=True)]
        return together(works, outputs)

    def reduce_scatter_single(self, output, input, opts=dist.ReduceScatterOptions()) -> dist.Work:
        n, each = self._size, output.numel()
        if output.dtype != input.dtype:
            raise ValueError(f"reduce_scatter: the output is {output.dtype}, the input {input.dtype}")
        if input.numel() != n * each:
            raise ValueError(
                f"reduce_scatter: the input has {input.numel()} elements, but {n} ranks x {each} "
                f"elements of output make {n * each}")
        reduction = self._reduction(input, opts.reduceOp)
        if reduction is None:
            fallback = self._fallback(input)
            return on_contiguous(lambda output, input: fallback._reduce_scatter_base(output, input, opts),
                                 output, input)
        call, staging = bytes_call(engine.REDUCE_SCATTER, output, opts), Staging()
        call.reduce, call.scale = reduction
        call.input, call.output = staging.input(input), staging.output(output)
        return self._launch(call, [output], staging, opts.asyncOp)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts=dist.ReduceScatterOptions()):
        [output], [parts] = outputs, inputs
        if len(parts) != self._size:
            raise ValueError(f"reduce_scatter: {len(parts)} input tensors for {self._size} ranks")
        even = all(part.numel() == output.numel() for part in parts)
        if not even or self._reduction(output, opts.reduceOp) is None:
            fallback = self._fallback(output)
            return on_contiguous(lambda output, *parts: fallback.reduce_scatter([output], [parts], opts),
                                 output, *parts)
        input = torch.cat([part.detach().reshape(-1) for part in parts])
        return self.reduce_scatter_single(output, input, opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors,
                                        opts=dist.ReduceScatterOptions()) -> dist.Work:
        works = [self.reduce_scatter_single(output, input, opts)
                 for output, input in zip(outputs, inputs, strict=True)]
        return together(works, outputs)

    def barrier(self, opts=dist.BarrierOptions()) -> dist.Work:
        call = engine.Call(kind=engine.BARRIER, scale=1.0, timeout_ms=own_or(opts.timeout))
        return self._launch(call, [], Staging(), opts.asyncOp)

    # The names before torch 2.13, which newer releases still look for.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # --- what a fallback does ------------------------------------------------------------------

    def reduce(self, tensors: Tensors, opts):
        fallback = self._fallback(tensors[0])
        return on_contiguous(lambda tensor: fallback.reduce([tensor], opts), *tensors)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts):
        return self._fallback(inputs[0]).gather(outputs, inputs, opts)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts):
        return self._fallback(outputs[0]).scatter(outputs, inputs, opts)

    def all_to_all_single(self, output, input, output_splits, input_splits, opts):
        fallback = self._fallback(input)
        return fallback.alltoall_base(output, input, output_splits, input_splits, opts)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts):
        return self._fallback(inputs[0]).alltoall(outputs, inputs, opts)

    def send(self, tensors: Tensors, to: int, tag: int = 0) -> dist.Work:
        return self._remember(self._fallback(tensors[0]).send(tensors, to, tag))

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> dist.Work:
        return self._remember(self._fallback(tensors[0]).recv(tensors, source, tag))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        return self._remember(self._fallback(tensors[0]).recv_anysource(tensors, tag))

    # --- what c10d asks of a group -------------------------------------------------------------

    def getBackendName(self) -> str:
        return "nearlinear"

    def setGroupName(self, name: str) -> None:
        self._texts["name"] = name

    def getGroupName(self) -> str:
        return self._texts["name"]

    def setGroupDesc(self, description: str) -> None:
        self._texts["description"] = description

    def getGroupDesc(self) -> str:
        return self._texts["description"]

    @property
    def _device_types(self) -> list[torch.device]:
        return [CPU, *map(torch.device, ["cuda"] if torch.cuda.is_available() else [])]

    def _get_backend(self, device: torch.device):
        """The group is its own backend: FSDP2 asks it for memory."""
        return self if device.type == "cpu" else self._fallback_for(device.type)

    supports_coalescing = True
    supports_splitting = False
    supports_time_estimate = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """``size`` elements in memory shared with the ranks of this node, or ordinary memory."""
        lib, count = engine.library(), size * dtype.itemsize
        memory = lib.nlc_pool_allocate(count) if count and device.type == "cpu" else None
        if not memory:
            return torch.empty(size, dtype=dtype, device=device)
        return tensor_at(memory, count, dtype, lib.nlc_pool_free)

    def allocate_shared(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """The output of an all-gather that exists once per node (see nlc_shared_allocate)."""
        each, rest = divmod(count, self._size)
        memory = None if rest else self._group.allocate_shared(each * dtype.itemsize)
        if not memory:
            return self.allocate_tensor(count, dtype=dtype, device=CPU)
        return tensor_at(memory, count * dtype.itemsize, dtype, engine.library().nlc_shared_free)

    def set_timeout(self, timeout: timedelta) -> None:
        self._group.set_timeout(timeout)
        for backend in self._fallbacks.values():
            backend.set_timeout(timeout)

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to agree on: every rank counts its own calls."""

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _start_coalescing(self, device: torch.device) -> None:
        if self._coalesced is not None:
            raise RuntimeError("a coalescing block is open already on this group")
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        works, self._coalesced = self._coalesced or [], None
        return together(works, [])

    def abort(self) -> None:
        self._group.abort("the process group was aborted")
        for backend in self._fallbacks.values():
            backend.abort()

    def shutdown(self) -> None:
        self._group.close()
        fallbacks, self._fallbacks = self._fallbacks, {}
        for backend in fallbacks.values():
            try:
                backend.shutdown()
            except RuntimeError:  # some backends have nothing to shut down, and say so
                pass

    # --- within --------------------------------------------------------------------------------

    def _reduction(self, tensor: torch.Tensor, op: dist.ReduceOp) -> tuple[int, float] | None:
        if foreign(tensor) or tensor.dtype not in DTYPES:
            return None
        return engine_reduction(op, tensor.dtype, self._size)

    def _launch(self, call: engine.Call, outputs: Tensors, staging: Staging, asynchronous: bool):
        self._sequence += 1
        work = EngineWork(outputs, staging)
        if asynchronous:
            work.start(self._group, call)
        else:
            work.run(self._group, call)
        return self._remember(work)

    def _remember(self, work: dist.Work) -> dist.Work:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _fallback(self, tensor: torch.Tensor) -> dist.Backend:
        return self._fallback_for(tensor.device.type)

    def _fallback_for(self, device: str) -> dist.Backend:
        if device not in self._fallbacks:
            self._fallbacks[device] = self._make_fallback(device)
        return self._fallbacks[device]


def tensor_at(memory: int, count: int, dtype: torch.dtype, free: Callable[[int], None]):
    """A tensor over ``count`` bytes of the engine's memory, which it gives back with ``free``."""
    block = (ctypes.c_char * count).from_address(memory)
    weakref.finalize(block, free, memory).atexit = False
    return torch.frombuffer(block, dtype=dtype)


def on_contiguous(call: Callable[..., dist.Work], output: torch.Tensor, *inputs: torch.Tensor):
    """A fallback's reduction on stand-ins for strided tensors, which gloo reduces wrongly."""
    if output.is_sparse or all(tensor.is_contiguous() for tensor in (output, *inputs)):
        return call(output, *inputs)
    stand_in = output.contiguous()
    work = call(stand_in, *(tensor.contiguous() for tensor in inputs))
    return work if stand_in is output else CopiedBack(work, output, stand_in)


def together(works: list[dist.Work], outputs: Tensors) -> dist.Work:
    return works[0] if len(works) == 1 else ManyWorks(works, outputs)
