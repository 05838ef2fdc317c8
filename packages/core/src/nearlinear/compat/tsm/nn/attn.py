"""Attention modules of SMP v2 on ``torch.nn.functional.scaled_dot_product_attention``.

PyTorch selects the fused kernel: FlashAttention on GPUs, its own on CPUs. H are query heads, G
groups of keys and values.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from ....errors import ConfigError

LAYOUTS = ("b h s d", "b s h d")
"""Orders of batch, heads, tokens and channels."""


class FlashSelfAttention(nn.Module):
    """Attention of queries, keys and values that are stacked in one tensor.

    Args:
        attention_dropout_prob: Dropout of attention weights in training.
        scale: Factor of the scores; None: 1 / sqrt(D).
        triton_flash_attention: Accepted; PyTorch selects the kernel.
        use_alibi: Add the biases of ALiBi (Press et al. 2022).
    """

    def __init__(
        self,
        attention_dropout_prob: float = 0.0,
        scale: float | None = None,
        triton_flash_attention: bool = False,
        use_alibi: bool = False,
    ):
        super().__init__()
        self.dropout, self.scale, self.use_alibi = attention_dropout_prob, scale, use_alibi

    def forward(
        self,
        qkv: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        causal: bool = False,
        cast_dtype: torch.dtype | None = None,
        layout: str = "b h s d",
    ) -> torch.Tensor:
        """Return the attention output (B, H, S, D).

        Args:
            qkv: (B, 3, H, S, D), or (B, S, 3, H, D) with layout "b s h d".
            attn_mask: Added to the scores, or True where a key is seen; (B, 1, S, S) or alike.
            causal: Hide later tokens.
            cast_dtype: Dtype of the computation; the output has it.
            layout: One of `LAYOUTS`.
        """
        q, k, v = qkv.unbind(1 if _heads_first(layout) else 2)
        return _attend(self, q, k, v, attn_mask, causal, cast_dtype, layout)


class FlashGroupedQueryAttention(nn.Module):
    """Attention of H query heads and G groups of keys and values, where G divides H.

    Args:
        attention_dropout_prob: Dropout of attention weights in training.
        scale: Factor of the scores; None: 1 / sqrt(D).
    """

    def __init__(self, attention_dropout_prob: float = 0.0, scale: float | None = None):
        super().__init__()
        self.dropout, self.scale, self.use_alibi = attention_dropout_prob, scale, False

    def forward(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        causal: bool = False,
        cast_dtype: torch.dtype | None = None,
        layout: str = "b s h d",
    ) -> torch.Tensor:
        """Return the attention output (B, H, S, D).

        Args:
            q: (B, S, H, D), or (B, H, S, D) with layout "b h s d".
            kv: (B, S, 2, G, D), or (B, 2, G, S, D) with layout "b h s d".
            causal: Hide later tokens.
            cast_dtype: Dtype of the computation; the output has it.
            layout: One of `LAYOUTS`.
        """
        k, v = kv.unbind(1 if _heads_first(layout) else 2)
        return _attend(self, q, k, v, None, causal, cast_dtype, layout)


def _heads_first(layout: str) -> bool:
    if layout not in LAYOUTS:
        raise ConfigError(f"layout = {layout!r}: allowed are {', '.join(map(repr, LAYOUTS))}")
    return layout == "b h s d"


def _attend(
    module: FlashSelfAttention | FlashGroupedQueryAttention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    cast_dtype: torch.dtype | None,
    layout: str,
) -> torch.Tensor:
    q, k, v = (
        each.to(cast_dtype or each.dtype) if _heads_first(layout)
        else each.to(cast_dtype or each.dtype).transpose(1, 2)
        for each in (q, k, v)
    )  # fmt: skip
    tokens = q.shape[2]
    if module.use_alibi:
        bias = _alibi(q.shape[1], tokens, q)
        mask = bias if mask is None else bias + _as_bias(mask, q)
    if causal and mask is not None:
        seen = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).tril()
        mask, causal = _as_bias(mask, q) + _as_bias(seen, q), False
    return functional.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=module.dropout if module.training else 0.0,
        is_causal=causal,
        scale=module.scale,
        enable_gqa=k.shape[1] != q.shape[1],
    )


def _as_bias(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a mask as a bias of the scores; True keeps a score."""
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    bias = torch.zeros(mask.shape, dtype=like.dtype, device=like.device)
    return bias.masked_fill(~mask, -torch.inf)


def _alibi(heads: int, tokens: int, like: torch.Tensor) -> torch.Tensor:
    """Return the biases (1, H, S, S): minus the distance of query and key times a head's slope."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
    at = torch.arange(tokens, device=like.device)
    distance = (at[:, None] - at[None, :]).abs()
    slope = torch.tensor(slopes, device=like.device, dtype=torch.float32)
    return (-slope[:, None, None] * distance).unsqueeze(0).to(like.dtype)
