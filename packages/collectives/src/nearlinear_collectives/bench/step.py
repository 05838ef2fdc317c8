"""An FSDP2 training step per contender, in turn: what faster collectives are worth end to end.

Few tokens on purpose: a step of these models on CPUs is mostly communication. Every contender
trains a model of its own from the same numbers, so the losses must agree. A backend that
allocates tensors comes again with FSDP2 told to ask it for memory (``+pool``), and one that shares
outputs with ``nearlinear_collectives.use_in`` (``+shared``).
"""

import math
import statistics
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from .backends import Contender
from .errors import UsageError
from .measure import Blocks, slowest

TOKENS = 8
TOLERANCE = 1e-5  # relative: backends add the ranks' gradients in different orders


@dataclass(frozen=True)
class Shape:
    """``layers`` residual blocks of two matrices, width x 4 width and back."""

    name: str
    width: int
    layers: int

    @property
    def parameters(self) -> int:
        return 8 * self.width**2 * self.layers


SHAPES = {shape.name: shape for shape in (Shape("34M", 1024, 4), Shape("1M", 256, 2))}


class Block(nn.Module):
    """A residual block: the unit that FSDP2 gathers and frees."""

    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x_TW: torch.Tensor) -> torch.Tensor:
        return x_TW + self.down(torch.relu(self.up(x_TW)))


@dataclass
class Run:
    """One contender's model, its times per step and its losses."""

    label: str
    shape: Shape
    step: object  # () -> loss on this rank
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def steps(self, count: int) -> float:
        """Seconds per step on this rank."""
        dist.barrier()
        start = time.perf_counter()
        losses = [self.step() for _ in range(count)]
        spent = (time.perf_counter() - start) / count
        self.losses += [loss.item() for loss in losses]
        return spent

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def minimum(self) -> float:
        return min(self.seconds)


def runs_of(shape: Shape, contenders: list[Contender]) -> list[Run]:
    """A model for every contender and every kind of memory that it has for gathers."""
    found = []
    for contender in contenders:
        memories = [""] + ["+pool"] * contender.has_pool + ["+shared"] * contender.shares_outputs
        for memory in memories:
            step = _training_step(shape, contender.group, memory)
            found.append(Run(contender.label + memory, shape, step))
    return found


def measure(runs: list[Run], blocks: Blocks) -> None:
    """Fill in times and losses. Collective over the default group."""
    for run in runs:
        run.steps(2)  # the first steps allocate, connect and fault pages in
    once = slowest([run.steps(1) for run in runs])
    counts = [max(1, math.ceil(blocks.seconds / seconds)) for seconds in once]
    times = []
    for _ in range(blocks.number):
        times.append([run.steps(count) for run, count in zip(runs, counts, strict=True)])
    seconds = slowest([t for row in times for t in row])
    for i, run in enumerate(runs):
        run.seconds = seconds[i :: len(runs)]


def disagreement(runs: list[Run]) -> float:
    """The largest relative difference of a loss between two runs, over the steps all made."""
    common = min(len(run.losses) for run in runs)
    base = runs[0].losses[:common]
    worst = 0.0
    for run in runs[1:]:
        for ours, theirs in zip(base, run.losses, strict=False):
            difference = abs(ours - theirs) / max(abs(ours), 1e-12)
            worst = max(worst, difference if math.isfinite(difference) else math.inf)
    return slowest([worst])[0]


def lines(runs: list[Run], against: str) -> list[str]:
    """A table of one shape's runs."""
    shape = runs[0].shape
    base = next(run for run in runs if run.label == against)
    width = max(len(run.label) for run in runs)
    found = [
        f"# FSDP2 step, {shape.parameters / 1e6:.1f}M parameters ({shape.layers} blocks of width "
        f"{shape.width}), {TOKENS} tokens per rank, 1 thread per rank, {dist.get_world_size()} "
        "ranks",
        f"# {'':>{width}} {'median (ms)':>12} {'min (ms)':>12} {against + '/this':>18} "
        f"{'loss':>12}",
    ]
    common = min(len(run.losses) for run in runs)
    for run in runs:
        both = f"{base.median / run.median:.2f} ({base.minimum / run.minimum:.2f})"
        found.append(
            f"  {run.label:>{width}} {run.median * 1e3:12.2f} {run.minimum * 1e3:12.2f} "
            f"{both:>18} {run.losses[common - 1]:12.6f}"
        )
    return found


def entry(run: Run) -> dict:
    """A run as a flat record, for JSON and CSV."""
    return {
        "model": run.shape.name,
        "parameters": run.shape.parameters,
        "ranks": dist.get_world_size(),
        "contender": run.label,
        "median_ms": round(run.median * 1e3, 4),
        "min_ms": round(run.minimum * 1e3, 4),
        "steps": len(run.losses),
        "last_loss": run.losses[-1],
        "blocks_ms": [round(seconds * 1e3, 4) for seconds in run.seconds],
    }


def _training_step(shape: Shape, group, memory: str):
    """A function that makes one step of SGD and returns the loss."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    from ..fsdp import use_in

    torch.manual_seed(0)
    model = nn.Sequential(*(Block(shape.width) for _ in range(shape.layers)))
    mesh = DeviceMesh.from_group(group, "cpu")
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if memory == "+shared":
        use_in(model, group)
    elif memory == "+pool":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                if not hasattr(module, "set_allocate_memory_from_process_group_for_comm"):
                    raise UsageError(f"torch {torch.__version__} cannot be told to take memory "
                                     "from a process group; torch 2.9 or newer can")  # fmt: skip
                module.set_allocate_memory_from_process_group_for_comm(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    input_TW = torch.randn(TOKENS, shape.width, generator=generator)
    target_TW = torch.randn(TOKENS, shape.width, generator=generator)

    def step() -> torch.Tensor:
        loss = (model(input_TW) - target_TW).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
