"""Works of the Python process group: what a collective hands back, done or under way.

The counterpart of glue/work.h. Futures hold a list of tensors, as DDP and its hooks expect.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from nearlinear_collectives.engine_library import Call
from nearlinear_collectives.group import Group


class Staging:
    """Contiguous stand-ins for tensors that are not, and what keeps the memory of a call alive."""

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
        for tensor, stand_in in self.copies:
            tensor.detach().copy_(stand_in)
        self.kept.clear()
        self.copies.clear()

    def _keep(self, tensor: torch.Tensor) -> int:
        self.kept.append(tensor)
        return tensor.data_ptr()

    def _copy_back(self, tensor: torch.Tensor, stand_in: torch.Tensor) -> int:
        self.copies.append((tensor, stand_in))
        return self._keep(stand_in)


class EngineWork(dist.Work):
    """One collective: run on the caller's thread, or started on a thread of the engine."""

    def __init__(self, outputs: list[torch.Tensor], staging: Staging) -> None:
        super().__init__()
        self.outputs, self.staging = outputs, staging
        self.failure: Exception | None = None
        self.ended: threading.Event | None = None  # None: a synchronous call, and done
        self.future: torch.futures.Future | None = None

    def run(self, group: Group, call: Call) -> None:
        group.run(call)
        self.staging.finish()

    def start(self, group: Group, call: Call) -> None:
        self.ended, self.future = threading.Event(), torch.futures.Future()
        group.start(call, self.finish)

    def finish(self, failure: Exception | None) -> None:
        """Called on a thread of the engine when a started call has ended."""
        if failure is None:
            try:
                self.staging.finish()
            except Exception as error:
                failure = error
        self.failure = failure
        self.ended.set()
        if failure is None:
            self.future.set_result(self.outputs)
        else:
            self.future.set_exception(failure)

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self.ended is not None:
            if not self.ended.wait(seconds(timeout)):
                raise RuntimeError(f"the collective did not end within {timeout}: it still runs")
            self.future.wait()  # complete as soon as anyone has waited; raises the failure
        return True

    def is_completed(self) -> bool:
        return self.ended is None or self.future.done()

    def is_success(self) -> bool:
        return self.is_completed() and self.failure is None

    def exception(self) -> Exception | None:
        return self.failure

    def synchronize(self) -> None:
        """Nothing: host memory has no streams."""

    def result(self) -> list[torch.Tensor]:
        return self.outputs

    def get_future(self) -> torch.futures.Future:
        if self.future is None:
            self.future = torch.futures.Future()
            self.future.set_result(self.outputs)
        return self.future


class ManyWorks(dist.Work):
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

        def joined(parts: torch.futures.Future) -> list[torch.Tensor]:
            for part in parts.value():
                part.value()  # raises what it failed with
            return outputs

        return torch.futures.collect_all([work.get_future() for work in self.works]).then(joined)


class CopiedBack(ManyWorks):
    """A fallback's call on a stand-in: who waits for it first copies the result to its place."""

    def __init__(self, work: dist.Work, tensor: torch.Tensor, stand_in: torch.Tensor) -> None:
        super().__init__([work], [tensor])
        self.stand_in: torch.Tensor | None = stand_in
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
            if self.stand_in is not None:
                self.outputs[0].detach().copy_(self.stand_in)
                self.stand_in = None


def on_contiguous(call: Callable[..., dist.Work], output: torch.Tensor, *inputs: torch.Tensor):
    """A fallback's reduction on stand-ins for strided tensors, which gloo reduces wrongly."""
    if output.is_sparse or all(tensor.is_contiguous() for tensor in (output, *inputs)):
        return call(output, *inputs)
    stand_in = output.contiguous()
    work = call(stand_in, *(tensor.contiguous() for tensor in inputs))
    return work if stand_in is output else CopiedBack(work, output, stand_in)


def together(works: list[dist.Work], outputs: list[torch.Tensor]) -> dist.Work:
    return works[0] if len(works) == 1 else ManyWorks(works, outputs)


def seconds(timeout: timedelta | None) -> float | None:
    """c10d waits for ever on a timeout of zero."""
    return timeout.total_seconds() if timeout else None
