"""Model shapes and library settings that the tables of published runs leave out.

Sources: MPT, the llm-foundry repository's ``scripts/train/yamls``; Llama, Touvron et al. 2023 and
Grattafiori et al. 2024 (model cards); Megatron, Korthikanti et al. 2022, tables 3 and 4. The ZeRO++
post publishes only the number of parameters of its GPTs; shapes of that size are assumed.
"""

from typing import Any

from ..cluster import Cluster, Node, find_accelerator
from ..model_shape import ModelShape

MPT_VOCABULARY, MEGATRON_VOCABULARY = 50368, 51200

MEGATRON_SETTINGS: dict[str, Any] = {
    "precision": "fp16",
    "early_stop": False,
    "fused_attention": False,
    "fused_softmax": True,
    "compiled": True,
    "reduce_bytes": 2.0,
    "overlapped_reduce": False,
    "overlapped_sends": False,
    "split_sends": True,
    "async_tensor_all_reduce": True,
}
"""`workload.Workload` fields of Megatron-LM in 2021 to 2023."""

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

MEGATRON: dict[str, tuple[tuple[int, int, int], dict[str, Any], int, int, int]] = {
    "Megatron 22B": ((48, 6144, 64), {"tensor": 8}, 1, 4, 4),
    "GPT-3 175B": ((96, 12288, 96), {"tensor": 8, "pipeline": 8}, 3, 64, 1),
    "Turing 530B": ((105, 20480, 128), {"tensor": 8, "pipeline": 35}, 3, 280, 1),
    "Megatron 1T": ((128, 25600, 160), {"tensor": 8, "pipeline": 64}, 1, 512, 1),
}
"""Shape (layers, hidden size, heads), mesh degrees, stages per rank, global batch, micro-batch."""


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
