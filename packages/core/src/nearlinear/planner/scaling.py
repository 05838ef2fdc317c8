"""Predicted scaling efficiency over the number of GPUs, also beyond available clusters."""

import dataclasses
from dataclasses import dataclass

from ..config.train import TrainConfig
from ..errors import ConfigError
from ..text_table import format_table
from .cluster import Cluster
from .fitted_constants import constants_for
from .memory import vocabulary_of
from .result import PlanResult
from .step_time import step_time
from .workload import workload_from_config


@dataclass(frozen=True)
class ScalingPoint:
    """Predicted throughput at one number of GPUs."""

    gpus: int
    tokens_per_second_per_gpu: float
    efficiency: float
    """Rate per GPU, relative to the smallest number of GPUs."""


def scaling_curve(
    config: TrainConfig,
    cluster: Cluster,
    most: int = 16384,
    reference: PlanResult | None = None,
) -> list[ScalingPoint]:
    """Double the nodes of ``cluster`` up to ``most`` GPUs, with a constant batch per rank.

    The shard group stays that of ``cluster``: additional GPUs are additional replicas (MiCS).

    Args:
        config: The config to scale.
        cluster: The smallest cluster.
        most: Largest number of GPUs.
        reference: A plan whose vocabulary and constants also apply here.

    Raises ConfigError for a fixed global batch, and for a cluster larger than ``most``.
    """
    if cluster.world > most:
        raise ConfigError(
            f"the scaling curve ends at {most:,} GPUs, but {cluster.world:,} are given. Start with "
            "fewer."
        )
    if config.batch.sequences:
        raise ConfigError(
            "batch.sequences fixes the global batch, which must grow along a scaling curve. Set "
            "batch.accumulation instead."
        )
    degrees = config.parallel.degrees(cluster.world)
    parallel = dataclasses.replace(
        config.parallel, hybrid_shard_degree=degrees["shard"] * degrees["context"]
    )
    fixed = dataclasses.replace(config, parallel=parallel)
    constants = reference.constants if reference else constants_for(cluster.node)
    words = reference.work.shape.vocabulary if reference else vocabulary_of(config)
    points: list[ScalingPoint] = []
    nodes = cluster.nodes
    while nodes * cluster.node.gpus <= most:
        larger = cluster.resized(nodes)
        work = workload_from_config(fixed, larger.world, larger.node.gpus, words, larger.gpu.is_cpu)
        rate = work.step_tokens / step_time(work, larger, constants).seconds / larger.world
        first = points[0].tokens_per_second_per_gpu if points else rate
        points.append(ScalingPoint(larger.world, rate, rate / first))
        nodes *= 2
    return points


def format_scaling(points: list[ScalingPoint]) -> str:
    """Format a scaling curve as a table."""
    rows = [("GPUs (simulated)", "tokens/s per GPU", "efficiency")]
    rows += [
        (f"{p.gpus:,}", f"{p.tokens_per_second_per_gpu:,.0f}", f"{p.efficiency:.1%}")
        for p in points
    ]
    return "\n".join(format_table(rows))
