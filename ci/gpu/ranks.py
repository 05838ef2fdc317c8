"""Several ranks on one GPU: processes whose collectives copy CUDA tensors through host memory.

NCCL refuses two ranks on one device, and gloo takes CUDA tensors in some operations only. The
backend ``host_staging`` copies every tensor to the host, calls gloo, and copies the result back on
the caller's stream. It is slow and exact: for checks of results, not for timing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import nearlinear as nl

BACKEND = "host_staging"
TIMEOUT = 240.0  # seconds of one run
Tensors = list[torch.Tensor]


class Done(dist.Work):
    """A completed collective, with its result for the caller's functional collectives."""

    def __init__(self, outputs: Tensors):
        super().__init__()
        self._future: Any = torch.futures.Future()
        self._future.set_result(outputs)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        return self._future


class Receiving(dist.Work):
    """A receive into host memory, copied to the caller's tensor when it is waited for."""

    def __init__(self, work: dist.Work, host: torch.Tensor, tensor: torch.Tensor | None):
        super().__init__()
        self._work, self._host, self._tensor = work, host, tensor
        self._copied = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._work.wait()
        if self._tensor is not None and not self._copied:
            self._tensor.detach().copy_(self._host)
        self._copied = True
        return True

    def is_completed(self) -> bool:
        return self._copied or self._work.is_completed()


class HostStagingGroup(dist.ProcessGroup):
    """Process group that runs collectives on copies in host memory, by gloo.

    torch takes a process group written in Python as the group of all devices.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue] not in torch's stub
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._rank, self._size = rank, size
        self._name = self._description = ""

    # --- collectives ----------------------------------------------------------------------------

    def broadcast(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        [tensor] = tensors
        host = _to_host(tensor)
        self._gloo.broadcast([host], opts or dist.BroadcastOptions()).wait()
        return _store([tensor], [host])

    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        return _store(tensors, [self._reduced(_to_host(tensor), op) for tensor in tensors])

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        return self.allreduce(tensors, opts)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        for parts, tensor in zip(outputs, inputs, strict=True):
            _store(parts, self._gathered(_to_host(tensor)))
        return Done([part for parts in outputs for part in parts])

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        whole = torch.cat([part.reshape(-1) for part in self._gathered(_to_host(input))])
        return _store([output], [whole.view(output.shape)])

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, tensor)
        return Done(outputs)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        total = self._reduced(_to_host(input), op).view(self._size, -1)
        return _store([output], [total[self._rank].view(output.shape)])

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> dist.Work:
        for output, parts in zip(outputs, inputs, strict=True):
            total = [self._reduced(_to_host(part), opts.reduceOp) for part in parts]
            _store([output], [total[self._rank]])
        return Done(outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, tensor, opts)
        return Done(outputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
    ) -> dist.Work:
        host = _to_host(output)
        options = opts or dist.AllToAllOptions()
        self._gloo.alltoall_base(
            host, _to_host(input), list(output_splits), list(input_splits), options
        ).wait()
        return _store([output], [host])

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        whole = torch.cat([_to_host(tensor).reshape(-1) for tensor in inputs])
        received = whole.new_empty(sum(tensor.numel() for tensor in outputs))
        counts = [[t.numel() for t in tensors] for tensors in (outputs, inputs)]
        self._gloo.alltoall_base(received, whole, *counts, dist.AllToAllOptions()).wait()
        parts = received.split(counts[0])
        return _store(outputs, [p.view(o.shape) for p, o in zip(parts, outputs, strict=True)])

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        parts = self._gathered(_to_host(inputs[0]))
        return _store(outputs[0], parts) if outputs else Done([])

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> dist.Work:
        host = _to_host(outputs[0])
        self._gloo.scatter([host], [[_to_host(t) for t in ts] for ts in inputs], opts).wait()
        return _store(outputs, [host])

    def send(self, tensors: Tensors, to: int, tag: int = 0) -> dist.Work:
        host = _to_host(tensors[0])
        return Receiving(self._gloo.send([host], to, tag), host, None)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> dist.Work:
        host = _to_host(tensors[0])
        return Receiving(self._gloo.recv([host], source, tag), host, tensors[0])

    def barrier(self, opts: Any = None) -> dist.Work:
        self._gloo.barrier(dist.BarrierOptions()).wait()
        return Done([])

    # Names before torch 2.13; torch's stubs declare other parameter names.
    _allgather_base = all_gather_single  # pyright: ignore[reportAssignmentType]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # pyright: ignore[reportAssignmentType]
    _reduce_scatter_base = reduce_scatter_single  # pyright: ignore[reportAssignmentType]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # pyright: ignore[reportAssignmentType]
    alltoall_base = all_to_all_single  # pyright: ignore[reportAssignmentType]

    # --- queries of c10d ------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return BACKEND

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(name) for name in devices()]

    def _get_backend(self, device: torch.device) -> HostStagingGroup:
        return self

    get_backend = _get_backend  # name since torch 2.14
    supports_coalescing = False
    supports_splitting = False
    supports_time_estimate = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: gloo counts its own calls."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Keep the timeout of the start."""

    def abort(self) -> None:
        """Do nothing: the process ends."""

    def shutdown(self) -> None:
        """Do nothing: gloo's threads end with the object."""

    # --- internals ------------------------------------------------------------------------------

    def _reduced(self, host: torch.Tensor, op: Any) -> torch.Tensor:
        """Return the reduction of every rank's ``host``; gloo lacks the mean in some releases."""
        options: Any = dist.AllreduceOptions()
        mean = op == dist.ReduceOp.AVG
        options.reduceOp = dist.ReduceOp.SUM if mean else op
        self._gloo.allreduce([host], options).wait()
        return host.div_(self._size) if mean else host

    def _gathered(self, host: torch.Tensor) -> Tensors:
        parts = [torch.empty_like(host) for _ in range(self._size)]
        self._gloo.allgather([parts], [host]).wait()
        return parts


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy in host memory, after the work queued on the current stream."""
    tensor = tensor.detach()
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


def _store(tensors: Tensors, hosts: Tensors) -> dist.Work:
    """Copy the results back on the current stream; the copies are complete on return."""
    for tensor, host in zip(tensors, hosts, strict=True):
        tensor.detach().copy_(host)
    return Done(tensors)


def devices() -> list[str]:
    return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


if BACKEND not in dist.Backend.backend_list:
    dist.Backend.register_backend(BACKEND, HostStagingGroup, devices=["cpu", "cuda"])


def run(
    function: Callable[..., Any],
    ranks: int,
    *args: Any,
    backend: str = BACKEND,
    timeout: float = TIMEOUT,
) -> list[Any]:
    """Call ``function(rank, *args)`` in ``ranks`` processes on the first GPU, or on the CPU.

    ``function`` is a function of a module. Returns the results in rank order, and raises
    `nearlinear.errors.RankError` for the first rank that fails.
    """
    arguments = (function, *args)
    return nl.spmd.run(
        _on_first_gpu, ranks, args=arguments, processes=True, backend=backend, timeout=timeout
    )


def _on_first_gpu(rank: int, function: Callable[..., Any], *args: Any) -> Any:
    os.environ["LOCAL_RANK"] = "0"  # nl.init and DeviceMesh select the GPU by it
    return function(rank, *args)


@contextmanager
def without_gpu():
    """Hide the GPU from processes that are started inside."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
