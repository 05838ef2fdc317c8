"""Rows of ``framework_posts.csv``: the behaviour of each library, and gaps in its post.

The posts leave out model shapes and library settings. Sources: MPT, the llm-foundry repository's
``scripts/train/yamls``; Llama, Touvron et al. 2023 and Grattafiori et al. 2024 (model cards);
Megatron, Korthikanti et al. 2022, tables 3 and 4. The ZeRO++ post publishes only the number of
parameters of its GPTs; shapes of that size are assumed.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from ...distributed.mesh import Mesh
from ..cluster import Cluster, Node, find_accelerator
from ..model_shape import ModelShape
from ..workload import Workload

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


SOURCES = {
    "seed0": "AWS, sharded data parallelism",
    "seed2": "AWS, SMDDP",
    "torchtitan": "torchtitan, H100",
    "fms-fsdp": "fms-fsdp, A100",
    "ZeRO++": "ZeRO++, V100",
    "Korthikanti": "Megatron-LM, Korthikanti et al.",
}
DEEPSPEED_MESSAGE = 5e7
"""DeepSpeed's default ``stage3_prefetch_bucket_size``: parameters per all-gather."""
SAME_RUN = "repeats the run of another row in another unit"

Values = dict[str, str]
RunValues = tuple[Workload, Cluster, float]


def source_name(values: Values) -> str:
    """Return the short name of a row's source."""
    return next(name for start, name in SOURCES.items() if values["source"].startswith(start))


def read_row(values: Values) -> RunValues | str:
    """Return workload, cluster and seconds per step, or the reason to skip the row."""
    readers = {
        SOURCES["seed0"]: _sharded_data_parallel,
        SOURCES["seed2"]: _smddp,
        SOURCES["torchtitan"]: _torchtitan,
        SOURCES["fms-fsdp"]: _fms,
        SOURCES["ZeRO++"]: _zero,
        SOURCES["Korthikanti"]: _megatron,
    }
    return readers[source_name(values)](values)


def _number(values: Values, key: str, default: int = 1) -> int:
    return int(values[key]) if values[key] else default


def _cluster(values: Values) -> Cluster:
    gpus, per_node = int(values["gpus"]), int(values["gpus_per_node"])
    return published_cluster(values["gpu"], gpus, per_node, float(values["net_gbps_per_node"]))


def _sharded_data_parallel(values: Values) -> RunValues | str:
    """Hugging Face's GPT-2 without fused attention; one micro-batch per step, as fits in 40 GB.

    SMP uses AWS's all-gather. DeepSpeed's all-gathers are not overlapped: it prefetches 50 million
    parameters, a tenth of a block.
    """
    if not values["gpus"]:
        return "its cluster size is not published"
    if values["metric"] != "samples/s":
        return SAME_RUN
    gpus, sequence = int(values["gpus"]), int(values["seq"])
    batch = int(values["global_batch_seqs"])
    shard = _number(values, "dp_shard", min(128, gpus))
    smp = values["note"].startswith("SMP")
    work = Workload(
        shape=replace(gpt(*GPT[values["model"]], 50257, 2048), activation="gelu_new"),
        sequence=sequence,
        micro_batch=batch // gpus,
        micro_batches=1,
        mesh=Mesh(shard=shard, replicate=gpus // shard, ranks_per_node=8),
        recompute="block",
        early_stop=False,
        fused_attention=False,
        reduce_bytes=2.0,
        prefetch=1 if smp else 0,
        max_message=0.0 if smp else DEEPSPEED_MESSAGE,
        direct_all_gather=smp,
    )
    return work, _cluster(values), batch / float(values["value"])


def _smddp(values: Values) -> RunValues | str:
    """FSDP with activation checkpointing: the post gives hardware FLOPS of 4/3 of the model's.

    The batch is two sequences per rank: one micro-batch per step.
    """
    if values["model"] not in LLAMA:
        return "its micro-batch, which sets the number of all-gathers, is not published"
    gpus, sequence = int(values["gpus"]), int(values["seq"])
    batch = int(values["global_batch_seqs"])
    work = Workload(
        shape=llama(values["model"]),
        sequence=sequence,
        micro_batch=batch // gpus,
        micro_batches=1,
        mesh=Mesh(shard=gpus, ranks_per_node=8),
        recompute="block",
        direct_all_gather="SMDDP" in values["note"],
    )
    return work, _cluster(values), work.model_flops / gpus / (float(values["value"]) * 1e12)


def _interleaved(virtual: int) -> dict[str, Any]:
    """1F1B with ``virtual`` stages per rank."""
    return {"virtual_stages": virtual, "schedule": "interleaved_1f1b" if virtual > 1 else "1f1b"}


def _torchtitan(values: Values) -> RunValues | str:
    if values["metric"] == "peak GiB":
        return "its metric is memory, not time"
    gpus, pipeline = int(values["gpus"]), _number(values, "pp")
    note, local = values["note"], int(values["micro_batch"])
    work = Workload(
        shape=llama(values["model"]),
        sequence=int(values["seq"]),
        micro_batch=local // pipeline,  # one micro-batch per pipeline rank
        micro_batches=pipeline,
        mesh=Mesh(
            pipeline=pipeline,
            shard=int(values["dp_shard"]),
            context=_number(values, "cp"),
            tensor=_number(values, "tp"),
            ranks_per_node=8,
        ),
        fp8=values["precision"] == "float8",
        recompute="alternate" if values["act_ckpt"] == "selective" else "block",
        compiled="compile=no" not in note,
        sequence_parallel=True,
        async_tensor_parallel="AsyncTP" in note,
        **_interleaved(2 if "Interleaved" in note else 1),
        reshard_after_forward=pipeline == 1,
        overlapped_reduce=pipeline == 1,
    )
    seconds = work.step_tokens / gpus / float(values["value"])
    return work, _cluster(values), seconds


FMS_RECOMPUTED = {"Llama-2 7B": 0.0, "Llama-2 13B": 0.4, "Llama 34B": 1.0, "Llama-2 70B": 1.0}
"""Share of recomputed blocks: three times HFU / MFU - 1, from the post's figures."""


def _fms(values: Values) -> RunValues | str:
    if values["metric"] != "tokens/s/GPU":
        return SAME_RUN
    model, gpus = values["model"], int(values["gpus"])
    hybrid = values["note"].startswith("HSDP")
    share = FMS_RECOMPUTED[model]
    work = Workload(
        shape=llama(model),
        sequence=int(values["seq"]),
        micro_batch=int(values["micro_batch"]),
        micro_batches=1,
        mesh=Mesh(shard=8, replicate=gpus // 8, ranks_per_node=8)
        if hybrid
        else Mesh(shard=gpus, ranks_per_node=8),
        recompute="block" if share else "none",
        recomputed_share=share or 1.0,
        compiled="eager" not in values["note"],
        reduce_bytes=2.0,
    )
    return work, _cluster(values), work.step_tokens / gpus / float(values["value"])


def _zero(values: Values) -> RunValues | str:
    """Sequences of 1024 tokens with recomputation; TFLOPS count 8 FLOPs per parameter and token."""
    if "ZeRO++" in values["note"]:
        return "ZeRO++ reduces in 4 bits and keeps a second copy per node, which is not modelled"
    gpus = int(values["gpus"])
    match = re.search(r"(\d)K tokens", values["note"])
    assert match is not None, values
    thousands = int(match[1])
    shape = gpt(*GPT[values["model"]], MEGATRON_VOCABULARY, 1024)
    work = Workload(
        shape=shape,
        sequence=1024,
        micro_batch=thousands,
        micro_batches=1,
        mesh=Mesh(shard=gpus, ranks_per_node=int(values["gpus_per_node"])),
        precision="fp16",
        recompute="block",
        early_stop=False,
        fused_attention=False,
        fused_softmax=True,
        reduce_bytes=2.0,
        prefetch=0,
        max_message=DEEPSPEED_MESSAGE,
    )
    flops = 8 * float(values["params_b"]) * 1e9 * work.tokens
    return work, _cluster(values), flops / (float(values["value"]) * 1e12)


def _megatron(values: Values) -> RunValues | str:
    """DGX A100s with eight 200 Gbit/s adapters."""
    shape, degrees, virtual, batch, micro_batch = MEGATRON[values["model"]]
    selective = "selective" in values["note"]
    mesh = Mesh(**degrees, ranks_per_node=8)
    work = Workload(
        shape=gpt(*shape, MEGATRON_VOCABULARY, 2048),
        sequence=2048,
        micro_batch=micro_batch,
        micro_batches=batch // micro_batch,
        mesh=mesh,
        recompute="attention" if selective else "block",
        sequence_parallel=selective,
        **_interleaved(virtual),
        **MEGATRON_SETTINGS,
    )
    return work, published_cluster("A100-80GB", mesh.world, 8, 1600), float(values["value"])
