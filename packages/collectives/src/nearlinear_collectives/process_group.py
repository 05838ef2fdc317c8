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
    Parts,
    Staging,
    allocate_pooled,
    allocate_shared,
    are_adjacent,
    call_on_contiguous,
    check_list,
    combine,
    engine_reduction,
    make_call,
    make_reduce_call,
    needs_fallback,
    profiler_event,
    single,
    split_parts,
    timeout_ms,
    without_repetitions,
)

Tensors = list[torch.Tensor]
OWN_TIMEOUT = timedelta(milliseconds=-1)  # of the group


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
        if len({part.numel() for part in parts}) > 1:
            return self._allgather_uneven(parts, input, opts)
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

    def _allgather_uneven(
        self, parts: Tensors, input: torch.Tensor, opts: AllgatherOptions
    ) -> dist.Work:
        check_list("all_gather", parts, self._size, input.dtype)
        own = parts[self.rank()].numel()
        if own != input.numel():
            raise ValueError(
                f"all_gather: the output of rank {self.rank()} has {own} elements, its input "
                f"{input.numel()}"
            )
        call, staging = make_call(engine.ALL_GATHER_UNEVEN, input, opts.timeout), Staging()
        sends, receives = (Parts(self._size, input.dtype) for _ in range(2))
        address = staging.input(input)
        for rank, part in enumerate(parts):
            sends.set(rank, address, input.numel())
            receives.set(rank, staging.output(part), part.numel())
        call.count = receives.elements()
        return self._exchange(call, sends, receives, parts, staging, opts.asyncOp)

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
        reduction = engine_reduction(opts.reduceOp, output, self._size)
        if reduction is None:
            fallback = self._fallback(output).reduce_scatter
            return call_on_contiguous(
                lambda out, *parts: fallback([out], [parts], opts), output, *parts
            )
        if len({part.numel() for part in parts}) > 1:
            return self._reduce_scatter_uneven(output, parts, reduction, opts)
        input = torch.cat([part.detach().reshape(-1) for part in parts])
        return self.reduce_scatter_single(output, input, opts)

    def _reduce_scatter_uneven(
        self,
        output: torch.Tensor,
        parts: Tensors,
        reduction: tuple[int, float],
        opts: dist.ReduceScatterOptions,
    ) -> dist.Work:
        check_list("reduce_scatter", parts, self._size, output.dtype)
        own = parts[self.rank()].numel()
        if own != output.numel():
            raise ValueError(
                f"reduce_scatter: the part of rank {self.rank()} has {own} elements, its output "
                f"{output.numel()}"
            )
        kind = engine.REDUCE_SCATTER_UNEVEN
        call, staging = make_reduce_call(kind, output, reduction, opts.timeout), Staging()
        sends = Parts(self._size, output.dtype)
        for rank, part in enumerate(parts):
            sends.set(rank, staging.input(part), part.numel())
        call.count = sends.elements()
        call.output = staging.output(output)
        return self._exchange(call, sends, None, [output], staging, opts.asyncOp)

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

    def reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        tensor = single("reduce", tensors)
        reduction = engine_reduction(opts.reduceOp, tensor, self._size)
        if reduction is None:
            fallback = self._fallback(tensor)
            return call_on_contiguous(lambda tensor: fallback.reduce([tensor], opts), tensor)
        call, staging = (
            make_reduce_call(engine.REDUCE, tensor, reduction, opts.timeout),
            Staging(),
        )
        call.root = opts.rootRank
        receives = call.root == self.rank()
        call.output = staging.in_place(tensor) if receives else staging.input(tensor)
        return self._launch(call, tensors, staging, opts.asyncOp)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        input = single("gather", inputs)
        if needs_fallback(input):
            return self._fallback(input).gather(outputs, inputs, opts)
        call, staging = make_call(engine.GATHER, input, opts.timeout), Staging()
        call.root = opts.rootRank
        sends, receives = (Parts(self._size, input.dtype) for _ in range(2))
        sends.set(opts.rootRank, staging.input(input), input.numel())
        received: Tensors = []
        if opts.rootRank == self.rank():
            received = single("gather", outputs)
            check_list("gather", received, self._size, input.dtype, input.numel())
            for rank, part in enumerate(received):
                receives.set(rank, staging.output(part), part.numel())
        return self._exchange(call, sends, receives, received, staging, opts.asyncOp)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> dist.Work:
        output = single("scatter", outputs)
        if needs_fallback(output):
            return self._fallback(output).scatter(outputs, inputs, opts)
        call, staging = make_call(engine.SCATTER, output, opts.timeout), Staging()
        call.root = opts.rootRank
        sends, receives = (Parts(self._size, output.dtype) for _ in range(2))
        receives.set(opts.rootRank, staging.output(output), output.numel())
        if opts.rootRank == self.rank():
            sent = single("scatter", inputs)
            check_list("scatter", sent, self._size, output.dtype, output.numel())
            for rank, part in enumerate(sent):
                sends.set(rank, staging.input(part), part.numel())
        return self._exchange(call, sends, receives, [output], staging, opts.asyncOp)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any,
    ) -> dist.Work:
        if needs_fallback(input):
            fallback = self._fallback(input)
            return fallback.alltoall_base(output, input, output_splits, input_splits, opts)
        if output.dtype != input.dtype:
            raise ValueError(f"all_to_all: the output is {output.dtype}, the input {input.dtype}")
        call, staging = make_call(engine.ALL_TO_ALL, input, opts.timeout), Staging()
        address = staging.input(input)
        sends = split_parts("input", input, input_splits, self._size, address)
        address = staging.output(output)
        receives = split_parts("output", output, output_splits, self._size, address)
        return self._exchange(call, sends, receives, [output], staging, opts.asyncOp)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any) -> dist.Work:
        if not inputs:
            raise ValueError("all_to_all needs an input tensor for each rank")
        if needs_fallback(inputs[0]):
            return self._fallback(inputs[0]).alltoall(outputs, inputs, opts)
        check_list("all_to_all", inputs, self._size, inputs[0].dtype)
        check_list("all_to_all", outputs, self._size, inputs[0].dtype)
        call, staging = make_call(engine.ALL_TO_ALL, inputs[0], opts.timeout), Staging()
        sends, receives = (Parts(self._size, inputs[0].dtype) for _ in range(2))
        for rank, (sent, received) in enumerate(zip(inputs, outputs, strict=True)):
            sends.set(rank, staging.input(sent), sent.numel())
            receives.set(rank, staging.output(received), received.numel())
        call.count = sends.elements()
        return self._exchange(call, sends, receives, outputs, staging, opts.asyncOp)

    alltoall_base = all_to_all_single  # pyright: ignore[reportAssignmentType] parameter names

    # Names before torch 2.13, which newer releases still call. Parameter names differ in the stubs.
    _allgather_base = all_gather_single  # pyright: ignore[reportAssignmentType]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # pyright: ignore[reportAssignmentType]
    _reduce_scatter_base = reduce_scatter_single  # pyright: ignore[reportAssignmentType]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # pyright: ignore[reportAssignmentType]

    # --- messages -------------------------------------------------------------------------------

    def send(self, tensors: Tensors, to: int, tag: int = 0) -> dist.Work:
        tensor, staging = single("send", tensors), Staging()
        if needs_fallback(tensor):
            return self._record(self._fallback(tensor).send(tensors, to, tag))
        call = make_call(engine.SEND, tensor, OWN_TIMEOUT)
        call.output = staging.input(tensor)
        return self._post(call, [], staging, to, tag)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> dist.Work:
        tensor, staging = single("recv", tensors), Staging()
        if needs_fallback(tensor):
            fallback = self._fallback(tensor)
            if source == engine.ANY_RANK:
                return self._record(fallback.recv_anysource(tensors, tag))
            return self._record(fallback.recv(tensors, source, tag))
        call = make_call(engine.RECEIVE, tensor, OWN_TIMEOUT)
        call.output = staging.output(tensor)
        return self._post(call, [tensor], staging, source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        return self.recv(tensors, engine.ANY_RANK, tag)

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

    def _exchange(
        self,
        call: engine.Call,
        sends: Parts,
        receives: Parts | None,
        outputs: Tensors,
        staging: Staging,
        asynchronous: bool,
    ) -> dist.Work:
        call.sends = sends.array
        if receives is not None:
            call.receives = receives.array
        return self._launch(call, outputs, staging, asynchronous)

    def _post(
        self, call: engine.Call, outputs: Tensors, staging: Staging, other: int, tag: int
    ) -> dist.Work:
        call.root, call.tag = other, tag
        work = EngineWork(outputs, staging)
        with profiler_event(call):
            work.post(self._group, call)
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
