"""How speed holds with the number of GPUs, by simulation: also beyond what anyone here can run."""

import dataclasses
from dataclasses import dataclass

from ..errors import ConfigError
from ..train.config import TrainConfig
from . import parameters, workload
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


def curve(config: TrainConfig, cluster: Cluster, most: int = 16384) -> list[Point]:
    """From ``cluster`` on to ``most`` GPUs, each twice the last; a rank's batch stays as it is.

    Where ``config`` fixes neither, the shard group stays that of ``cluster``: more GPUs are more
    replicas (MiCS). Raises ConfigError.
    """
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
    fitted = parameters.on(cluster.node, config.parallel.communication_backend)
    points: list[Point] = []
    nodes = cluster.nodes
    while nodes * cluster.node.gpus <= most:
        place = resized(cluster, nodes)
        work = workload.from_config(fixed, place.world, place.node.gpus, vocabulary_of(config))
        rate = work.step_tokens / step(work, place, fitted).seconds / place.world
        first = points[0].tokens_per_second_per_gpu if points else rate
        points.append(Point(place.world, rate, rate / first))
        nodes *= 2
    return points


def text(points: list[Point]) -> str:
    from .validate import table

    rows = [("GPUs (simulated)", "tokens/s per GPU", "of the first")]
    rows += [
        (f"{p.gpus:,}", f"{p.tokens_per_second_per_gpu:,.0f}", f"{p.efficiency:.1%}")
        for p in points
    ]
    return "\n".join(table(rows))
