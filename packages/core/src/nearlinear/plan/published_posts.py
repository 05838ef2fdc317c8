"""The rows of ``framework_posts.csv``: what each library does, and what its post leaves out."""

import re
from dataclasses import replace

from ..mesh import Mesh
from .published_models import (
    GPT,
    LLAMA,
    MEGATRON,
    MEGATRON_VOCABULARY,
    MEGATRON_WAYS,
    gpt,
    llama,
    machines,
)
from .workload import Workload

SHORT = {
    "seed0": "AWS, sharded data parallelism",
    "seed2": "AWS, SMDDP",
    "torchtitan": "torchtitan, H100",
    "fms-fsdp": "fms-fsdp, A100",
    "ZeRO++": "ZeRO++, V100",
    "Korthikanti": "Megatron-LM, Korthikanti et al.",
}
DEEPSPEED_MESSAGE = 5e7
"""Its default ``stage3_prefetch_bucket_size``: parameters it asks for at once."""
SAME_RUN = "the same run as another row, in another unit"


def source(values: dict) -> str:
    return next(name for start, name in SHORT.items() if values["source"].startswith(start))


def read(values: dict):
    """(workload, cluster, seconds), or why not."""
    readers = {
        SHORT["seed0"]: _sharded_data_parallel,
        SHORT["seed2"]: _smddp,
        SHORT["torchtitan"]: _torchtitan,
        SHORT["fms-fsdp"]: _fms,
        SHORT["ZeRO++"]: _zero,
        SHORT["Korthikanti"]: _megatron,
    }
    return readers[source(values)](values)


def _number(values: dict, key: str, default: int = 1) -> int:
    return int(values[key]) if values[key] else default


def _cluster(values: dict):
    gpus, per_node = int(values["gpus"]), int(values["gpus_per_node"])
    return machines(values["gpu"], gpus, per_node, float(values["net_gbps_per_node"]))


def _sharded_data_parallel(values: dict):
    """Hugging Face's GPT-2, scores written out; one micro-batch per step, as 40 GB hold it.

    SMP gathers with AWS's collectives; DeepSpeed's gathers wait for each other: it fetches 50
    million parameters ahead, a tenth of a block.
    """
    if not values["gpus"]:
        return "the size of its cluster is not published"
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
        passes=1,
        mesh=Mesh(shard=shard, replicate=gpus // shard, ranks_per_node=8),
        recompute="block",
        stops_early=False,
        fused_attention=False,
        reduce_bytes=2.0,
        prefetch=1 if smp else 0,
        message=0.0 if smp else DEEPSPEED_MESSAGE,
        direct=smp,
    )
    return work, _cluster(values), batch / float(values["value"])


def _smddp(values: dict):
    """FSDP with activation checkpointing: its hardware FLOPS are 4/3 of the model's, says the post.

    Two sequences per rank make its batch: one micro-batch per step.
    """
    if values["model"] not in LLAMA:
        return "its micro-batch, which decides how often parameters are gathered, is not published"
    gpus, sequence = int(values["gpus"]), int(values["seq"])
    batch = int(values["global_batch_seqs"])
    work = Workload(
        shape=llama(values["model"]),
        sequence=sequence,
        micro_batch=batch // gpus,
        passes=1,
        mesh=Mesh(shard=gpus, ranks_per_node=8),
        recompute="block",
        direct="SMDDP" in values["note"],
    )
    return work, _cluster(values), work.model_flops / gpus / (float(values["value"]) * 1e12)


def _interleaved(virtual: int) -> dict:
    """1F1B with so many stages on each rank."""
    return {"virtual": virtual, "schedule": "interleaved_1f1b" if virtual > 1 else "1f1b"}


def _torchtitan(values: dict):
    if values["metric"] == "peak GiB":
        return "its metric is memory: see the memory model"
    gpus, pipeline = int(values["gpus"]), _number(values, "pp")
    note, local = values["note"], int(values["micro_batch"])
    work = Workload(
        shape=llama(values["model"]),
        sequence=int(values["seq"]),
        micro_batch=local // pipeline,  # a pipeline is given as many micro-batches as it has ranks
        passes=pipeline,
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
        overlapped_tensor="AsyncTP" in note,
        **_interleaved(2 if "Interleaved" in note else 1),
        resharded=pipeline == 1,
        overlapped_reduce=pipeline == 1,
    )
    seconds = work.step_tokens / gpus / float(values["value"])
    return work, _cluster(values), seconds


FMS_RECOMPUTED = {"Llama-2 7B": 0.0, "Llama-2 13B": 0.4, "Llama 34B": 1.0, "Llama-2 70B": 1.0}
"""The share of blocks: three times what its HFU has over its MFU, which the post gives for each."""


def _fms(values: dict):
    if values["metric"] != "tokens/s/GPU":
        return SAME_RUN
    model, gpus = values["model"], int(values["gpus"])
    hybrid = values["note"].startswith("HSDP")
    share = FMS_RECOMPUTED[model]
    work = Workload(
        shape=llama(model),
        sequence=int(values["seq"]),
        micro_batch=int(values["micro_batch"]),
        passes=1,
        mesh=Mesh(shard=8, replicate=gpus // 8, ranks_per_node=8)
        if hybrid
        else Mesh(shard=gpus, ranks_per_node=8),
        recompute="block" if share else "none",
        recomputed_blocks=share or 1.0,
        compiled="eager" not in values["note"],
        reduce_bytes=2.0,
    )
    return work, _cluster(values), work.step_tokens / gpus / float(values["value"])


def _zero(values: dict):
    """Sequences of 1024 tokens, recomputed; the post's TFLOPS count 8 per parameter and token."""
    if "ZeRO++" in values["note"]:
        return "ZeRO++ reduces in 4 bits and keeps a second copy in each node: not offered here"
    gpus, thousands = int(values["gpus"]), int(re.search(r"(\d)K tokens", values["note"])[1])
    shape = gpt(*GPT[values["model"]], MEGATRON_VOCABULARY, 1024)
    work = Workload(
        shape=shape,
        sequence=1024,
        micro_batch=thousands,
        passes=1,
        mesh=Mesh(shard=gpus, ranks_per_node=int(values["gpus_per_node"])),
        precision="fp16",
        recompute="block",
        stops_early=False,
        fused_attention=False,
        fused_softmax=True,
        reduce_bytes=2.0,
        prefetch=0,
        message=DEEPSPEED_MESSAGE,
    )
    flops = 8 * float(values["params_b"]) * 1e9 * work.tokens
    return work, _cluster(values), flops / (float(values["value"]) * 1e12)


def _megatron(values: dict):
    """On DGX A100s with eight adapters of 200 Gbit/s."""
    shape, degrees, virtual, batch, micro_batch = MEGATRON[values["model"]]
    selective = "selective" in values["note"]
    mesh = Mesh(**degrees, ranks_per_node=8)
    work = Workload(
        shape=gpt(*shape, MEGATRON_VOCABULARY, 2048),
        sequence=2048,
        micro_batch=micro_batch,
        passes=batch // micro_batch,
        mesh=mesh,
        recompute="attention" if selective else "block",
        sequence_parallel=selective,
        **_interleaved(virtual),
        **MEGATRON_WAYS,
    )
    return work, machines("A100-80GB", mesh.world, 8, 1600), float(values["value"])
