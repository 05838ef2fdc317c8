"""Which layout is fastest: every one that divides the ranks, fits in memory and keeps the batch.

The global batch of the config stays: a larger micro-batch means fewer of them. Of the ways to keep
activations the fastest that fits is taken. Where a config does not fit, `remedy` says which change
makes it fit at the least loss of speed.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..columns import table
from ..errors import ConfigError
from ..train.config import TrainConfig
from . import parameters, workload
from .answer import GIB, Plan
from .hardware import Cluster
from .memory import estimate, vocabulary_of
from .step import step

MICRO_BATCH = 64  # sequences at most that are tried
TENSOR = (1, 2, 4, 8)
PIPELINE = (1, 2, 4, 8, 16)
CONTEXT = (1, 2, 4, 8)
PIPELINED_AT_LEAST = 2  # micro-batches per stage, or the bubble is a third and more
LONG = 16384  # tokens from which splitting a sequence is tried
KEPT = (("", False, 0), ("selective", False, 0), ("each", False, 0), ("each", True, 4),
        ("each", True, 2), ("each", True, 1))  # fmt: skip
"""Checkpointing, offloading and its horizon: the fastest first, the least memory last"""


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
            "parallel.expert_parallel_degree": parallel.expert_parallel_degree,
            "parallel.microbatches": parallel.microbatches,
            "batch.micro_batch_size": batch.micro_batch_size,
            "batch.accumulation": batch.accumulation,
            "batch.sequences": batch.sequences,
            "activations.checkpoint": self.config.activations.checkpoint,
            "activations.offload": self.config.activations.offload,
            "parallel.activation_loading_horizon": parallel.activation_loading_horizon,
        }


@dataclass(frozen=True)
class Degrees:
    """How ranks are cut."""

    sharing: int
    tensor: int
    context: int
    pipeline: int
    expert: int


def search(
    config: TrainConfig, cluster: Cluster, most: int = 10, like: Plan | None = None
) -> list[Layout]:
    """The ``most`` fastest layouts that fit, fastest first. ``like``: see `tried`.

    Times are known sooner than memory, so the fastest are asked for their memory until enough of
    them fit. Raises ConfigError if none does.
    """
    has = cluster.gpu.memory_gib * GIB
    fitting: dict[tuple[Degrees, int], Layout] = {}
    too_large: dict[tuple[Degrees, tuple], int] = {}  # sequences from which it does not fit
    least = math.inf
    for candidate, seconds in _by_time(config, cluster, like):
        batch, ways = (candidate.degrees, candidate.size), (candidate.degrees, candidate.kept)
        if batch in fitting or candidate.size >= too_large.get(ways, math.inf):
            continue
        memory = _memory(candidate.config, cluster, like)
        if memory <= has:
            fitting[batch] = Layout(candidate.config, seconds, memory)
        else:
            too_large[ways] = candidate.size
            least = min(least, memory)
        if len(fitting) == most:
            break
    if not fitting:
        asked = f"; the smallest needs {least / GIB:.1f} GiB per GPU" if least < math.inf else ""
        raise ConfigError(
            f"no layout of this model and batch fits in the {cluster.gpu.memory_gib:.1f} GiB of a "
            f"{cluster.gpu.name}{asked}: take more nodes, or a smaller batch"
        )
    return sorted(fitting.values(), key=lambda each: (each.seconds, each.memory))


@dataclass(frozen=True)
class _Candidate:
    degrees: Degrees
    size: int
    """sequences of a micro-batch"""
    kept: tuple
    """one of `KEPT`"""
    config: TrainConfig


def _by_time(config, cluster: Cluster, like) -> list[tuple[_Candidate, float]]:
    """Everything that the trainer would run, the fastest first; seconds of a step."""
    found = []
    sequences = batch_of(config, cluster)
    for degrees in layouts(config, cluster):
        for size, passes in _batches(degrees, sequences, cluster):
            for kept in KEPT:
                candidate = changed(config, degrees, size, passes, *kept)
                try:
                    seconds = _seconds(_work(candidate, cluster, like), cluster, like)
                except ConfigError:
                    continue
                found.append((_Candidate(degrees, size, kept, candidate), seconds))
    return sorted(found, key=lambda each: each[1])


def _work(config: TrainConfig, cluster: Cluster, like: Plan | None) -> workload.Workload:
    """Raises ConfigError for what the trainer refuses."""
    ids = _vocabulary(config, like)
    where = cluster.world, cluster.node.gpus
    return workload.from_config(config, *where, ids, cluster.gpu.is_cpu)


def _seconds(work: workload.Workload, cluster: Cluster, like: Plan | None) -> float:
    """Of a step."""
    fitted = like.fitted if like else parameters.on(cluster.node)
    return step(work, cluster, fitted).seconds


def _memory(config: TrainConfig, cluster: Cluster, like: Plan | None) -> float:
    return estimate(config, cluster.world, vocabulary=_vocabulary(config, like)).total


def _vocabulary(config: TrainConfig, like: Plan | None) -> int:
    return like.work.shape.vocabulary if like else vocabulary_of(config)


def tried(
    config: TrainConfig, cluster: Cluster, most: float = math.inf, like: Plan | None = None
) -> Layout:
    """``config`` on ``cluster``: its memory, and its time unless that is above ``most``.

    ``like``: a plan whose vocabulary and parameters of the time model hold here, too. Raises
    ConfigError for what the trainer refuses.
    """
    work = _work(config, cluster, like)
    memory = _memory(config, cluster, like)
    seconds = _seconds(work, cluster, like) if memory <= most else math.nan
    return Layout(config, seconds, memory)


def layouts(config: TrainConfig, cluster: Cluster) -> Iterator[Degrees]:
    """The ways to cut the ranks of ``cluster``."""
    found = workload.shape.of_model(config.model)
    contexts = CONTEXT if config.sequence_length >= LONG else (1,)
    experts = [d for d in range(1, found.experts + 1) if found.experts % d == 0]
    for tensor in TENSOR:
        for pipeline in PIPELINE:
            if tensor > cluster.node.gpus or cluster.world % (tensor * pipeline):
                continue
            data = cluster.world // (tensor * pipeline)
            for context in contexts:
                for sharing in _degrees(data, context):
                    for expert in experts:
                        if sharing % expert == 0:
                            yield Degrees(sharing, tensor, context, pipeline, expert)


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


def _batches(degrees: Degrees, sequences: int, cluster: Cluster) -> Iterator[tuple[int, int]]:
    """Sequences of a micro-batch and how many of them a data rank has, smaller ones first."""
    readers = cluster.world // (degrees.tensor * degrees.pipeline * degrees.context)
    for size in micro_batches(sequences, readers):
        passes = sequences // (readers * size)
        if degrees.pipeline == 1 or passes >= PIPELINED_AT_LEAST * degrees.pipeline:
            yield size, passes


def micro_batches(sequences: int, readers: int) -> list[int]:
    """Sizes that divide what each of ``readers`` has of ``sequences``, the smallest first."""
    mine, rest = divmod(sequences, readers)
    return [] if rest else [n for n in range(1, min(mine, MICRO_BATCH) + 1) if mine % n == 0]


def changed(
    config, degrees: Degrees, size, passes, checkpoint, offload, horizon: int = 0
) -> TrainConfig:
    """``config`` with those degrees, ``passes`` micro-batches of ``size`` sequences, and so on.

    ``horizon`` 0 leaves it as it is.
    """
    staged = degrees.pipeline > 1
    parallel = dataclasses.replace(
        config.parallel,
        hybrid_shard_degree=degrees.sharing,
        tensor_parallel_degree=degrees.tensor,
        context_parallel_degree=degrees.context,
        pipeline_parallel_degree=degrees.pipeline,
        expert_parallel_degree=degrees.expert,
        microbatches=passes if staged else 1,
        activation_loading_horizon=horizon or config.parallel.activation_loading_horizon,
    )
    batch = dataclasses.replace(
        config.batch,
        micro_batch_size=size * passes if staged else size,
        accumulation=1 if staged else passes,
        sequences=0,
    )
    kept = dataclasses.replace(config.activations, checkpoint=checkpoint, offload=offload)
    return dataclasses.replace(config, parallel=parallel, batch=batch, activations=kept)


def text(found: list[Layout], cluster: Cluster) -> str:
    """The layouts as a table."""
    names = ("shard", "tensor", "context", "pipeline", "expert", "micro-batch", "passes",
             "checkpoint", "offload")  # fmt: skip
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
                str(parallel.expert_parallel_degree),
                str(batch.micro_batch_size // (passes if staged else 1)),
                str(passes),
                each.config.activations.checkpoint or "none",
                f"horizon {parallel.activation_loading_horizon}"
                if each.config.activations.offload
                else "no",
                f"{each.memory / GIB:.1f}",
            )
        )
    head = f"fastest layouts of the same batch that fit on {cluster.nodes} x {cluster.node.name}:"
    return "\n".join([head, *table(rows)])
