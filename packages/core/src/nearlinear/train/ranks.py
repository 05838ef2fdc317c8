"""What each rank itself did in a step, which its step time cannot tell: all wait for the slowest.

Timed are spans without a collective inside: fetching the batch, and forward and backward of each
block, after its parameters have come and before its gradients leave. A rank that is slow there
holds up the others. Not seen: embeddings and head, clipping, the optimizer, and a slow link, for
which every rank of its group waits alike.
"""

import contextlib
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from .. import runtime

COLUMNS = ("step_seconds", "load_seconds", "compute_seconds", "mem_gib_by_rank")
"""What a reported step says of every rank: the whole step, its own parts of it, peak memory."""

HOST_BYTES = 64  # of a host's name; longer ones are cut


class OwnTime:
    """Times what this rank does on its own, in steps that are watched."""

    def __init__(self, blocks: Iterable[nn.Module], device: torch.device):
        """``blocks``: units of a sharded model. FSDP2's hooks came first, so ours are inside."""
        self.watching = False
        self._device = device
        self._step_began = 0.0
        self._mark, self._between = _clock(device)
        self._loading = 0.0
        self._spans: list[tuple] = []  # (begin, end)
        self._open: tuple | None = None  # (forward or backward, begin)
        for block in blocks:
            block.register_forward_pre_hook(self._before_forward, with_kwargs=True)
            block.register_forward_hook(self._after_forward)

    def begin_step(self, watching: bool) -> None:
        """Whether this one is timed."""
        self.watching, self._step_began = watching, time.perf_counter()

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Around what fetches the next batch."""
        begin = time.perf_counter()
        yield
        self._loading = time.perf_counter() - begin

    def take(self) -> tuple[float, float, float]:
        """Seconds since the step began; of them those of loading, and of computing."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # its marks are events, and may be yet to come
        computing = sum(self._between(*span) for span in self._spans)
        self._spans, self._open = [], None
        return time.perf_counter() - self._step_began, self._loading, computing

    def _before_forward(self, block, args, kwargs) -> None:
        if not (self.watching and torch.is_grad_enabled()) or self._open is not None:
            return  # the last: recomputed in a backward, which is being timed
        came = hidden_states([args, kwargs])
        if came is not None:
            came.register_hook(self._at_backwards_end)
        self._begin("forward")

    def _after_forward(self, block, args, output) -> None:
        if self._end("forward"):
            left = hidden_states(output)
            if left is not None:
                left.register_hook(self._at_backwards_begin)

    def _at_backwards_begin(self, gradient) -> None:
        self._begin("backward")

    def _at_backwards_end(self, gradient) -> None:
        self._end("backward")

    def _begin(self, what: str) -> None:
        self._open = what, self._mark()

    def _end(self, what: str) -> bool:
        """Whether it had begun."""
        if self._open is None or self._open[0] != what:
            return False
        self._spans.append((self._open[1], self._mark()))
        self._open = None
        return True


def _clock(device: torch.device) -> tuple[Callable, Callable]:
    """How to mark a moment of ``device``'s work, and seconds between two marks."""
    if device.type != "cuda":
        return time.perf_counter, lambda begin, end: end - begin

    def mark():
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    return mark, lambda begin, end: begin.elapsed_time(end) / 1e3


def hidden_states(tree) -> torch.Tensor | None:
    """Of a block's arguments or results the first tensor that gets a gradient."""
    if isinstance(tree, torch.Tensor):
        return tree if tree.requires_grad else None
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, list | tuple):
        return None
    return next((found for item in tree if (found := hidden_states(item)) is not None), None)


def add_up(totals: torch.Tensor, mine: list[float]) -> tuple[list[float], list[list[float]]]:
    """The sums of ``totals`` over all ranks; and, for each number of ``mine``, every rank's.

    One all-reduce: each rank fills in its row of a table of zeros. All ranks give equally many.
    """
    table = totals.new_zeros(dist.get_world_size(), len(mine))
    table[dist.get_rank()] = totals.new_tensor(mine)
    both = torch.cat([totals, table.view(-1)])
    dist.all_reduce(both)
    return both[: len(totals)].tolist(), both[len(totals) :].view(table.shape).T.tolist()


def columns(by_rank: list[list[float]]) -> dict[str, list[float]]:
    """The arrays of a reported step, short enough for a line about a thousand ranks."""
    rounded = ([round(value, 4) for value in column] for column in by_rank)
    return dict(zip(COLUMNS, rounded, strict=False))  # of a step that is not reported: none


def hosts(device: torch.device) -> list[str]:
    """The host of every rank; a collective call."""
    name = runtime.host().encode()[:HOST_BYTES].ljust(HOST_BYTES, b"\0")
    _, letters = add_up(torch.zeros(0, dtype=torch.float64, device=device), list(name))
    names = (bytes(map(int, name)) for name in zip(*letters, strict=True))
    return [name.rstrip(b"\0").decode(errors="replace") for name in names]


def peak_memory(device: torch.device) -> float:
    """The most memory this rank has held, GiB: of its GPU, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
