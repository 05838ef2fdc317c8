"""Held-out loss, and a few words from the model: what a training run is judged by."""

import torch
import torch.distributed as dist
from torch import nn

from ..data.dataset import TokenDataset
from ..data.loader import evaluation_batches
from ..data.masking import NOTHING, Masks
from ..mesh import Mesh
from ..parallel.accumulate import count_targets
from ..parallel.pipeline.door import Pipelined


@torch.no_grad()
def held_out_loss(
    model: nn.Module,
    dataset: TokenDataset,
    mesh: Mesh,
    batch_size: int,
    windows: int,
    masks: Masks = NOTHING,
) -> float:
    """Mean cross-entropy in nats over ``windows`` held-out sequences, evenly spaced.

    The same on every rank and for every layout; a rank takes ``batch_size`` of them at a time.
    """
    device = next(model.parameters()).device
    data_rank = mesh.data_rank(dist.get_rank())
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    model.eval()
    place = data_rank, mesh.data_ranks
    for batch in evaluation_batches(dataset, batch_size, *place, windows, masks):
        targets = count_targets(batch)
        if isinstance(model, Pipelined):
            loss = model.evaluate(batch)
        else:
            loss = model(**batch).loss  # FSDP moves the batch to the device
        if targets:  # a batch of repeats only takes part for its collectives
            totals += torch.stack([loss.double() * targets, loss.new_tensor(targets).double()])
    model.train()
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()


@torch.no_grad()
def generate(
    model: nn.Module, prompt: list[int], tokens: int, context: int, top_k: int = 40, seed: int = 0
) -> list[int]:
    """``tokens`` ids after ``prompt``, drawn among the ``top_k`` likeliest.

    Every rank runs the same forward passes and draws the same ids, as sharded parameters need.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device=device).manual_seed(seed)
    ids = torch.tensor([prompt], device=device)
    model.eval()
    for _ in range(tokens):
        logits = _next_logits(model, ids[:, -context:])
        likeliest = logits.topk(min(top_k, logits.numel()))
        choice = torch.multinomial(likeliest.values.softmax(0), 1, generator=generator)
        ids = torch.cat([ids, likeliest.indices[choice][None]], dim=1)
    model.train()
    return ids[0, len(prompt) :].tolist()


def _next_logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Of what follows ``ids`` (1, S): (V,), float32, the same on every rank."""
    if isinstance(model, Pipelined):
        return model.last_logits({"input_ids": ids})[0].float()
    return model(input_ids=ids, use_cache=False).logits[0, -1].float()
