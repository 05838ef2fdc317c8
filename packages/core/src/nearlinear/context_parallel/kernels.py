"""Attention over one block of scores, with a softmax in float32 that combines over blocks.

Every block returns its output and the log of its softmax denominator (`lse`); `BlockSum` combines
the outputs of blocks with these. The backward pass of a block needs only the combined two. Full and
causal blocks use torch's flash kernels where available, all others plain matrix products over a few
rows at a time. Shapes: B batch, H heads, K key heads, G heads per key head, Q and S rows of queries
and keys, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .. import _torch

EMPTY_LSE = -1e30
"""lse of a row that sees no key: finite, so that arithmetic does not give NaN."""
MAX_SCORES = 1 << 25
"""Number of scores computed at once without flash kernels."""


@dataclass(frozen=True)
class Mask:
    """Visibility of the keys of one block to its queries."""

    visible: Callable[[slice], torch.Tensor]
    """Returns the mask of some of the queries: bool, broadcastable to (B, K, G, Q, S)."""


@dataclass(frozen=True)
class Dropout:
    """Reproducible dropout of the weights of one block."""

    probability: float
    seed: int

    def generator(self, device) -> torch.Generator:
        return torch.Generator(device).manual_seed(self.seed)

    def scale(self, scores: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return the factors of the weights of ``scores``; call it for rows in order."""
        kept = torch.rand(scores.shape, generator=generator, device=scores.device)
        return (kept >= self.probability).float() / (1 - self.probability)


def forward(
    q_BHQD: torch.Tensor,
    k_BKSD: torch.Tensor,
    v_BKSD: torch.Tensor,
    scale: float,
    *,
    causal: bool,
    mask: Mask | None,
    dropout: Dropout | None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the output (B, H, Q, D) and lse (B, H, Q) of one block.

    ``mask`` includes causality; blocks without a mask are full, or causal with ``causal``.
    ``softcap`` limits scores to its range by a tanh.
    """
    if _uses_flash(q_BHQD, k_BKSD, v_BKSD, mask, dropout, softcap):
        return _torch.flash_attention(q_BHQD, k_BKSD, v_BKSD, causal, scale)
    k_BKSD, v_BKSD = k_BKSD.float(), v_BKSD.float()
    generator = dropout.generator(q_BHQD.device) if dropout else None
    outs, lses = [], []
    for rows in _parts(q_BHQD, k_BKSD):
        scores = _scores(q_BHQD[:, :, rows], k_BKSD, scale, softcap, causal, mask, rows)
        lse = scores.logsumexp(-1, keepdim=True).clamp(min=EMPTY_LSE)
        weights = (scores - lse).exp()
        if dropout and generator:
            weights *= dropout.scale(weights, generator)
        outs.append((weights.flatten(2, 3) @ v_BKSD).unflatten(2, weights.shape[2:4]).flatten(1, 2))
        lses.append(lse.squeeze(-1).flatten(1, 2))
    return torch.cat(outs, 2), torch.cat(lses, 2)


def backward(
    grad_BHQD: torch.Tensor,
    q_BHQD: torch.Tensor,
    k_BKSD: torch.Tensor,
    v_BKSD: torch.Tensor,
    out_BHQD: torch.Tensor,
    lse_BHQ: torch.Tensor,
    scale: float,
    *,
    causal: bool,
    mask: Mask | None,
    dropout: Dropout | None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute one block's gradients of q, k and v; ``out`` and ``lse`` combine all blocks."""
    if _uses_flash(q_BHQD, k_BKSD, v_BKSD, mask, dropout, softcap):
        return _torch.flash_attention_backward(
            grad_BHQD, q_BHQD, k_BKSD, v_BKSD, out_BHQD, lse_BHQ, causal, scale
        )
    key_heads = k_BKSD.shape[1]
    k_BKSD, v_BKSD = k_BKSD.float(), v_BKSD.float()
    dk_BKSD, dv_BKSD = torch.zeros_like(k_BKSD), torch.zeros_like(v_BKSD)
    generator = dropout.generator(q_BHQD.device) if dropout else None
    dqs = []
    for rows in _parts(q_BHQD, k_BKSD):
        q, grad, out = (
            _by_key_head(x[:, :, rows].float(), key_heads) for x in (q_BHQD, grad_BHQD, out_BHQD)
        )
        scores = _scores(q_BHQD[:, :, rows], k_BKSD, scale, softcap, causal, mask, rows)
        lse = lse_BHQ[:, :, rows].unflatten(1, (key_heads, -1))
        weights = (scores - lse[..., None]).exp()
        dweights = (grad.flatten(2, 3) @ v_BKSD.mT).view_as(weights)
        kept = weights
        if dropout and generator:
            factors = dropout.scale(weights, generator)
            kept, dweights = weights * factors, dweights * factors
        dscores = weights * (dweights - (grad * out).sum(-1, keepdim=True)) * scale
        if softcap:  # the derivative of softcap * tanh(x / softcap)
            dscores *= 1 - (scores.clamp(min=-softcap) / softcap).square_()
        dv_BKSD += kept.flatten(2, 3).mT @ grad.flatten(2, 3)
        dk_BKSD += dscores.flatten(2, 3).mT @ q.flatten(2, 3)
        dqs.append((dscores.flatten(2, 3) @ k_BKSD).unflatten(2, weights.shape[2:4]).flatten(1, 2))
    return torch.cat(dqs, 2), dk_BKSD, dv_BKSD


class BlockSum:
    """Running combination of blocks: output (B, H, Q, D) and lse (B, H, Q) in float32."""

    def __init__(self, q_BHQD: torch.Tensor, value_size: int):
        self.out = q_BHQD.new_zeros((*q_BHQD.shape[:3], value_size), dtype=torch.float32)
        self.lse = q_BHQD.new_full(q_BHQD.shape[:3], EMPTY_LSE, dtype=torch.float32)

    def add(self, rows: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Combine with a block of the queries ``rows``."""
        before = self.lse[:, :, rows]
        both = torch.logaddexp(before, lse)
        self.out[:, :, rows] *= (before - both).exp()[..., None]
        self.out[:, :, rows] += out * (lse - both).exp()[..., None]
        self.lse[:, :, rows] = both

    def add_sinks(self, sinks_H: torch.Tensor) -> None:
        """Add a score of every head to the softmax denominators."""
        both = torch.logaddexp(self.lse, sinks_H.float()[:, None])
        self.out *= (self.lse - both).exp()[..., None]
        self.lse = both


def _parts(q_BHQD: torch.Tensor, k_BKSD: torch.Tensor) -> list[slice]:
    """Divide the queries into slices whose scores fit in `MAX_SCORES`."""
    batch, heads, queries, _ = q_BHQD.shape
    rows = max(1, MAX_SCORES // (batch * heads * k_BKSD.shape[2]))
    return [slice(first, min(first + rows, queries)) for first in range(0, queries, rows)]


def _by_key_head(x_BHQD: torch.Tensor, key_heads: int) -> torch.Tensor:
    """View as (B, K, G, Q, D), grouping heads by key head."""
    return x_BHQD.unflatten(1, (key_heads, -1))


def _uses_flash(q_BHQD, k_BKSD, v_BKSD, mask, dropout, softcap) -> bool:
    plain = mask is None and dropout is None and not softcap
    return plain and _torch.has_flash_attention(q_BHQD, k_BKSD, v_BKSD)


def _scores(
    q_BHQD, k_BKSD, scale: float, softcap: float | None, causal: bool, mask: Mask | None, rows
):
    """Compute scores (B, K, G, Q, S) in float32, -inf for invisible keys."""
    q_BKGQD = _by_key_head(q_BHQD.float(), k_BKSD.shape[1])
    scores = (q_BKGQD.flatten(2, 3) @ k_BKSD.mT).mul_(scale).unflatten(2, q_BKGQD.shape[2:4])
    if softcap:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if mask is not None:
        return scores.masked_fill_(~mask.visible(rows), -torch.inf)
    if causal:
        at = torch.arange(k_BKSD.shape[2], device=scores.device)
        return scores.masked_fill_(at > at[rows, None], -torch.inf)
    return scores
