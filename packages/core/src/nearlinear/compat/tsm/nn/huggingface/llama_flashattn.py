"""``LlamaFlashAttention``: Llama's attention on PyTorch's fused attention."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn


class LlamaFlashAttention(nn.Module):
    """Attention layer of `transformers` with ``attn_implementation="sdpa"``.

    Args:
        config: ``LlamaConfig``.
        layer_idx: Number of the layer.
    """

    def __new__(cls, config: Any, layer_idx: int = 0) -> Any:
        """Return transformers' own layer, so that state dicts have its names."""
        from transformers.models.llama.modeling_llama import LlamaAttention

        config = copy.deepcopy(config)
        config._attn_implementation = "sdpa"
        return LlamaAttention(config, layer_idx)
