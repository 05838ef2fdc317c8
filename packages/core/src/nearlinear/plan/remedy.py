"""What makes a config fit: one change of it, or two together, at the least loss of speed."""

import dataclasses
from collections.abc import Iterator

from ..errors import ConfigError
from ..train.config import TrainConfig
from .answer import GIB, Plan
from .hardware import Cluster
from .search import Layout, tried

Change = tuple[str, str, TrainConfig]
"""What kind of change, in words, and what comes of it."""


def remedy(plan: Plan) -> str:
    """The cheapest change that makes ``plan`` fit, in a sentence; or what is missing."""
    single = list(_changes(plan.config, plan.cluster))
    found, least = _cheapest(single, plan)
    if found is None:
        pairs = [
            (first, f"{one} with {other}", candidate)
            for first, one, changed in single
            for second, other, candidate in _changes(changed, plan.cluster)
            if first < second
        ]
        found, both = _cheapest(pairs, plan)
        least = min(least, both)
    if found is None:
        has = plan.cluster.gpu.memory_gib
        return (
            f"no change of one key or of two makes it fit: {least / GIB:.1f} GiB per GPU is the "
            f"least, {least / GIB - has:.1f} too many; take more nodes, GPUs with more memory, or "
            "tensor or pipeline ranks (--search tries them)"
        )
    words, layout = found
    return f"cheapest change that makes it fit: {words}; {layout.seconds:.3f} s per step"


def _cheapest(changes: list[Change], plan: Plan) -> tuple[tuple[str, Layout] | None, float]:
    """The change with the shortest step of those that fit; the least memory of all."""
    has = plan.cluster.gpu.memory_gib * GIB
    found, least = [], plan.memory
    for _, words, candidate in changes:
        try:
            layout = tried(candidate, plan.cluster, has, plan)
        except ConfigError:  # the trainer would refuse it
            continue
        least = min(least, layout.memory)
        if layout.memory <= has:
            found.append((words, layout))
    return min(found, key=lambda each: each[1].seconds, default=None), least


def _changes(config: TrainConfig, cluster: Cluster) -> Iterator[Change]:
    replace, parallel, batch = dataclasses.replace, config.parallel, config.batch
    now = config.activations.checkpoint
    for way in {"": ("selective", "each"), "selective": ("each",)}.get(now, ()):
        kept = replace(config.activations, checkpoint=way)
        words = f'activations.checkpoint = "{way}"'
        yield "checkpoint", words, replace(config, activations=kept)
    if not config.activations.offload:
        kept = replace(config.activations, offload=True)
        yield "offload", "activations.offload = true", replace(config, activations=kept)
    size = batch.micro_batch_size
    while size > 1 and size % 2 == 0 and not batch.sequences:
        size //= 2
        passes = batch.accumulation * batch.micro_batch_size // size
        smaller = replace(batch, micro_batch_size=size, accumulation=passes)
        words = f"batch.micro_batch_size = {size} with batch.accumulation = {passes}"
        yield "batch", words, replace(config, batch=smaller)
    data = cluster.world // (parallel.tensor_parallel_degree * parallel.pipeline_parallel_degree)
    sharing = parallel.hybrid_shard_degree or data
    while sharing < data:
        sharing = min(data, 2 * sharing)
        wider = replace(parallel, hybrid_shard_degree=sharing)
        words = f"parallel.hybrid_shard_degree = {sharing}"
        yield "sharding", words, replace(config, parallel=wider)
    if not parallel.offload_optimizer:
        moved = replace(parallel, offload_optimizer=True)
        yield "optimizer", "parallel.offload_optimizer = true", replace(config, parallel=moved)
