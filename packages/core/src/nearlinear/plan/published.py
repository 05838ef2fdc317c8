"""Published training runs, each as a workload on a cluster, with the time its step took.

The tables are in ``data/``: ``llm_foundry.csv`` (MosaicML's benchmarks of MPT), ``vtrain.csv``
(vTrain's measurements of Megatron-LM, arXiv:2312.12391) and ``framework_posts.csv`` (posts of AWS,
torchtitan, fms-fsdp, ZeRO++ and a paper; its column ``source`` names each). A row that is no step
of a known model on known machines is listed with the reason, and so is one that repeats another
row's run in another unit.
"""

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..mesh import Mesh
from . import published_posts
from .hardware import DATA, Cluster
from .published_models import MEGATRON_VOCABULARY, MEGATRON_WAYS, gpt, machines, mpt
from .workload import Workload


@dataclass(frozen=True)
class Row:
    """A line of a table."""

    file: str
    line: int
    """in the file, whose first line names the columns"""
    source: str
    values: dict


@dataclass(frozen=True)
class Run:
    """A row that can be modelled."""

    row: Row
    work: Workload
    cluster: Cluster
    seconds: float
    """of a step, as published"""

    @property
    def source(self) -> str:
        return self.row.source

    @property
    def title(self) -> str:
        v = self.row.values
        return v.get("model") or f"GPT {v['Parameters (billion)']}B"


@dataclass(frozen=True)
class Listed:
    """A row that cannot, and why."""

    row: Row
    reason: str


def runs() -> list[Run]:
    """The rows that are modelled."""
    return [each for each in everything() if isinstance(each, Run)]


def listed() -> list[Listed]:
    """The rows that are not."""
    return [each for each in everything() if isinstance(each, Listed)]


def everything() -> list[Run | Listed]:
    """Every row of every table, in order."""
    readers = {
        "llm_foundry.csv": (_foundry_source, _foundry),
        "vtrain.csv": (lambda values: "vTrain, Megatron-LM", _vtrain),
        "framework_posts.csv": (published_posts.source, published_posts.read),
    }
    return [each for file, (source, read) in readers.items() for each in _read(file, source, read)]


def held_out() -> list[Run]:
    """Rows that no parameter was fitted to: ``held_out.csv``, MPT on H100."""
    return [r for r in _read("held_out.csv", _foundry_source, _foundry) if isinstance(r, Run)]


def _read(file: str, source: Callable, read: Callable) -> Iterator[Run | Listed]:
    with open(DATA / file, encoding="utf-8", newline="") as lines:
        for line, values in enumerate(csv.DictReader(lines), start=2):
            row = Row(file, line, source(values), values)
            found = read(values)
            yield Listed(row, found) if isinstance(found, str) else Run(row, *found)


FOUNDRY_GPU = {"a100_40gb": "A100-40GB", "a100_80gb": "A100-80GB", "h100_80gb": "H100-80GB"}
FOUNDRY_GBPS = {"a100": 1600, "h100": 3200}


def _foundry_source(values: dict) -> str:
    return f"llm-foundry, {FOUNDRY_GPU[values['gpu']]}"


def _foundry(values: dict):
    """FSDP, Triton's flash attention; PURE reduces gradients in bfloat16, DEFAULT in float32."""
    sequence, gpus = int(values["seq_len"]), int(values["gpus"])
    work = Workload(
        shape=mpt(values["model"], sequence),
        sequence=sequence,
        micro_batch=int(values["micro_bs"]),
        passes=int(values["grad_accum"]),
        mesh=Mesh(shard=gpus, ranks_per_node=8),
        recompute="block" if values["act_ckpt"] == "True" else "none",
        reduce_bytes=2.0 if values["mp_mode"] == "PURE" else 4.0,
        fp8=values["precision"] == "amp_fp8",
    )
    cluster = machines(FOUNDRY_GPU[values["gpu"]], gpus, 8, FOUNDRY_GBPS[values["gpu"][:4]])
    return work, cluster, work.step_tokens / gpus / float(values["tokens_s_gpu"])


def _vtrain(values: dict):
    """Megatron-LM, every block recomputed, on A100s of 80 GB with four adapters of 200 Gbit/s."""
    sequence, gpus = int(values["sequence length"]), int(values["# GPUs"])
    data = int(values["data parallelism"])
    micro_batch, batch = int(values["micro batch"]), int(values["global batch"])
    mesh = Mesh(
        pipeline=int(values["pipeline parallelism"]),
        replicate=data,
        tensor=int(values["tensor parallelism"]),
        ranks_per_node=8,
    )
    if mesh.world != gpus:
        return f"its degrees make {mesh.world} ranks, not {gpus}"
    shape = gpt(
        int(values["# layers"]),
        int(values["hidden size"]),
        int(values["attention heads"]),
        MEGATRON_VOCABULARY,
        sequence,
    )
    work = Workload(
        shape=shape,
        sequence=sequence,
        micro_batch=micro_batch,
        passes=batch // (data * micro_batch),
        mesh=mesh,
        recompute="block",
        **MEGATRON_WAYS,
    )
    return work, machines("A100-80GB", gpus, 8, 800), float(values["iteration time (ms)"]) / 1e3
