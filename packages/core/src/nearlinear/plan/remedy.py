"""What makes a config fit: one change of it, or two together, at the least loss of speed."""

import dataclasses
import json
from collections.abc import Iterable, Iterator
from itertools import combinations

from ..errors import ConfigError
from ..train.config import TrainConfig
from .answer import GIB, Plan
from .hardware import Cluster
from .search import Layout, batch_of, micro_batches, tried

Change = dict[str, object]
"""Values by dotted key, as in ``{"activations.checkpoint": "each"}``"""


def remedy(plan: Plan) -> str:
    """The cheapest change that makes ``plan`` fit, in a sentence; or what is missing."""
    single = list(_changes(plan.config, plan.cluster))
    found, least = _cheapest((change for _, change in single), plan)
    if found is None:
        pairs = (one | other for (a, one), (b, other) in combinations(single, 2) if a != b)
        found, both = _cheapest(pairs, plan)
        least = min(least, both)
    if found is None:
        has = plan.cluster.gpu.memory_gib
        return (
            f"no change of one key or of two makes it fit: {least / GIB:.1f} GiB per GPU is the "
            f"least, {least / GIB - has:.1f} too many; take more nodes, GPUs with more memory, or "
            "tensor or pipeline ranks (--search tries them)"
        )
    change, layout = found
    words = " with ".join(f"{key} = {json.dumps(value)}" for key, value in change.items())
    return f"cheapest change that makes it fit: {words}; {layout.seconds:.3f} s per step"


def _cheapest(changes: Iterable[Change], plan: Plan) -> tuple[tuple[Change, Layout] | None, float]:
    """The change with the shortest step of those that fit; the least memory of all."""
    has = plan.cluster.gpu.memory_gib * GIB
    found, least = [], plan.memory
    for change in changes:
        try:
            layout = tried(_applied(plan.config, change), plan.cluster, has, plan)
        except ConfigError:  # the trainer would refuse it
            continue
        least = min(least, layout.memory)
        if layout.memory <= has:
            found.append((change, layout))
    return min(found, key=lambda each: each[1].seconds, default=None), least


def _applied(config: TrainConfig, change: Change) -> TrainConfig:
    """``config`` with ``change``. Raises ConfigError where its keys do not go together so."""
    tables: dict[str, dict] = {}
    for key, value in change.items():
        table, _, name = key.partition(".")
        tables.setdefault(table, {})[name] = value
    changed = {t: dataclasses.replace(getattr(config, t), **keys) for t, keys in tables.items()}
    return dataclasses.replace(config, **changed)


def _changes(config: TrainConfig, cluster: Cluster) -> Iterator[tuple[str, Change]]:
    """Changes that need less memory, each with its kind: two of one kind exclude each other.

    The trainer may refuse some of them.
    """
    parallel, now = config.parallel, config.activations.checkpoint
    for way in {"": ("selective", "each"), "selective": ("each",)}.get(now, ()):
        yield "checkpoint", {"activations.checkpoint": way}
    if not config.activations.offload:
        yield "offload", {"activations.offload": True}
    for change in _smaller_batches(config, cluster):
        yield "batch", change
    data = cluster.world // (parallel.tensor_parallel_degree * parallel.pipeline_parallel_degree)
    sharing = parallel.hybrid_shard_degree or data
    while sharing < data:
        sharing = min(data, 2 * sharing)
        yield "sharding", {"parallel.hybrid_shard_degree": sharing}
    if not parallel.offload_optimizer:
        yield "optimizer", {"parallel.offload_optimizer": True}


def _smaller_batches(config: TrainConfig, cluster: Cluster) -> Iterator[Change]:
    """The same sequences of a step in smaller micro-batches; of a pipeline in more of them, too."""
    batch, degrees = config.batch, config.parallel.degrees(cluster.world)
    parts = config.parallel.microbatches if degrees["pipeline"] > 1 else 1
    readers = degrees["replicate"] * degrees["shard"]
    mine = batch_of(config, cluster) // readers
    now = batch.micro_batch_size // parts
    for size in micro_batches(mine // parts, 1):
        if size < now:
            smaller = {"batch.micro_batch_size": size * parts}
            passes = {} if batch.sequences else {"batch.accumulation": mine // (size * parts)}
            yield smaller | passes
    for size in micro_batches(batch.micro_batch_size, 1) if parts > 1 else ():
        if size < now:
            yield {"parallel.microbatches": batch.micro_batch_size // size}
