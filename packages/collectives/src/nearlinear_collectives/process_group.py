"""A process group in Python over the engine, for machines without a C++ compiler.

It mirrors glue/backend.cc with the same checks, and adds some tens of microseconds per call. A
synchronous call runs on the caller's thread, an asynchronous one on an engine thread; both release
the GIL. torch treats a group written in Python as the complete process group, so this class also
implements the name, device and backend queries of ``ProcessGroup``.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (  # not exported by torch.distributed
    AllgatherOptions,  # pyright: ignore[reportPrivateImportUsage]
)

from . import engine_library as engine
from .fallback import FallbackBackends
from .group import EngineGroup
from .work import (
    CPU,
    EngineWork,
    Staging,
    allocate_pooled,
    allocate_shared,
    are_adjacent,
    call_on_contiguous,
    combine,
    engine_reduction,
    make_call,
    make_reduce_call,
    needs_fallback,
    profiler_event,
    single,
    timeout_ms,
    without_repetitions,
)

Tensors = list[torch.Tensor]


class EngineProcessGroup(dist.ProcessGroup):
    """A process group that owns an engine group; other operations use fallback backends."""

    def __init__(
        self, rank: int, size: int, group: EngineGroup, fallbacks: FallbackBackends
    ) -> None:
        # The stubs lack the constructor of Python subclasses.
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]
        self._size, self._group, self._make_fallback = size, group, fallbacks.make
        self._fallbacks: dict[str, Any] = {}
        self._name = self._description = ""
        self._sequence = 0
        self._coalesced: list[dist.Work] | None = None  # works of the open coalescing block
        weakref.finalize(self, group.close)

    # --- collectives of the engine --------------------------------------------------------------

    def broadcast(self, tensors: Tensors, opts: dist.BroadcastOptions) -> dist.Work:
        tensor = single("broadcast", tensors)
        if needs_fallback(tensor):
            return self._fallback(tensor).broadcast(tensors, opts)
        call, staging = make_call(engine.BROADCAST, tensor, opts.timeout), Staging()
        call.root, call.output = opts.rootRank, staging.in_place(tensor)
        return self._launch(call, tensors, staging, opts.asyncOp)

    def allreduce(self, tensors: Tensors, opts: dist.AllreduceOptions | None = None) -> dist.Work:
        if isinstance(tensors, torch.Tensor):  # DDP calls it without options for uneven inputs
            tensors = [tensors]
        tensor, opts = single("all_reduce", tensors), opts or dist.AllreduceOptions()
        reduction = engine_reduction(opts.reduceOp, tensor, self._size)
        if reduction is None:
            fallback = self._fallback(tensor)
            return call_on_contiguous(lambda tensor: fallback.allreduce([tensor], opts), tensor)
        call = make_reduce_call(engine.ALL_REDUCE, tensor, reduction, opts.timeout)
        staging = Staging()
        call.output = staging.in_place(tensor)
        return self._launch(call, tensors, staging, opts.asyncOp)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> dist.Work:
        each = dist.AllreduceOptions()  # a fallback rejects the coalesced options
        each.reduceOp, each.timeout, each.asyncOp = opts.reduceOp, opts.timeout, opts.asyncOp
        works = [self.allreduce([tensor], each) for tensor in without_repetitions(tensors)]
        return combine(works, tensors)

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: AllgatherOptions
    ) -> dist.Work:
        if needs_fallback(input):
            return self._fallback(input)._allgather_base(output, input, opts)
        n, each = self._size, input.numel()
        if output.dtype != input.dtype:
            raise ValueError(f"all_gather: the output is {output.dtype}, the input {input.dtype}")
        if output.numel() != n * each:
            raise ValueError(
                f"all_gather: the output has {output.numel()} elements, but {n} ranks x {each} "
                f"elements of input make {n * each}"
            )
        call, staging = make_call(engine.ALL_GATHER, input, opts.timeout), Staging()
        call.input, call.output = staging.input(input), staging.output(output)
        return self._launch(call, [output], staging, opts.asyncOp)

    def allgather(
        self, outputs: list[Tensors], inputs: Tensors, opts: AllgatherOptions
    ) -> dist.Work:
        parts, input = single("all_gather", outputs), single("all_gather", inputs)
        if needs_fallback(input):
            return self._fallback(input).allgather(outputs, inputs, opts)
        if len(parts) != self._size:
            raise ValueError(f"all_gather: {len(parts)} output tensors for {self._size} ranks")
        for part in parts:
            if part.numel() != input.numel() or part.dtype != input.dtype:
                raise ValueError(
                    f"all_gather: every output must have the input's dtype and {input.numel()} "
                    f"elements; one is {part.dtype} with {part.numel()}"
                )
        call, staging = make_call(engine.ALL_GATHER, input, opts.timeout), Staging()
        call.input = staging.input(input)
        if are_adjacent(parts):
            call.output = staging.output(parts[0])
        else:
            call.outputs = (ctypes.c_void_p * self._size)(*map(staging.output, parts))
        return self._launch(call, parts, staging, opts.asyncOp)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        # The outer list runs over ranks: outputs[rank][tensor].
        by_tensor = [list(parts) for parts in zip(*outputs, strict=True)]
        pairs = zip(by_tensor, inputs, strict=True)
        works = [self.allgather([parts], [input], opts) for parts, input in pairs]
        return combine(works, sum(by_tensor, []))

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        pairs, opts = zip(outputs, inputs, strict=True), opts or AllgatherOptions()
        works = [self.all_gather_single(output, input, opts) for output, input in pairs]
        return combine(works, outputs)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: dist.ReduceScatterOptions
    ) -> dist.Work:
        n, each = self._size, output.numel()
        if output.dtype != input.dtype:
            raise ValueError(
                f"reduce_scatter: the output is {output.dtype}, the input {input.dtype}"
            )
        if input.numel() != n * each:
            raise ValueError(
                f"reduce_scatter: the input has {input.numel()} elements, but {n} ranks x {each} "
                f"elements of output make {n * each}"
            )
        reduction = engine_reduction(opts.reduceOp, input, n)
        if reduction is None:
            reduce_scatter = self._fallback(input)._reduce_scatter_base
            return call_on_contiguous(
                lambda *tensors: reduce_scatter(*tensors, opts), output, input
            )
        call = make_reduce_call(engine.REDUCE_SCATTER, output, reduction, opts.timeout)
        staging = Staging()
        call.input, call.output = staging.input(input), staging.output(output)
        return self._launch(call, [output], staging, opts.asyncOp)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> dist.Work:
        output, parts = single("reduce_scatter", outputs), single("reduce_scatter", inputs)
        if len(parts) != self._size:
            raise ValueError(f"reduce_scatter: {len(parts)} input tensors for {self._size} ranks")
        even = all(part.numel() == output.numel() for part in parts)
        if not even or engine_reduction(opts.reduceOp, output, self._size) is None:
            call = self._fallback(output).reduce_scatter
            return call_on_contiguous(
                lambda out, *parts: call([out], [parts], opts), output, *parts
            )
        input = torch.cat([part.detach().reshape(-1) for part in parts])
        return self.reduce_scatter_single(output, input, opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        pairs, opts = zip(outputs, inputs, strict=True), opts or dist.ReduceScatterOptions()
        works = [self.reduce_scatter_single(output, input, opts) for output, input in pairs]
        return combine(works, outputs)

    def barrier(self, opts: dist.BarrierOptions | None = None) -> dist.Work:
        opts = opts or dist.BarrierOptions()
        call = engine.Call(kind=engine.BARRIER, scale=1.0, timeout_ms=timeout_ms(opts.timeout))
        return self._launch(call, [], Staging(), opts.asyncOp)

    # Names before torch 2.13, which newer releases still call. Parameter names differ in the stubs.
    _allgather_base = all_gather_single  # pyright: ignore[reportAssignmentType]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # pyright: ignore[reportAssignmentType]
    _reduce_scatter_base = reduce_scatter_single  # pyright: ignore[reportAssignmentType]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # pyright: ignore[reportAssignmentType]

    # --- operations of the fallbacks ------------------------------------------------------------

    def reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        tensor = single("reduce", tensors)
        fallback = self._fallback(tensor)
        return call_on_contiguous(lambda tensor: fallback.reduce([tensor], opts), tensor)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        return self._fallback(single("gather", inputs)).gather(outputs, inputs, opts)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> dist.Work:
        return self._fallback(single("scatter", outputs)).scatter(outputs, inputs, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any,
    ) -> dist.Work:
        fallback = self._fallback(input)
        return fallback.alltoall_base(output, input, output_splits, input_splits, opts)

    alltoall_base = all_to_all_single  # pyright: ignore[reportAssignmentType] parameter names

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any) -> dist.Work:
        if not inputs:
            raise ValueError("all_to_all needs an input tensor for each rank")
        return self._fallback(inputs[0]).alltoall(outputs, inputs, opts)

    def send(self, tensors: Tensors, to: int, tag: int = 0) -> dist.Work:
        return self._record(self._fallback(single("send", tensors)).send(tensors, to, tag))

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> dist.Work:
        return self._record(self._fallback(single("recv", tensors)).recv(tensors, source, tag))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        return self._record(self._fallback(single("recv", tensors)).recv_anysource(tensors, tag))

    # --- queries and settings of c10d -----------------------------------------------------------

    def getBackendName(self) -> str:
        return "nearlinear"

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        return [CPU, *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    def _get_backend(self, device: torch.device) -> EngineProcessGroup:
        """Return the group itself, the backend of all devices; FSDP2 asks it for memory."""
        return self

    get_backend = _get_backend  # name since torch 2.14

    supports_coalescing = True
    supports_splitting = False
    supports_time_estimate = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        if device.type != "cpu":
            return torch.empty(size, dtype=dtype, device=device)
        return allocate_pooled(size, dtype)

    def allocate_shared(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return allocate_shared(self._group, self._size, count, dtype)

    def set_timeout(self, timeout: timedelta) -> None:
        self._group.set_timeout(timeout)
        for backend in self._fallbacks.values():
            backend.set_timeout(timeout)

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: every rank counts its own calls."""

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _start_coalescing(self, device: torch.device) -> None:
        if self._coalesced is not None:
            raise RuntimeError("a coalescing block is already open on this group; end it first")
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        works, self._coalesced = self._coalesced or [], None
        return combine(works, [])

    def abort(self) -> None:
        self._group.abort("the process group was aborted")
        for backend in self._fallbacks.values():
            backend.abort()

    def shutdown(self) -> None:
        self._group.close()
        fallbacks, self._fallbacks = self._fallbacks, {}
        for backend in fallbacks.values():
            with contextlib.suppress(RuntimeError):  # backends without a shutdown raise
                backend.shutdown()

    # --- internals ------------------------------------------------------------------------------

    def _launch(
        self, call: engine.Call, outputs: Tensors, staging: Staging, asynchronous: bool
    ) -> dist.Work:
        self._sequence += 1
        work = EngineWork(outputs, staging)
        with profiler_event(call):
            if asynchronous:
                work.start(self._group, call)
            else:
                work.run(self._group, call)
        return self._record(work)

    def _record(self, work: dist.Work) -> dist.Work:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _fallback(self, tensor: torch.Tensor) -> Any:
        device = tensor.device.type
        if device not in self._fallbacks:
            self._fallbacks[device] = self._make_fallback(device)
        return self._fallbacks[device]
