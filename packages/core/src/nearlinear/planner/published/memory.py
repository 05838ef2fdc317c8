"""Predict the memory of published runs by the memory model of nearlinear's own configs.

Libraries differ in their `Behaviour`. torchtitan publishes the memory that the allocator reserved
(``torch.cuda.max_memory_reserved``), which `MemoryEstimate.reserved` predicts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...config.train import load
from ..memory.estimate import estimate_rank
from ..memory.rank import RankModel
from ..memory.report import GIB, MemoryEstimate
from ..workload import Recompute
from . import columns
from .runs import PublishedRun

CHECKPOINTS: dict[Recompute, str] = {
    "none": "",
    "block": "each",
    "attention": "",
    "elementwise": "selective",
    "alternate": "selective",
}
"""Values of ``activations.checkpoint``. The scores that ``attention`` recomputes are never saved by
the fused attention of the memory model."""


def fits(run: PublishedRun) -> bool:
    """Return whether ``run`` is predicted to fit on its GPU."""
    return estimate_run(run).total <= run.cluster.gpu.memory_gib * GIB


def estimate_run(run: PublishedRun) -> MemoryEstimate:
    """Estimate the peak memory of a published run."""
    work, mesh = run.work, run.work.mesh
    behaviour = replace(columns.find_software(run.source).memory, stage_blocks=work.stage_blocks)
    if work.compiled:
        compiled_loss = "compiled loss" in run.row.values.get("note", "")
        behaviour = replace(
            behaviour, fused=True, loss="fused" if compiled_loss else behaviour.loss
        )
    parallel: dict[str, Any] = {
        "hybrid_shard_degree": mesh.sharing,
        "tensor_parallel_degree": mesh.tensor,
        "context_parallel_degree": mesh.context,
        "pipeline_parallel_degree": mesh.pipeline,
        "expert_parallel_degree": mesh.expert,
        "bf16": work.precision == "bf16",
        "fp16": work.precision == "fp16",
        "cp_comm_type": "all_gather" if work.context_all_gather else "p2p",
        "sdp_max_live_parameters": 0 if work.reshard_after_forward else 10**13,
        "gradient_reduction": "micro_batch",
    }
    batch = {"micro_batch_size": work.micro_batch, "accumulation": work.micro_batches}
    if mesh.pipeline > 1:
        parallel |= {
            "pipeline": work.schedule,
            "virtual_pipeline_degree": work.virtual_stages,
            "microbatches": work.micro_batches,
        }
        batch = {"micro_batch_size": work.micro_batch * work.micro_batches}
    config = load(
        {
            "model": {"preset": "gpt2-tiny", "context": work.sequence},  # the shape is the run's
            "data": {"sequence_length": work.sequence},
            "parallel": parallel,
            "batch": batch,
            "activations": {"checkpoint": CHECKPOINTS[work.recompute]},
            "optimizer": {"implementation": "fused"},
        }
    )
    family = "llama" if work.shape.gated else "gpt2"
    return estimate_rank(RankModel(config, mesh, work.shape, family, behaviour))
