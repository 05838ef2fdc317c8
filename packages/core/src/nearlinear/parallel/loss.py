"""Cross entropy where no rank has the logits of the whole vocabulary, or of the whole sequence.

Source: Megatron-LM (Shoeybi et al. 2019, section 3). Of every token each tensor rank knows the
maximum, the sum of exponentials and perhaps the target's logit among its own part of the
vocabulary; these three numbers travel, the logits do not. Context ranks have different tokens of
one sequence and add up what they have.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from ..c10d_names import all_gather
from ..runtime import Runtime

IGNORED_LABEL = -100


class CausalLoss:
    """What a Hugging Face causal model calls as its ``loss_function``."""

    def __init__(
        self,
        tensor: dist.ProcessGroup | None = None,
        first: int = 0,
        context: dist.ProcessGroup | None = None,
    ):
        """``first``: the id of this rank's first logit, where ``tensor`` ranks share them out."""
        self.tensor, self.first, self.context = tensor, first, context

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int | None = None,
        num_items_in_batch=None,
        ignore_index: int = IGNORED_LABEL,
        shift_labels: torch.Tensor | None = None,
        **unused,
    ) -> torch.Tensor:
        """Mean cross entropy, nats, of ``logits`` (B, S, this rank's part of V) over the targets.

        ``labels`` (B, S) are shifted here, ``shift_labels`` are already. With context ranks the
        mean is over the whole sequence, on all of them; the gradient is that of this rank's tokens
        times their number, since sharding averages over context ranks. ``num_items_in_batch``
        replaces the number of targets.
        """
        if shift_labels is None:
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        targets = shift_labels.reshape(-1).to(logits.device)
        counted = targets != ignore_index
        unknown = None if vocab_size is None else outside(targets, vocab_size, counted)
        losses = _TokenLosses.apply(
            logits.reshape(-1, logits.shape[-1]), targets, counted, self.first, self.tensor
        )
        if unknown is not None:
            losses = losses.masked_fill(unknown, torch.nan)
        total, count = losses.sum(), counted.sum()
        if self.context is not None:
            total, count = _SumOfAll.apply(total, count, self.context)
        return total / (count if num_items_in_batch is None else num_items_in_batch)


def outside(ids: torch.Tensor, size: int, counted: torch.Tensor | None = None) -> torch.Tensor:
    """Which of ``ids``, those that are ``counted``, a vocabulary of ``size`` lacks.

    On the CPU none: IndexError, as PyTorch raises. Elsewhere asking would wait for the device, and
    what comes of them is to be NaN.
    """
    unknown = (ids < 0) | (ids >= size)
    unknown = unknown if counted is None else unknown & counted
    if ids.device.type == "cpu" and bool(unknown.any()):
        raise IndexError(
            f"token id {ids[unknown][0].item()} is not in the vocabulary, which has ids 0 to "
            f"{size - 1}: use the model's own tokenizer, or model.resize_token_embeddings"
        )
    return unknown


def install(model: nn.Module, now: Runtime, first: int = 0) -> None:
    """Give ``model`` the loss for its tensor and context ranks, if it has any.

    ``first``: the id of this rank's first logit.
    """
    tensor = now.group("tensor") if now.mesh.tensor > 1 else None
    context = now.group("context") if now.mesh.context > 1 else None
    if tensor is not None or context is not None:
        model.loss_function = CausalLoss(tensor, first, context)


class _TokenLosses(torch.autograd.Function):
    """Cross entropy (N,), float32, of logits (N, V of this rank); 0 for tokens that do not count"""

    @staticmethod
    def forward(ctx, logits, targets, counted, first, group):
        x, here = logits.float(), targets - first
        mine = counted & (here >= 0) & (here < x.shape[-1])
        here = here.where(mine, 0).unsqueeze(-1)
        highest = x.amax(-1)
        total = (x - highest.unsqueeze(-1)).exp_().sum(-1)
        target = x.gather(-1, here).squeeze(-1).where(mine, 0.0)
        if group is not None:
            known = torch.stack([highest, total, target])
            everyones = known.new_empty(group.size(), *known.shape)
            all_gather(everyones.view(-1), known.view(-1), group=group)
            highests, totals, targets_logits = everyones.unbind(1)
            highest = highests.amax(0)
            total = (totals * (highests - highest).exp()).sum(0)
            target = targets_logits.sum(0)
        log_total = highest + total.log()
        ctx.save_for_backward(logits, here, mine, counted, log_total)
        return (log_total - target).where(counted, 0.0)

    @staticmethod
    def backward(ctx, gradient):
        logits, here, mine, counted, log_total = ctx.saved_tensors
        found = (logits.float() - log_total.unsqueeze(-1)).exp_()
        found.scatter_add_(-1, here, -mine.unsqueeze(-1).to(found.dtype))
        found *= gradient.where(counted, 0.0).unsqueeze(-1)
        return found.to(logits.dtype), None, None, None, None


class _SumOfAll(torch.autograd.Function):
    """Sums of a loss and a count over ``group``, for the loss's gradient see `CausalLoss`."""

    @staticmethod
    def forward(ctx, total, count, group):
        ctx.ranks = group.size()
        both = torch.stack([total.double(), count.double()])
        dist.all_reduce(both, group=group)
        total, count = both[0].to(total.dtype), both[1].to(count.dtype)
        ctx.mark_non_differentiable(count)
        return total, count

    @staticmethod
    def backward(ctx, gradient, _):
        return gradient * ctx.ranks, None, None
