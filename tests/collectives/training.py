"""A small model, its data, and the comparison of a training run on two backends."""

import torch
import torch.distributed as dist
from torch import nn

from tests.collectives.ranks import BACKEND

WIDTH, BATCH, STEPS = 36, 4, 5


class Block(nn.Module):
    """A residual block with widths divisible by 2 and 4 and uneven parameter counts."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Three blocks and a head with one output per row: (..., WIDTH) -> (...)."""

    def __init__(self, blocks: int = 3, width: int = WIDTH):
        super().__init__()
        self.first = nn.Linear(WIDTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).squeeze(-1)


def make_model(**options) -> Model:
    """Build the model, equal on every rank."""
    torch.manual_seed(0)
    return Model(**options)


def batch(step: int, part: int) -> torch.Tensor:
    """Return the rows of one data-parallel part of a step: (BATCH, WIDTH)."""
    generator = torch.Generator().manual_seed(100 * step + part)
    return torch.randn(BATCH, WIDTH, generator=generator)


def loss_of(output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (output.float() - x.float().sum(-1).sin()).square().mean()


def train(model, optimizer, part: int, steps: int = STEPS, clip=None) -> list[float]:
    """Return the losses of this rank's part of the data."""
    losses = []
    for step in range(steps):
        x = batch(step, part)
        loss = loss_of(model(x), x)
        loss.backward()
        if clip is not None:
            clip(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def summary(model: nn.Module) -> list[float]:
    """Return the sum and norm of all parameters, gathered from their shards."""
    with torch.no_grad():
        full = [getattr(p, "full_tensor", lambda p=p: p)().double() for p in model.parameters()]
    flat = torch.cat([p.reshape(-1) for p in full])
    return [flat.sum().item(), flat.norm().item()]


def same_as_gloo(pool, function, *args, ranks: int, tolerance: float = 1e-6, **options) -> list:
    """Run ``function`` on gloo and on the backend under test, and compare the numbers it returns.

    On two ranks the numbers must be bitwise equal, because a sum of two has one rounding in any
    order; on more they may differ by ``tolerance``. Returns those of the backend under test.
    """
    reference = pool.run(function, *args, ranks=ranks, backend="gloo", **options)
    found = pool.run(function, *args, ranks=ranks, backend=BACKEND, **options)
    allowed = 0.0 if ranks == 2 else tolerance
    for rank, (ours, gloos) in enumerate(zip(found, reference, strict=True)):
        assert len(ours) == len(gloos) >= STEPS
        for number, (mine, other) in enumerate(zip(ours, gloos, strict=True)):
            difference = abs(mine - other) / max(1.0, abs(other))
            assert difference <= allowed, f"rank {rank}, number {number}: {ours} instead of {gloos}"
    return found


def on_nearlinear() -> bool:
    return dist.get_backend() == "nearlinear"
