"""How speed holds with the number of GPUs, by simulation: also beyond what anyone here can run."""

import dataclasses
from dataclasses import dataclass

from ..columns import table
from ..errors import ConfigError
from ..train.config import TrainConfig
from . import parameters, workload
from .answer import Plan
from .hardware import Cluster, resized
from .memory import vocabulary_of
from .step import step


@dataclass(frozen=True)
class Point:
    """A number of GPUs."""

    gpus: int
    tokens_per_second_per_gpu: float
    efficiency: float
    """of the rate per GPU of the smallest number"""


def curve(
    config: TrainConfig, cluster: Cluster, most: int = 16384, like: Plan | None = None
) -> list[Point]:
    """From ``cluster`` on to ``most`` GPUs, each twice the last; a rank's batch stays as it is.

    The shard group stays that of ``cluster``: more GPUs are more replicas (MiCS). ``like``: a plan
    whose vocabulary and parameters of the time model hold here, too. Raises ConfigError.
    """
    if cluster.world > most:
        raise ConfigError(
            f"{cluster.world:,} GPUs to begin with: the curve goes on to {most:,}, start below"
        )
    if config.batch.sequences:
        raise ConfigError(
            "batch.sequences fixes the batch of all ranks, which a curve over their number lets "
            "grow: give batch.accumulation in its place"
        )
    sharing = config.parallel.degrees(cluster.world)
    kept = dataclasses.replace(
        config.parallel, hybrid_shard_degree=sharing["shard"] * sharing["context"]
    )
    fixed = dataclasses.replace(config, parallel=kept)
    fitted = like.fitted if like else parameters.on(cluster.node)
    ids = like.work.shape.vocabulary if like else vocabulary_of(config)
    points: list[Point] = []
    nodes = cluster.nodes
    while nodes * cluster.node.gpus <= most:
        place = resized(cluster, nodes)
        work = workload.from_config(fixed, place.world, place.node.gpus, ids, place.gpu.is_cpu)
        rate = work.step_tokens / step(work, place, fitted).seconds / place.world
        first = points[0].tokens_per_second_per_gpu if points else rate
        points.append(Point(place.world, rate, rate / first))
        nodes *= 2
    return points


def text(points: list[Point]) -> str:
    rows = [("GPUs (simulated)", "tokens/s per GPU", "of the first")]
    rows += [
        (f"{p.gpus:,}", f"{p.tokens_per_second_per_gpu:,.0f}", f"{p.efficiency:.1%}")
        for p in points
    ]
    return "\n".join(table(rows))
