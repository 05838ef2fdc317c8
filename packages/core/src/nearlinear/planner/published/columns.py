"""Tables in the documented format, read by their columns alone (``planner/data/README.md``).

A row states model, machines, layout, batch and a rate. How a library works is not in the columns
but in a profile, chosen by the library's name in ``source``. A table that this project has never
seen can therefore be predicted. Columns that a row leaves empty have the library's defaults.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...distributed.mesh import Mesh
from ..cluster import Cluster
from ..memory.rank import Behaviour
from ..model_shape import ModelShape
from ..workload import Recompute, Workload
from .models import (
    GPT,
    LLAMA,
    MEGATRON_VOCABULARY,
    MIXTURES,
    MPT,
    gpt,
    llama,
    mpt,
    published_cluster,
)

COLUMNS = (
    "source", "model", "params_b", "layers", "hidden", "heads", "seq", "gpu", "gpus",
    "gpus_per_node", "net_gbps_per_node", "dp_shard", "dp_replicate", "tp", "pp", "cp",
    "global_batch_seqs", "micro_batch", "act_ckpt", "precision", "metric", "value", "note",
)  # fmt: skip
USUAL_GBPS = {"V100-32GB": 100, "A100-40GB": 400, "A100-80GB": 1600}
"""Gbit/s per node where a row states none; 3200 for newer GPUs."""
DEEPSPEED_MESSAGE = 5e7
"""DeepSpeed's default ``stage3_prefetch_bucket_size``: parameters per all-gather."""
FMS_RECOMPUTED = {"Llama-2 7B": 0.0, "Llama-2 13B": 0.4, "Llama 34B": 1.0, "Llama-2 70B": 1.0}
"""Share of recomputed blocks: three times HFU / MFU - 1, from the post's figures."""
SAME_RUN = "repeats the run of another row in another unit"
NO_SHAPE = "the shape of its model is not published"

Values = dict[str, str]
RunValues = tuple[Workload, Cluster, float]
"""Workload, cluster and the published value: seconds per step, or bytes."""


@dataclass(frozen=True)
class Software:
    """Behaviour of a library, which the columns do not state."""

    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of the workload."""
    selective: Recompute = "alternate"
    """Recomputation that it calls selective."""
    unstated: Recompute = "none"
    """Recomputation of rows that state none."""
    shards: bool = True
    """False if data-parallel ranks hold whole parameters, also with a distributed optimizer."""
    local_batch: bool = False
    """True if ``micro_batch`` of a pipeline is a rank's batch, with as many micro-batches as
    pipeline ranks."""
    ends_count: bool = False
    """True if embedding and head count as blocks where a pipeline's stages are then equal."""
    interleaved_blocks: int = 0
    """Blocks of a virtual stage where a row does not say, or 0: no virtual stages."""
    memory: Behaviour = Behaviour(loss="torch")
    """Its use of memory."""


MEGATRON = Software(
    {
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
    },
    selective="attention",
    shards=False,
    memory=Behaviour(fused=True, loss="in_place", regathers=True, receives_ahead=False),
)
"""Megatron-LM in 2021 to 2023."""
_MEGATRON_CORE = replace(
    MEGATRON,
    fields={
        "compiled": True,
        "sequence_parallel": True,
        "split_sends": True,
        "async_tensor_parallel": True,
        "reduced_by_stage": True,
        "fused_casts": True,
        "newest_attention": True,
    },
    ends_count=True,
    interleaved_blocks=2,
    memory=replace(MEGATRON.memory, distributed_optimizer=True),
)
_NEMO = replace(
    _MEGATRON_CORE,
    fields=_MEGATRON_CORE.fields | {"reduce_bytes": 2.0, "dispatch": "random"},
    memory=replace(_MEGATRON_CORE.memory, reduced_bytes=2),
)
"""NeMo and Megatron-Bridge, whose recipes reduce gradients in 16 bits."""
HALVES = Behaviour(loss="whole", reduces_once=True, state_bytes=2, reduced_bytes=2)
"""States and reduced gradients in 16 bits, and one reduction per step. By their peaks of memory,
tensor ranks gather the logits, too."""
_DEEPSPEED = Software(
    {
        "early_stop": False,
        "fused_attention": False,
        "fused_softmax": True,
        "reduce_bytes": 2.0,
        "prefetch": 0,
        "max_message": DEEPSPEED_MESSAGE,
    },
    unstated="block",
)
SOFTWARE = {
    "torchtitan": Software(
        {"sequence_parallel": True},
        unstated="alternate",
        local_batch=True,
        memory=Behaviour(loss="torch", alternates=True),
    ),
    "fms-fsdp": Software({"reduce_bytes": 2.0}, selective="block"),
    "llm-foundry": Software(selective="block", memory=Behaviour(fused=True, loss="fused")),
    "vtrain": MEGATRON,
    "korthikanti": MEGATRON,
    "automodel": Software(
        {"compiled": True, "newest_attention": True, "dispatch": "adjacent"},
        memory=HALVES,
    ),
    "megatron-bridge": _NEMO,
    "nemo": _NEMO,
    "megatron": _MEGATRON_CORE,
    "kempnerforge": Software({"sequence_parallel": True, "optimizer_bytes": 16.0}, memory=HALVES),
    "nanotron": Software({"sequence_parallel": True}, selective="attention", shards=False),
    "deepspeed": _DEEPSPEED,
    "zero": _DEEPSPEED,
    "": Software(),
}
"""By the name in ``source``; the last one is PyTorch's FSDP."""


def find_software(source: str) -> Software:
    """Return the library that is named in ``source``."""
    return next(each for name, each in SOFTWARE.items() if name in source.lower())


def read_row(values: Values) -> RunValues | str:
    """Return workload, cluster and seconds per step of a row, or the reason to skip it.

    The seconds are NaN if the row has no value.
    """
    if values["metric"].startswith("peak"):
        return "its metric is memory, not time" if _shape(values) else NO_SHAPE
    return _read_metric(values, _METRICS)


def read_peak(values: Values) -> RunValues | str:
    """Return workload, cluster and peak bytes of a row, or the reason to skip it."""
    return _read_metric(values, _PEAKS)


def _read_metric(values: Values, metrics: Mapping[str, Metric]) -> RunValues | str:
    if "ZeRO++" in values["note"]:
        return "ZeRO++ reduces in 4 bits and keeps a second copy per node, which is not modelled"
    convert = metrics.get(values["metric"].partition(" (")[0])
    if convert is None:
        return f"its metric is {values['metric']!r}"
    shape = _shape(values)
    if shape is None:
        return NO_SHAPE
    work, cluster = _workload(values, shape), cluster_of(values)
    value = float(values["value"] or "nan")
    if value <= 0:
        raise ValueError(f"value {value:g} is not above 0")
    return work, cluster, convert(work, cluster, value, values)


def cluster_of(values: Values) -> Cluster:
    gpus, per_node = int(values["gpus"]), number(values, "gpus_per_node", 8)
    gbps = float(values["net_gbps_per_node"] or USUAL_GBPS.get(values["gpu"], 3200))
    gpu = {"H200": "H200-141GB", "B200": "B200-180GB"}.get(values["gpu"], values["gpu"])
    return published_cluster(gpu, gpus, per_node, gbps)


def number(values: Values, key: str, default: int = 1) -> int:
    return int(values[key]) if values[key] else default


def _sequence(values: Values) -> int:
    return number(values, "seq", 1024)  # the ZeRO++ post counts in units of 1K tokens


def _shape(values: Values) -> ModelShape | None:
    name, sequence = values["model"].replace("Llama-3 ", "Llama-3.1 "), _sequence(values)
    if name in LLAMA:
        return llama(name)
    if name in MIXTURES:
        return MIXTURES[name]
    size = name.removeprefix("MPT ").lower()
    if name.startswith("MPT ") and size in MPT:
        return mpt(size, sequence)
    vocabulary = re.search(r"vocab (\d+)", values["source"])
    words = int(vocabulary[1]) if vocabulary else MEGATRON_VOCABULARY
    if values["layers"] and values["hidden"] and values["heads"]:
        layers, width, heads = (int(values[key]) for key in ("layers", "hidden", "heads"))
        return gpt(layers, width, heads, words, sequence)
    return gpt(*GPT[name], words, sequence) if name in GPT else None


def _workload(values: Values, shape: ModelShape) -> Workload:
    software = find_software(values["source"])
    note, precision = values["note"], values["precision"].lower()
    mesh = _mesh(values, software)
    micro_batch, micro_batches = _micro_batches(values, mesh, software)
    virtual = _virtual_stages(values, shape, mesh, software)
    recompute = _recompute(values, software)
    stays_gathered = mesh.pipeline > 1 and software.shards
    fields: dict[str, Any] = software.fields | {
        "fp8": any(word in f"{precision} {note}" for word in ("fp8", "float8")),
        "precision": "fp16" if "fp16" in precision else "bf16",
        "gather_bytes": 1.0 if "fp8 all-gather" in precision else 2.0,
        "recompute": recompute,
        "shares_states": software.shards,
        **interleaved(virtual),
        "reshard_after_forward": not stays_gathered,
        "overlapped_reduce": not stays_gathered,
    }
    if "fms-fsdp" in values["source"] and values["model"] in FMS_RECOMPUTED:
        share = FMS_RECOMPUTED[values["model"]]
        fields |= {"recompute": "block" if share else "none", "recomputed_share": share or 1.0}
    if "compile" in note and "compile=no" not in note or "(torch.compile)" in values["source"]:
        fields["compiled"] = "eager" not in note
    if software.memory.reduces_once and mesh.pipeline == 1:
        fields |= {"reduced_once_blocks": shape.layers, "reduced_once_root": True}
    if software.memory.distributed_optimizer:
        fields["update_replicas"] = mesh.data_ranks * mesh.context
    if software.ends_count:
        fields["stage_blocks"] = _with_ends(shape.layers, mesh.pipeline * virtual)
    if re.search("async ?tp", note, re.IGNORECASE):
        fields["async_tensor_parallel"] = True
    return Workload(shape, _sequence(values), micro_batch, micro_batches, mesh, **fields)


def _with_ends(layers: int, stages: int) -> tuple[int, ...]:
    """Blocks of every stage if embedding and head count as one block each, or () if not even."""
    each, rest = divmod(layers + 2, stages)
    if stages < 2 or rest or each < 1:
        return ()
    return each - 1, *(each,) * (stages - 2), each - 1


def interleaved(virtual: int) -> dict[str, Any]:
    """Fields of a workload: 1F1B with ``virtual`` stages per rank."""
    return {"virtual_stages": virtual, "schedule": "interleaved_1f1b" if virtual > 1 else "1f1b"}


def _mesh(values: Values, software: Software) -> Mesh:
    tensor, pipeline, context = (number(values, key) for key in ("tp", "pp", "cp"))
    data, rest = divmod(int(values["gpus"]), tensor * pipeline * context)
    if rest:
        raise ValueError(f"{values['gpus']} GPUs in groups of {tensor * pipeline * context}")
    whole = data // number(values, "dp_replicate")
    hybrid = values["note"].startswith("HSDP")
    expert = min(int(values.get("ep") or 1), data)
    shard = number(values, "dp_shard", 8 if hybrid else whole) if software.shards else expert
    return Mesh(
        pipeline=pipeline,
        shard=shard,
        replicate=data // shard,
        expert=expert,
        context=context,
        tensor=tensor,
        ranks_per_node=number(values, "gpus_per_node", 8),
    )


def _micro_batches(values: Values, mesh: Mesh, software: Software) -> tuple[int, int]:
    """Return sequences per micro-batch, and micro-batches.

    A row without a micro-batch has one of a single sequence in a pipeline, and otherwise one of the
    whole batch of a rank.
    """
    local = number(values, "global_batch_seqs", 0) // mesh.data_ranks
    if mesh.pipeline > 1 and software.local_batch:
        return number(values, "micro_batch") // mesh.pipeline, mesh.pipeline
    if thousands := re.search(r"(\d)K tokens per GPU", values["note"]):
        return int(thousands[1]), 1
    size = number(values, "micro_batch", 1 if mesh.pipeline > 1 else local or 1)
    return size, max(1, local // size)


def _virtual_stages(values: Values, shape: ModelShape, mesh: Mesh, software: Software) -> int:
    if stated := re.search(r"virtual stages (\d+)", values["note"]):
        return int(stated[1])
    if mesh.pipeline == 1:
        return 1
    if not software.interleaved_blocks:
        return 2 if "Interleaved" in values["note"] else 1
    blocks = shape.layers // mesh.pipeline
    return blocks if blocks % software.interleaved_blocks else blocks // software.interleaved_blocks


def _recompute(values: Values, software: Software) -> Recompute:
    stated = values["act_ckpt"].lower()
    if not stated:
        return software.unstated
    if stated in ("none", "no", "false"):
        return "none"
    return software.selective if stated.startswith("selective") else "block"


Metric = Callable[[Workload, Cluster, float, Values], float]
_METRICS: dict[str, Metric] = {
    "iteration s": lambda work, cluster, value, values: value,
    "tokens/s": lambda work, cluster, value, values: work.step_tokens / value,
    "tokens/s/GPU": lambda work, cluster, value, values: work.step_tokens / cluster.gpus / value,
    "samples/s": lambda work, cluster, value, values: work.step_tokens / work.sequence / value,
    "model TFLOPS/GPU": lambda work, cluster, value, values: _at_rate(
        work.model_flops, cluster, value
    ),
    "MFU %": lambda work, cluster, value, values: _at_rate(
        work.model_flops, cluster, value / 100 * cluster.gpu.peak(work.precision) / 1e12
    ),
    # 8 FLOPs per parameter and token: forward, recomputed, and backward
    "TFLOPS/GPU": lambda work, cluster, value, values: _at_rate(
        8e9 * float(values["params_b"]) * work.step_tokens, cluster, value
    ),
}
"""Seconds per step from a metric. The words in brackets after a metric do not count."""
_PEAKS: dict[str, Metric] = {
    "peak GiB": lambda work, cluster, value, values: value * 2**30,
    "peak GB": lambda work, cluster, value, values: value * 1e9,
}
"""Bytes from a metric of memory."""


def _at_rate(flops: float, cluster: Cluster, tflops: float) -> float:
    return flops / cluster.gpus / (tflops * 1e12)
