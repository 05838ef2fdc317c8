"""Resolve ``hybrid_shard_degree = "auto"``: the fewest ranks that must share the model states.

A shard group communicates the less the smaller it is. A model that fits one rank therefore trains
as in DDP, and another one in the smallest groups that hold it.
"""

from __future__ import annotations

import dataclasses
import logging

from ...config.train import TrainConfig
from ...errors import ConfigError
from .estimate import estimate
from .report import GIB

log = logging.getLogger("nearlinear")

HEADROOM = 0.1
"""Share of a rank's memory that stays free, for the error of the estimate."""


def with_fewest_sharing(
    config: TrainConfig,
    world: int,
    memory: float,
    *,
    ranks_per_node: int = 0,
    vocabulary: int = 0,
    host_memory: bool = False,
) -> TrainConfig:
    """Return ``config`` with a number in place of ``hybrid_shard_degree = "auto"``.

    Args:
        config: A config; one with a number is returned as it is.
        world: Number of ranks.
        memory: Bytes available per rank.
        ranks_per_node: Ranks of a node, 0 if unknown. Shard groups fill whole nodes, or divide one.
        vocabulary: Vocabulary size; 0: that of the data.
        host_memory: Whether ranks compute on CPUs, without a device's context and allocator.

    Raises:
        ConfigError: The model does not fit even if all data ranks share it.
    """
    parallel = config.parallel
    if parallel.hybrid_shard_degree != "auto":
        return config
    data = world // (parallel.pipeline_parallel_degree * parallel.tensor_parallel_degree)
    group = max(parallel.context_parallel_degree, parallel.expert_parallel_degree)
    needed: dict[int, float] = {}
    for degree in (each for each in range(1, data + 1) if data % each == 0):
        if degree % group or not _fits_nodes(degree * world // data, ranks_per_node, world):
            continue
        candidate = dataclasses.replace(
            config, parallel=dataclasses.replace(parallel, hybrid_shard_degree=degree)
        )
        found = estimate(candidate, world, vocabulary=vocabulary)
        needed[degree] = found.peak if host_memory else found.total
        if needed[degree] <= memory * (1 - HEADROOM):
            log.info("hybrid_shard_degree = auto: %s", _reason(needed, memory))
            return candidate
    if not needed:  # the mesh names the degree that does not divide
        dataclasses.replace(parallel, hybrid_shard_degree=0).degrees(world)
    raise ConfigError(
        f"hybrid_shard_degree = 'auto': the model does not fit; {_reason(needed, memory)}, of "
        f"which {HEADROOM:.0%} stay free. Start more ranks, or see `nearlinear plan --explain`"
    )


def _fits_nodes(ranks: int, ranks_per_node: int, world: int) -> bool:
    """Return whether groups of ``ranks`` neighbors fill whole nodes, or divide a node."""
    if ranks_per_node in (0, 1) or ranks == world:
        return True
    return ranks % ranks_per_node == 0 or ranks_per_node % ranks == 0


def _reason(needed: dict[int, float], memory: float) -> str:
    """Format the memory at every degree: "4 (1 needs 21.3, 2 11.9, 4 7.2 of 12.0 GiB)"."""
    first, *others = needed
    parts = [f"{first} needs {needed[first] / GIB:.2f}"]
    parts += [f"{degree} {needed[degree] / GIB:.2f}" for degree in others]
    return f"{[*needed][-1]} ({', '.join(parts)} of {memory / GIB:.2f} GiB per rank)"
