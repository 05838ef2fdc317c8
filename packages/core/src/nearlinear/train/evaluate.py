"""Evaluate a model: held-out loss, and text generation."""

import torch
import torch.distributed as dist
from torch import nn

from ..data.dataset import TokenDataset
from ..data.loader import BatchTransform, evaluation_batches
from ..data.masking import NO_MASKS, Masks
from ..data.mixture import Mixture
from ..distributed.mesh import Mesh
from ..fsdp.targets import count_targets
from ..pipeline_parallel.api import Pipelined


@torch.no_grad()
def held_out_loss(
    model: nn.Module,
    dataset: TokenDataset | Mixture,
    mesh: Mesh,
    batch_size: int,
    windows: int,
    masks: Masks = NO_MASKS,
    transform: BatchTransform | None = None,
) -> float:
    """Return the mean cross-entropy in nats over held-out sequences. A collective call.

    The result is equal on every rank and independent of the layout.

    Args:
        model: A sharded model.
        dataset: Held-out data.
        mesh: Mesh of the job.
        batch_size: Sequences per forward pass of a rank.
        windows: Number of sequences, evenly spaced in ``dataset``.
        masks: Masks of the training data.
        transform: Change of the training batches.
    """
    device = next(model.parameters()).device
    data_rank = mesh.data_rank(dist.get_rank())
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    model.eval()
    place = data_rank, mesh.data_ranks
    for batch in evaluation_batches(dataset, batch_size, *place, windows, masks, transform):
        targets = count_targets(model, batch)
        if isinstance(model, Pipelined):
            loss = model.evaluate(batch)
        else:
            loss = model(**batch).loss  # FSDP moves the batch to the device
        if targets:  # without targets the batch only takes part in the collectives
            totals += torch.stack([loss.double() * targets, loss.new_tensor(targets).double()])
    model.train()
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()


@torch.no_grad()
def generate(
    model: nn.Module, prompt: list[int], tokens: int, context: int, top_k: int = 40, seed: int = 0
) -> list[int]:
    """Return ``tokens`` ids that continue ``prompt``, sampled from the ``top_k`` most likely.

    Every rank runs the same forward passes and samples the same ids. A collective call.

    Args:
        model: A sharded model.
        prompt: Token ids to continue.
        tokens: Number of ids to generate.
        context: Maximum number of ids that the model reads.
        top_k: Number of candidates per id.
        seed: Seed of the sampling.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device=device).manual_seed(seed)
    ids = torch.tensor([prompt], device=device)
    model.eval()
    for _ in range(tokens):
        logits = _next_logits(model, ids[:, -context:])
        top = logits.topk(min(top_k, logits.numel()))
        choice = torch.multinomial(top.values.softmax(0), 1, generator=generator)
        ids = torch.cat([ids, top.indices[choice][None]], dim=1)
    model.train()
    return ids[0, len(prompt) :].tolist()


def _next_logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of the id after ``ids`` (1, S): (V,), float32, equal on every rank."""
    if isinstance(model, Pipelined):
        return model.last_logits({"input_ids": ids})[0].float()
    return model(input_ids=ids, use_cache=False).logits[0, -1].float()
