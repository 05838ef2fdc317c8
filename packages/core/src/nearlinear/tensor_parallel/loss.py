"""Cross entropy of logits that are split over tensor ranks (vocabulary) or context ranks (tokens).

Source: Megatron-LM (Shoeybi et al. 2019, section 3). For every token, each tensor rank computes the
maximum and the sum of exponentials over its part of the vocabulary, and the target's logit if it
has it. Ranks exchange these three numbers instead of logits. Context ranks have different tokens of
one sequence and sum their losses.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.nn import functional

from .._torch import all_gather
from ..distributed.runtime import Runtime
from ..errors import ConfigError
from ..fsdp.forward_transforms import forward_transforms
from ..fsdp.model_state import model_state
from ..fsdp.targets import IGNORED_LABEL, SHIFTED, TargetRule, calls_loss_function, target_rule


class Reduction(Protocol):
    """Turns the losses of tokens into another loss than their mean."""

    @property
    def target_rule(self) -> TargetRule:
        """Counts the items over which the loss is a mean."""
        ...

    def token_ids(self, labels: torch.Tensor) -> torch.Tensor:
        """Return the ids in ``labels``, which may hold more."""
        ...

    def __call__(
        self, losses: torch.Tensor, labels: torch.Tensor, context: dist.ProcessGroup | None
    ) -> torch.Tensor:
        """Return the loss of cross entropies (B, S) and shifted ``labels`` (B, S).

        ``context``: ranks that hold the other tokens of the sequences; see `context_sum`.
        """
        ...


class CausalLoss:
    """``loss_function`` of a Hugging Face causal model, also on tensor or context ranks."""

    reduction: Reduction | None = None
    """Replaces the mean over the targets."""

    @property
    def target_rule(self) -> TargetRule:
        return SHIFTED if self.reduction is None else self.reduction.target_rule

    def __init__(
        self,
        tensor: dist.ProcessGroup | None = None,
        first: int = 0,
        context: dist.ProcessGroup | None = None,
    ):
        """``first``: id of this rank's first logit."""
        self.tensor, self.first, self.context = tensor, first, context
        self.calls = 0

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
        """Return the mean cross entropy in nats over the targets.

        With context ranks the mean is over the whole sequence, on all of them. The gradient is that
        of this rank's tokens times the number of context ranks, since sharding averages over them.

        Args:
            logits: (B, S, this rank's part of V).
            labels: (B, S), shifted here.
            shift_labels: (B, S), shifted already; replaces ``labels``.
            num_items_in_batch: Replaces the number of targets.
        """
        self.calls += 1
        split = self.tensor is not None and self.tensor.size() > 1
        if split and vocab_size == logits.shape[-1]:
            raise ConfigError(
                "tensor_parallel_degree > 1: the model takes the size of its vocabulary from the "
                "logits, of which every rank has a part. Set tensor_parallel_degree = 1."
            )
        if shift_labels is None:
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        shift_labels = shift_labels.to(logits.device)
        targets = shift_labels.reshape(-1)
        counted = targets != ignore_index
        if self.reduction is not None:
            targets = self.reduction.token_ids(targets)
        unknown = None if vocab_size is None else out_of_vocabulary(targets, vocab_size, counted)
        losses = _TokenLosses.apply(
            logits.reshape(-1, logits.shape[-1]), targets, counted, self.first, self.tensor
        )
        if unknown is not None:
            losses = losses.masked_fill(unknown, torch.nan)
        if self.reduction is not None:
            return self.reduction(losses.view_as(shift_labels), shift_labels, self.context)
        total, count = losses.sum(), counted.sum()
        if self.context is not None:
            total, count = context_sum(total, count, self.context)
        return total / (count if num_items_in_batch is None else num_items_in_batch)


def out_of_vocabulary(
    ids: torch.Tensor, size: int, counted: torch.Tensor | None = None
) -> torch.Tensor:
    """Return a mask of the counted ``ids`` that are outside of a vocabulary of ``size``.

    Raises IndexError for such ids on the CPU, as PyTorch does. On accelerators the check would wait
    for the device, so the caller turns their results into NaN.
    """
    unknown = (ids < 0) | (ids >= size)
    unknown = unknown if counted is None else unknown & counted
    if ids.device.type == "cpu" and bool(unknown.any()):
        raise IndexError(
            f"token id {ids[unknown][0].item()} is not in the vocabulary, which has ids 0 to "
            f"{size - 1}. Use the model's own tokenizer, or call model.resize_token_embeddings."
        )
    return unknown


def install_loss(model: Any, now: Runtime, first: int = 0) -> None:
    """Set the loss function of ``model`` if it has tensor or context ranks.

    ``first``: id of this rank's first logit. Raises ConfigError if the model's own loss function is
    another one, and in the first forward pass with labels if the model does not call it.
    """
    tensor = now.group("tensor") if now.mesh.tensor > 1 else None
    context = now.group("context") if now.mesh.context > 1 else None
    if tensor is not None or context is not None:
        if calls_loss_function(model) and target_rule(model) != SHIFTED:
            raise ConfigError(
                "tensor_parallel_degree or context_parallel_degree > 1: the loss_function of "
                f"{type(model).__name__} is not the mean cross entropy of the next token, which is "
                "the only one that ranks compute together. Set both to 1, or use that loss."
            )
        model.loss_function = CausalLoss(tensor, first, context)
        _check_that_forward_calls(
            model,
            f"tensor_parallel_degree or context_parallel_degree > 1: {type(model).__name__} "
            "computes its loss without loss_function, from a part of the logits. Set both to 1.",
        )


def install_reduction(model: Any, reduction: Reduction) -> None:
    """Replace the mean in the loss of ``model``, after `nearlinear.transform`.

    Raises ConfigError if the model's own loss is not the mean cross entropy of the next token, and
    in the first forward pass with labels if the model does not call its loss function.
    """
    if not isinstance(model.loss_function, CausalLoss):
        if not calls_loss_function(model) or target_rule(model) != SHIFTED:
            raise ConfigError(
                f"{type(model).__name__} does not compute its loss by model.loss_function, as the "
                "mean cross entropy of the next token, so that it cannot be trained on pairs of "
                "conversations: choose another model"
            )
        model.loss_function = CausalLoss()
        _check_that_forward_calls(
            model,
            f"{type(model).__name__} computes its loss without loss_function, so that it cannot be "
            "trained on pairs of conversations: choose another model",
        )
    model.loss_function.reduction = reduction
    state = model_state(model)
    state.target_rule, state.target_rule_verified = reduction.target_rule, True


def _check_that_forward_calls(model: Any, error: str) -> None:
    check = _LossCheck(model.loss_function, error)
    forward_transforms(model).before.append(check.before)
    forward_transforms(model).after.append(check.after)


class _LossCheck:
    """Refuses models whose forward pass with labels does not call ``loss``."""

    def __init__(self, loss: CausalLoss, error: str):
        self.loss, self.error = loss, error
        self.calls: int | None = None

    def before(self, given: dict) -> dict:
        self.calls = self.loss.calls if given.get("labels") is not None else None
        return given

    def after(self, output: Any) -> Any:
        if self.calls == self.loss.calls:
            raise ConfigError(self.error)
        return output


class _TokenLosses(torch.autograd.Function):
    """Cross entropy (N,) in float32 of logits (N, V of this rank); 0 for ignored tokens."""

    @staticmethod
    def forward(ctx, logits, targets, counted, first, group):
        x, here = logits.float(), targets - first
        is_local = counted & (here >= 0) & (here < x.shape[-1])
        here = here.where(is_local, 0).unsqueeze(-1)
        highest = x.amax(-1)
        total = (x - highest.unsqueeze(-1)).exp_().sum(-1)
        target = x.gather(-1, here).squeeze(-1).where(is_local, 0.0)
        if group is not None:
            known = torch.stack([highest, total, target])
            everyones = known.new_empty(group.size(), *known.shape)
            all_gather(everyones.view(-1), known.view(-1), group=group)
            highests, totals, targets_logits = everyones.unbind(1)
            highest = highests.amax(0)
            total = (totals * (highests - highest).exp()).sum(0)
            target = targets_logits.sum(0)
        log_total = highest + total.log()
        ctx.save_for_backward(logits, here, is_local, counted, log_total)
        return (log_total - target).where(counted, 0.0)

    @staticmethod
    def backward(ctx, gradient):
        logits, here, is_local, counted, log_total = ctx.saved_tensors
        found = (logits.float() - log_total.unsqueeze(-1)).exp_()
        found.scatter_add_(-1, here, -is_local.unsqueeze(-1).to(found.dtype))
        found *= gradient.where(counted, 0.0).unsqueeze(-1)
        return found.to(logits.dtype), None, None, None, None


def context_sum(
    total: torch.Tensor, count: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums over ``group`` of two tensors of one shape, the second without a gradient.

    The gradient of the first is multiplied by the number of ranks, see `CausalLoss`.
    """
    return _ContextSum.apply(total, count, group)


class _ContextSum(torch.autograd.Function):
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
