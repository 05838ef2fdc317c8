"""Bytes a GPU needs for a config: the closed form of `memory`, and a rougher one for what it lacks.

The rougher one is for pipelines and experts: states are parameters times bytes, activations
follow Korthikanti et al. 2022, section 4, for fused attention: 34 bytes per token and width of a
block that keeps everything.
"""

import math

from ..memory.states import state_bytes
from ..train.config import TrainConfig
from . import memory
from .compute import ACTIVATION
from .hardware import Cluster
from .passes import Passes
from .workload import Workload

KEPT = 17  # hidden states' worth that a GPT block keeps, in 16 bits; two inner widths more if gated
RESERVED = 1.5 * 2**30  # context, communicators and fragments


def needed(config: TrainConfig, work: Workload, cluster: Cluster, parts: Passes) -> float:
    """Bytes at the peak of a step, on the GPU that needs the most."""
    try:
        return memory.estimate(config, cluster.world, vocabulary=work.shape.vocabulary).total
    except memory.Unknown:
        return _roughly(config, work, parts)


def _roughly(config: TrainConfig, work: Workload, parts: Passes) -> float:
    mesh, shape = work.mesh, work.shape
    states = state_bytes(config.parallel, config.optimizer.kind, mesh.world, "cuda", work.passes)
    held = parts.layers * parts.block + parts.root / min(mesh.pipeline, 2)
    gathered = held if not work.resharded else parts.root + (1 + work.prefetch) * parts.block
    largest = max(parts.root, parts.block)
    gradients = largest * (work.gather_bytes + work.reduce_bytes)
    in_flight = mesh.pipeline if mesh.pipeline > 1 else 1
    words = shape.vocabulary / mesh.tensor
    logits = 12.0 * work.tokens * words
    return (
        states.on_rank(held, mesh.sharing)
        + gathered * work.gather_bytes
        + gradients
        + in_flight * _activations(work, parts)
        + logits
        + RESERVED
    )


def _activations(work: Workload, parts: Passes) -> float:
    """Of the blocks of one stage."""
    shape, split = work.shape, work.mesh.tensor
    hidden = work.tokens * shape.width * ACTIVATION / (split if work.sequence_parallel else 1)
    inside = (3 * shape.inner / shape.width - 8 if shape.gated else 0.0) + KEPT
    whole = hidden * (inside if work.sequence_parallel else 5 + (inside - 5) / split)
    kept = {"none": whole, "block": hidden, "elementwise": whole / 2}.get(work.recompute, whole)
    blocks = min(parts.layers, work.horizon + 1) if work.offload else parts.layers
    again = whole if work.recompute in ("block", "elementwise") else 0.0
    return math.ceil(blocks) * kept + again
