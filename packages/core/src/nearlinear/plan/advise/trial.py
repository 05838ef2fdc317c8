"""What the planner says of a config when one choice in it is another; the batch stays.

A choice is a value for one thing that the checklist asks about. Degrees of tensor and pipeline
ranks take ranks from the data, so that the others read more micro-batches: a step trains on the
same sequences whatever is chosen, and steps can be compared.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from ...errors import ConfigError
from ...train.config import TrainConfig
from .. import answer, search
from ..answer import GIB, Plan
from ..hardware import Cluster


@dataclass(frozen=True)
class Shape:
    """How a config lays a batch over ranks: what `search.changed` is told."""

    sharing: int
    tensor: int
    context: int
    pipeline: int
    micro_batch: int
    """sequences of one forward pass"""
    checkpoint: str
    offload: bool


def shape_of(config: TrainConfig, cluster: Cluster) -> Shape:
    parallel = config.parallel
    degrees = parallel.degrees(cluster.world)
    parts = parallel.microbatches if parallel.pipeline_parallel_degree > 1 else 1
    return Shape(
        degrees["shard"] * degrees["context"],
        degrees["tensor"],
        degrees["context"],
        degrees["pipeline"],
        config.batch.micro_batch_size // parts,
        config.activations.checkpoint,
        config.activations.offload,
    )


@dataclass(frozen=True)
class Trial:
    """Plans of one model, batch and cluster; what the command line said goes into each."""

    cluster: Cluster
    sequences: int
    """of a step, over all ranks"""
    tokens: float = 0.0
    vocabulary: int = 0
    straggler: float | None = None
    usd_per_hour: float | None = None

    @classmethod
    def of(cls, plan: Plan, **asked) -> "Trial":
        """Of the batch of ``plan``; ``asked``: what else was asked of it, as here."""
        sequences = search.batch_of(plan.config, plan.cluster)
        return cls(plan.cluster, sequences, vocabulary=plan.work.shape.vocabulary, **asked)

    def plan(self, config: TrainConfig, cluster: Cluster | None = None) -> Plan:
        """The planner's answer for ``config``. Raises ConfigError."""
        return answer.plan(
            config,
            cluster or self.cluster,
            tokens=self.tokens,
            vocabulary=self.vocabulary,
            straggler=self.straggler,
            usd_per_hour=None if cluster else self.usd_per_hour,
        )

    def changed(self, plan: Plan, **choice) -> Plan | None:
        """``plan`` with ``choice``, keys of `Shape`; None where that cannot be laid out."""
        shape = dataclasses.replace(shape_of(plan.config, self.cluster), **choice)
        config = self.laid_out(plan.config, shape)
        try:
            return self.plan(config) if config else None
        except ConfigError:
            return None

    def laid_out(self, config: TrainConfig, shape: Shape) -> TrainConfig | None:
        """``config`` as ``shape`` has it, of the same batch; None where it does not divide."""
        world, model = self.cluster.world, shape.tensor * shape.pipeline
        if world % model:
            return None
        data = world // model
        sharing = min(shape.sharing, data)
        readers = data // shape.context
        passes = self.sequences // (readers * shape.micro_batch) if readers else 0
        if not passes or passes * readers * shape.micro_batch != self.sequences:
            return None
        if data % sharing or sharing % shape.context:
            return None
        if shape.pipeline > 1 and passes < shape.pipeline:
            return None
        experts = config.parallel.expert_parallel_degree
        degrees = search.Degrees(sharing, shape.tensor, shape.context, shape.pipeline, experts)
        rest = shape.micro_batch, passes, shape.checkpoint, shape.offload
        found = search.changed(config, degrees, *rest)
        if config.batch.sequences and shape.pipeline == 1:  # said so, it stays said so
            batch = dataclasses.replace(
                found.batch, accumulation=1, sequences=config.batch.sequences
            )
            found = dataclasses.replace(found, batch=batch)
        return found

    def micro_batches(self, plan: Plan) -> Iterator[int]:
        """Sequences of one forward pass that divide the batch."""
        yield from search.micro_batches(self.sequences, plan.work.mesh.data_ranks)


def over(plan: Plan) -> float:
    """GiB that ``plan`` needs more than a GPU has; 0 where it fits."""
    return max(0.0, plan.memory / GIB - plan.cluster.gpu.memory_gib)


def faster(plan: Plan, than: Plan) -> float:
    """Of tokens per second, by how much of those of ``than``."""
    rate, before = (each.tokens_per_second_per_gpu for each in (plan, than))
    return rate / before - 1


def room(plan: Plan, than: Plan) -> float:
    """GiB per GPU that ``plan`` needs more."""
    return (plan.memory - than.memory) / GIB
