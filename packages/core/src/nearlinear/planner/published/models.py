"""Shapes of published models, which most posts leave out, and the machines that they describe.

Sources: MPT, the llm-foundry repository's ``scripts/train/yamls``; Llama, Touvron et al. 2023 and
Grattafiori et al. 2024 (model cards). The ZeRO++ post publishes only the number of parameters of
its GPTs; shapes of that size are assumed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..cluster import Cluster, Node, find_accelerator
from ..model_shape import LatentAttention, ModelShape

MPT_VOCABULARY, MEGATRON_VOCABULARY = 50368, 51200

MPT = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
"""Layers, hidden size, heads."""

LLAMA = {
    "Llama-2 7B": (32, 4096, 32, 11008, 32000, 32),
    "Llama-2 13B": (40, 5120, 40, 13824, 32000, 40),
    "Llama 34B": (48, 8192, 64, 22016, 32000, 8),
    "Llama-2 70B": (80, 8192, 64, 28672, 32000, 8),
    "Llama-3.1 8B": (32, 4096, 32, 14336, 128256, 8),
    "Llama-3.1 70B": (80, 8192, 64, 28672, 128256, 8),
    "Llama-3.1 405B": (126, 16384, 128, 53248, 128256, 8),
    "Llama 15B (KempnerForge)": (40, 5120, 40, 17920, 128256, 8),
    "Llama 175B (KempnerForge)": (96, 12288, 96, 39680, 128256, 8),
}
"""Layers, hidden size, heads, feed-forward size, vocabulary, key-value heads."""

GPT = {
    "GPT-2 30B": (48, 7168, 64),
    "GPT 18B": (40, 6144, 48),
    "GPT 49B": (60, 8192, 64),
    "GPT 91B": (72, 10240, 80),
    "GPT 138B": (76, 12288, 96),
}
"""Layers, hidden size, heads."""


def _with_dense_blocks(shape: ModelShape, inner: int) -> ModelShape:
    """Correct the parameters of a mixture whose first blocks have one layer of ``inner``."""
    mixed = shape.experts * shape.feed_forward_matrices + shape.shared_matrices + shape.router
    fewer = shape.dense_blocks * (mixed - 3 * shape.width * inner)
    return replace(shape, other_parameters=-fewer)


_MIXTURE: dict[str, Any] = {"gated": True, "tied": False, "activation": "silu"}
_LATENT = LatentAttention(query_rank=1536, rank=512, rotary=64, value=128)
MIXTURES = {
    "Qwen3 30B-A3B": ModelShape(
        48, 2048, 32, 768, 151936, 4, 128, experts=128, experts_per_token=8, **_MIXTURE
    ),
    "Qwen3 235B-A22B": ModelShape(
        94, 4096, 64, 1536, 151936, 4, 128, experts=128, experts_per_token=8, **_MIXTURE
    ),
    "GPT-OSS 20B": ModelShape(
        24, 2880, 64, 2880, 201088, 8, 64, experts=32, experts_per_token=4, **_MIXTURE
    ),
    "GPT-OSS 120B": ModelShape(
        36, 2880, 64, 2880, 201088, 8, 64, experts=128, experts_per_token=4, **_MIXTURE
    ),
    "DeepSeek-V3": _with_dense_blocks(ModelShape(
        61, 7168, 128, 2048, 129280, 128, 192, experts=256, experts_per_token=8,
        shared_inner=2048, dense_blocks=3, latent=_LATENT, **_MIXTURE,
    ), 18432),
    "Kimi K2": _with_dense_blocks(ModelShape(
        61, 7168, 64, 2048, 163840, 64, 192, experts=384, experts_per_token=8,
        shared_inner=2048, dense_blocks=1, latent=_LATENT, **_MIXTURE,
    ), 18432),
}  # fmt: skip
"""Mixtures of experts, from their config.json. Sliding windows of GPT-OSS are counted as whole
sequences, and DeepSeek-V3 is without its prediction of further tokens."""


def gpt(layers: int, width: int, heads: int, vocabulary: int, context: int) -> ModelShape:
    return ModelShape(layers, width, heads, 4 * width, vocabulary, positions=context)


def mpt(name: str, context: int) -> ModelShape:
    return gpt(*MPT[name], MPT_VOCABULARY, context)


def llama(name: str) -> ModelShape:
    layers, width, heads, inner, vocabulary, kv_heads = LLAMA[name]
    return ModelShape(
        layers,
        width,
        heads,
        inner,
        vocabulary,
        kv_heads,
        gated=True,
        tied=False,
        activation="silu",
    )


def published_cluster(gpu: str, gpus: int, per_node: int, gbps: float) -> Cluster:
    """Return a cluster of ``gpus`` GPUs with ``gbps`` Gbit/s per node."""
    node = Node("as published", find_accelerator(gpu), per_node, gbps)
    return Cluster(node, -(-gpus // per_node), gpus)
