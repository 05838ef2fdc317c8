"""Shapes of published models, which most posts leave out, and the machines that they describe.

Sources: MPT, the llm-foundry repository's ``scripts/train/yamls``; Llama, Touvron et al. 2023 and
Grattafiori et al. 2024 (model cards). The ZeRO++ post publishes only the number of parameters of
its GPTs; shapes of that size are assumed.
"""

from __future__ import annotations

from ..cluster import Cluster, Node, find_accelerator
from ..model_shape import ModelShape

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
