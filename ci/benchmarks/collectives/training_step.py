"""Time FSDP2 training steps: the end-to-end effect of faster collectives.

The batch is small on purpose: a step of these models on CPUs is mostly communication. Every
contender trains its own model from the same initial parameters, so the losses must agree. A backend
that allocates tensors is measured again with FSDP2 told to take memory from it (``+pool``), and a
backend that shares outputs again after ``nearlinear_collectives.use_in`` (``+shared``).

Shape suffixes: T tokens, W width.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from ci.benchmarks.collectives.backends import Contender
from ci.benchmarks.collectives.measure import Blocks, slowest
from ci.benchmarks.collectives.options import UsageError

TOKENS = 8
TOLERANCE = 1e-5  # relative: backends add the ranks' gradients in different orders


@dataclass(frozen=True)
class ModelSize:
    """A model of ``layers`` residual blocks with two matrices each, width x 4 width and back."""

    name: str
    width: int
    layers: int

    @property
    def parameters(self) -> int:
        return 8 * self.width**2 * self.layers


MODEL_SIZES = {size.name: size for size in (ModelSize("34M", 1024, 4), ModelSize("1M", 256, 2))}


class Block(nn.Module):
    """A residual block, the unit that FSDP2 gathers and frees."""

    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x_TW: torch.Tensor) -> torch.Tensor:
        return x_TW + self.down(torch.relu(self.up(x_TW)))


@dataclass
class TrainingRun:
    """A contender's model with its step times and losses."""

    label: str
    model_size: ModelSize
    step: Callable[[], torch.Tensor]
    """Run one training step and return this rank's loss."""
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def run_steps(self, count: int) -> float:
        """Run ``count`` steps and return this rank's seconds per step."""
        dist.barrier()
        start = time.perf_counter()
        losses = [self.step() for _ in range(count)]
        seconds = (time.perf_counter() - start) / count
        self.losses += [loss.item() for loss in losses]
        return seconds

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def minimum(self) -> float:
        return min(self.seconds)


def make_runs(model_size: ModelSize, contenders: list[Contender]) -> list[TrainingRun]:
    """Build one model per contender and kind of memory that the contender offers."""
    found = []
    for contender in contenders:
        memories = [""] + ["+pool"] * contender.has_pool
        memories += ["+shared"] * contender.has_shared_outputs
        for memory in memories:
            step = _training_step(model_size, contender.group, memory)
            found.append(TrainingRun(contender.label + memory, model_size, step))
    return found


def measure_steps(runs: list[TrainingRun], blocks: Blocks) -> None:
    """Fill in the times and losses of ``runs``. Collective over the default group."""
    for run in runs:
        run.run_steps(2)  # the first steps allocate, connect and fault pages in
    once = slowest([run.run_steps(1) for run in runs])
    counts = [max(1, math.ceil(blocks.seconds / seconds)) for seconds in once]
    times = []
    for _ in range(blocks.number):
        times.append([run.run_steps(count) for run, count in zip(runs, counts, strict=True)])
    seconds = slowest([t for row in times for t in row])
    for i, run in enumerate(runs):
        run.seconds = seconds[i :: len(runs)]


def loss_disagreement(runs: list[TrainingRun]) -> float:
    """Return the largest relative difference of a loss between runs, over their common steps."""
    common = min(len(run.losses) for run in runs)
    base = runs[0].losses[:common]
    worst = 0.0
    for run in runs[1:]:
        for ours, theirs in zip(base, run.losses, strict=False):
            difference = abs(ours - theirs) / max(abs(ours), 1e-12)
            worst = max(worst, difference if math.isfinite(difference) else math.inf)
    return slowest([worst])[0]


def table_lines(runs: list[TrainingRun], against: str) -> list[str]:
    """Format the runs of one model size as a table."""
    size = runs[0].model_size
    base = next(run for run in runs if run.label == against)
    width = max(len(run.label) for run in runs)
    found = [
        f"# FSDP2 step, {size.parameters / 1e6:.1f}M parameters ({size.layers} blocks of width "
        f"{size.width}), {TOKENS} tokens per rank, 1 thread per rank, {dist.get_world_size()} "
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


def step_entry(run: TrainingRun) -> dict:
    """Convert a run to a flat record for JSON and CSV."""
    return {
        "model": run.model_size.name,
        "parameters": run.model_size.parameters,
        "ranks": dist.get_world_size(),
        "contender": run.label,
        "median_ms": round(run.median * 1e3, 4),
        "min_ms": round(run.minimum * 1e3, 4),
        "steps": len(run.losses),
        "last_loss": run.losses[-1],
        "blocks_ms": [round(seconds * 1e3, 4) for seconds in run.seconds],
    }


def _training_step(model_size: ModelSize, group: dist.ProcessGroup, memory: str):
    """Return a function that makes one step of SGD and returns the loss."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    from nearlinear_collectives import use_in

    torch.manual_seed(0)
    model = nn.Sequential(*(Block(model_size.width) for _ in range(model_size.layers)))
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
                    raise UsageError(
                        f"FSDP2 of torch {torch.__version__} cannot take memory from a process "
                        "group; use torch 2.9 or newer"
                    )
                module.set_allocate_memory_from_process_group_for_comm(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    input_TW = torch.randn(TOKENS, model_size.width, generator=generator)
    target_TW = torch.randn(TOKENS, model_size.width, generator=generator)

    def step() -> torch.Tensor:
        loss = (model(input_TW) - target_TW).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
