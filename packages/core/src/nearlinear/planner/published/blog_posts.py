"""Rows of ``framework_posts.csv``: the behaviour of each library, and gaps in its post.

Rows of libraries that `columns` knows are read by it. Source of Megatron's shapes and layouts:
Korthikanti et al. 2022, tables 3 and 4.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...distributed.mesh import Mesh
from ..workload import Workload
from . import columns
from .columns import (
    DEEPSPEED_MESSAGE,
    MEGATRON,
    SAME_RUN,
    RunValues,
    Values,
    cluster_of,
    interleaved,
    number,
)
from .models import GPT, LLAMA, MEGATRON_VOCABULARY, gpt, llama, published_cluster

MEGATRON_RUNS: dict[str, tuple[tuple[int, int, int], dict[str, Any], int, int, int]] = {
    "Megatron 22B": ((48, 6144, 64), {"tensor": 8}, 1, 4, 4),
    "GPT-3 175B": ((96, 12288, 96), {"tensor": 8, "pipeline": 8}, 3, 64, 1),
    "Turing 530B": ((105, 20480, 128), {"tensor": 8, "pipeline": 35}, 3, 280, 1),
    "Megatron 1T": ((128, 25600, 160), {"tensor": 8, "pipeline": 64}, 1, 512, 1),
}
"""Shape (layers, hidden size, heads), mesh degrees, stages per rank, global batch, micro-batch."""


SOURCES = {
    "seed0": "AWS, sharded data parallelism",
    "seed2": "AWS, SMDDP",
    "torchtitan": "torchtitan, H100",
    "fms-fsdp": "fms-fsdp, A100",
    "ZeRO++": "ZeRO++, V100",
    "Korthikanti": "Megatron-LM, Korthikanti et al.",
}


def source_name(values: Values) -> str:
    """Return the short name of a row's source."""
    return next(name for start, name in SOURCES.items() if values["source"].startswith(start))


def read_row(values: Values) -> RunValues | str:
    """Return workload, cluster and seconds per step, or the reason to skip the row."""
    readers = {
        SOURCES["seed0"]: _sharded_data_parallel,
        SOURCES["seed2"]: _smddp,
        SOURCES["Korthikanti"]: _megatron,
    }
    return readers.get(source_name(values), columns.read_row)(values)


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
    shard = number(values, "dp_shard", min(128, gpus))
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
    return work, cluster_of(values), batch / float(values["value"])


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
    return work, cluster_of(values), work.model_flops / gpus / (float(values["value"]) * 1e12)


def _megatron(values: Values) -> RunValues | str:
    """DGX A100s with eight 200 Gbit/s adapters."""
    shape, degrees, virtual, batch, micro_batch = MEGATRON_RUNS[values["model"]]
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
        **interleaved(virtual),
        **MEGATRON.fields,
    )
    return work, published_cluster("A100-80GB", mesh.world, 8, 1600), float(values["value"])
