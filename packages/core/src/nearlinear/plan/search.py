"""Which layout is fastest: every one that divides the ranks, fits in memory and keeps the batch.

The global batch of the config stays: a larger micro-batch means fewer of them. Where a config does
not fit, the same list of changes tells which one makes it fit at the least loss of speed.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import ConfigError
from ..train.config import TrainConfig
from . import parameters, room, workload
from .answer import GIB
from .hardware import Cluster
from .memory import vocabulary_of
from .passes import Passes
from .step import step

MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
TENSOR = (1, 2, 4, 8)
PIPELINE = (1, 2, 4, 8, 16)
CONTEXT = (1, 2, 4, 8)
PIPELINED_AT_LEAST = 2  # micro-batches per stage, or the bubble is a third and more
LONG = 16384  # tokens from which splitting a sequence is tried


@dataclass(frozen=True)
class Layout:
    """One that was tried."""

    config: TrainConfig
    seconds: float
    """of a step"""
    memory: float
    """bytes per GPU"""

    @property
    def changes(self) -> dict[str, object]:
        """What it sets."""
        parallel, batch = self.config.parallel, self.config.batch
        return {
            "parallel.hybrid_shard_degree": parallel.hybrid_shard_degree,
            "parallel.tensor_parallel_degree": parallel.tensor_parallel_degree,
            "parallel.context_parallel_degree": parallel.context_parallel_degree,
            "parallel.pipeline_parallel_degree": parallel.pipeline_parallel_degree,
            "parallel.microbatches": parallel.microbatches,
            "batch.micro_batch_size": batch.micro_batch_size,
            "batch.accumulation": batch.accumulation,
            "activations.checkpoint": self.config.activations.checkpoint,
            "activations.offload": self.config.activations.offload,
        }


def search(config: TrainConfig, cluster: Cluster, most: int = 10) -> list[Layout]:
    """The ``most`` fastest layouts that fit, fastest first. Raises ConfigError if none does."""
    fitting: list[Layout] = []
    least: Layout | None = None
    has = cluster.gpu.memory_gib * GIB
    for candidate in candidates(config, cluster):
        found = tried(candidate, cluster, has)
        if found.memory <= has:
            fitting.append(found)
        elif least is None or found.memory < least.memory:
            least = found
    if not fitting:
        asked = f"; the smallest needs {least.memory / GIB:.1f} GiB per GPU" if least else ""
        raise ConfigError(
            f"no layout of this model and batch fits in the {cluster.gpu.memory_gib:.0f} GiB of a "
            f"{cluster.gpu.name}{asked}: take more nodes, or a smaller batch"
        )
    return sorted(fitting, key=lambda each: (each.seconds, each.memory))[:most]


def tried(config: TrainConfig, cluster: Cluster, most: float = math.inf) -> Layout:
    """``config`` on ``cluster``: its memory, and its time unless that is above ``most``."""
    work = workload.from_config(config, cluster.world, cluster.node.gpus, vocabulary_of(config))
    fitted = parameters.on(cluster.node, config.parallel.communication_backend)
    parts = Passes(work, cluster, fitted)
    memory = room.needed(config, work, cluster, parts)
    seconds = step(work, cluster, fitted).seconds if memory <= most else math.nan
    return Layout(config, seconds, memory)


def candidates(config: TrainConfig, cluster: Cluster) -> Iterator[TrainConfig]:
    """Configs of the same model and the same number of sequences per step."""
    sequences = batch_of(config, cluster)
    layers = workload.shape.of_model(config.model).layers
    contexts = CONTEXT if config.sequence_length >= LONG else (1,)
    for tensor in TENSOR:
        for pipeline in PIPELINE:
            if cluster.world % (tensor * pipeline) or layers % pipeline:
                continue
            for context in contexts:
                data = cluster.world // (tensor * pipeline)
                if data % context or tensor > cluster.node.gpus:
                    continue
                for sharing in _degrees(data, context):
                    layout = (sharing, tensor, context, pipeline)
                    yield from _batches(config, layout, sequences, data // context)


def batch_of(config: TrainConfig, cluster: Cluster) -> int:
    """Sequences per step over all ranks."""
    asked = config.batch
    if asked.sequences:
        return asked.sequences
    degrees = config.parallel.degrees(cluster.world)
    readers = degrees["replicate"] * degrees["shard"]
    return asked.micro_batch_size * asked.accumulation * readers


def _degrees(data: int, context: int) -> list[int]:
    """Shard degrees to try: powers of two, and all."""
    found = {2**power for power in range(data.bit_length()) if data % 2**power == 0} | {data}
    return sorted(degree for degree in found if degree % context == 0)


def _batches(config, layout, sequences: int, readers: int) -> Iterator[TrainConfig]:
    pipeline = layout[3]
    for size in MICRO_BATCHES:
        if sequences % (readers * size):
            continue
        passes = sequences // (readers * size)
        if pipeline > 1 and passes < PIPELINED_AT_LEAST * pipeline:
            continue
        for checkpoint, offload in (("", False), ("each", False), ("each", True)):
            yield changed(config, layout, size, passes, checkpoint, offload)


def changed(config, layout, size, passes, checkpoint, offload) -> TrainConfig:
    """``config`` with that layout, ``passes`` micro-batches of ``size`` sequences, and so on."""
    sharing, tensor, context, pipeline = layout
    staged = pipeline > 1
    parallel = dataclasses.replace(
        config.parallel,
        hybrid_shard_degree=sharing,
        tensor_parallel_degree=tensor,
        context_parallel_degree=context,
        pipeline_parallel_degree=pipeline,
        microbatches=passes if staged else 1,
    )
    batch = dataclasses.replace(
        config.batch,
        micro_batch_size=size * passes if staged else size,
        accumulation=1 if staged else passes,
        sequences=0,
    )
    kept = dataclasses.replace(config.activations, checkpoint=checkpoint, offload=offload)
    return dataclasses.replace(config, parallel=parallel, batch=batch, activations=kept)


def cheapest_fit(config: TrainConfig, cluster: Cluster) -> tuple[str, Layout] | None:
    """The one change that makes ``config`` fit with the shortest step: in words, and its layout."""
    found = []
    for words, candidate in _single_changes(config, cluster):
        try:
            layout = tried(candidate, cluster)
        except ConfigError:
            continue
        if layout.memory <= cluster.gpu.memory_gib * GIB:
            found.append((words, layout))
    return min(found, key=lambda each: each[1].seconds, default=None)


def _single_changes(config: TrainConfig, cluster: Cluster) -> Iterator[tuple[str, TrainConfig]]:
    replace, parallel, batch = dataclasses.replace, config.parallel, config.batch
    if not config.activations.checkpoint:
        kept = replace(config.activations, checkpoint="each")
        yield 'activations.checkpoint = "each"', replace(config, activations=kept)
    if not config.activations.offload:
        kept = replace(config.activations, offload=True)
        yield "activations.offload = true", replace(config, activations=kept)
    size = batch.micro_batch_size
    while size > 1 and size % 2 == 0 and not batch.sequences:
        size //= 2
        passes = batch.accumulation * batch.micro_batch_size // size
        smaller = replace(batch, micro_batch_size=size, accumulation=passes)
        words = f"batch.micro_batch_size = {size} with batch.accumulation = {passes}"
        yield words, replace(config, batch=smaller)
    data = cluster.world // (parallel.tensor_parallel_degree * parallel.pipeline_parallel_degree)
    sharing = parallel.hybrid_shard_degree or data
    while sharing < data:
        sharing = min(data, 2 * sharing)
        wider = replace(parallel, hybrid_shard_degree=sharing)
        yield f"parallel.hybrid_shard_degree = {sharing}", replace(config, parallel=wider)


def text(found: list[Layout], cluster: Cluster) -> str:
    """The layouts as a table."""
    from .validate import table

    names = ("shard", "tensor", "context", "pipeline", "micro-batch", "passes", "checkpoint",
             "offload")  # fmt: skip
    rows = [("seconds per step", *names, "GiB per GPU")]
    for each in found:
        parallel, batch = each.config.parallel, each.config.batch
        staged = parallel.pipeline_parallel_degree > 1
        passes = parallel.microbatches if staged else batch.accumulation
        rows.append(
            (
                f"{each.seconds:.2f}",
                str(parallel.hybrid_shard_degree),
                str(parallel.tensor_parallel_degree),
                str(parallel.context_parallel_degree),
                str(parallel.pipeline_parallel_degree),
                str(batch.micro_batch_size // (passes if staged else 1)),
                str(passes),
                each.config.activations.checkpoint or "none",
                "yes" if each.config.activations.offload else "no",
                f"{each.memory / GIB:.1f}",
            )
        )
    head = f"fastest layouts of the same batch that fit on {cluster.nodes} x {cluster.node.name}:"
    return "\n".join([head, *table(rows)])
