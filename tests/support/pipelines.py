"""Training through a pipeline, and its reference in one process."""

import torch
from torch.distributed.tensor import DTensor

import nearlinear as nl
from nearlinear.fsdp.targets import SHIFTED
from tests.support import families, parity

ROWS = 8


def alone(family: str, steps: int = 2, layers: int = 4, accumulation: int = 1):
    """Return losses, norms, first gradients and final parameters of the unmodified model."""
    torch.manual_seed(0)
    model = families.build(family, layers)
    updates = parity.adamw(model, 1e-3)
    losses, norms, gradients = [], [], {}
    for step in range(steps):
        loss = model(**families.batch(step, ROWS * accumulation)).loss
        loss.backward()
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        updates.step()
        updates.zero_grad()
        losses.append(loss.item())
    return losses, norms, gradients, {n: p.detach().clone() for n, p in model.named_parameters()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a tensor from all ranks of this rank's stage."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def piped(rank: int, family: str, config: dict, steps: int = 2, layers: int = 4, accumulation=1):
    """Run the same training through `nl.pipeline`, on this rank's share of every batch."""
    mesh = nl.init(config)
    with nl.spmd.one_at_a_time(seed=0):
        model = families.build(family, layers)
    pipe = nl.shard(nl.pipeline(model))
    updates = parity.adamw(pipe, 1e-3)
    losses, norms, gradients = [], [], {}
    for step in range(steps):
        given = families.batch(step, ROWS * accumulation)
        mine = {k: v.chunk(mesh.data_ranks)[mesh.data_rank(rank)] for k, v in given.items()}
        parts = [
            {k: v.chunk(accumulation)[i] for k, v in mine.items()} for i in range(accumulation)
        ]
        weighted = 0.0
        for part in nl.accumulate(pipe, parts):
            weighted += pipe.step(part).item() * SHIFTED.count(part)
        if step == 0:
            gradients = {name: whole(p.grad) for name, p in pipe.named_parameters()}
        norms.append(nl.clip_grad_norm_(pipe, 1.0))
        updates.step()
        updates.zero_grad()
        losses.append((mesh.data_rank(rank), weighted))
    return losses, norms, gradients, {name: whole(p) for name, p in pipe.named_parameters()}


def targets(step: int, rows: int) -> int:
    return int((families.batch(step, rows)["labels"][:, 1:] != -100).sum())
