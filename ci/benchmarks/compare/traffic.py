"""The minimum number of bytes a node must send per optimizer step, given a system's algorithm.

The minimum follows from the model and the cluster: parameters of each unit in float32, gathers and
reductions per step, and the least traffic between nodes if every node sends once for all its ranks.
Overheads (headers, acknowledgements, losses, barriers) are not included.
"""

from __future__ import annotations

from dataclasses import dataclass

from .config import CompareConfig

BYTES_PER_PARAMETER = 4


@dataclass(frozen=True)
class Traffic:
    """Collectives of a step of ``config.accumulation`` micro-batches."""

    shard: int
    """Ranks that share a copy of the states."""
    gathers: tuple[int, ...]
    """All-gathers of each unit per step: the root, then the blocks."""
    reductions: int
    """Reduce-scatters of every unit per step."""
    second_hops: int
    """All-reduces between replicas, of every unit per step."""


def unit_sizes(config: CompareConfig) -> tuple[int, ...]:
    """Return the parameters of the root unit (embeddings, last norm), then of each block."""
    width = config.width
    if config.model == "llama":
        block = 4 * width**2 + 3 * width * config.inner + 2 * width
        return ((config.vocabulary + 1) * width, *([block] * config.layers))
    block = 12 * width**2 + 13 * width
    return ((config.vocabulary + config.sequence + 2) * width, *([block] * config.layers))


def full_shard(config: CompareConfig) -> Traffic:
    """FSDP: blocks gathered in each pass, the root kept from forward to backward."""
    return _gather_each_pass(config, config.world, 0)


def zero3(config: CompareConfig) -> Traffic:
    """ZeRO-3 with thresholds of two blocks: every unit gathered in each pass."""
    a = config.accumulation
    return Traffic(config.world, (2 * a,) * (1 + config.layers), a, 0)


def zero3_default(config: CompareConfig) -> Traffic:
    """ZeRO-3 with its default thresholds, or with copies per node: one gather per micro-batch."""
    a = config.accumulation
    return Traffic(config.world, (a,) * (1 + config.layers), a, 0)


def hybrid(config: CompareConfig) -> Traffic:
    """FSDP within shard groups, replicas synchronized after every micro-batch."""
    return _gather_each_pass(config, config.shard, config.accumulation)


def two_hop(config: CompareConfig) -> Traffic:
    """MiCS on FSDP2: replicas synchronized once per step."""
    return _gather_each_pass(config, config.shard, 1)


def mics(config: CompareConfig) -> Traffic:
    """DeepSpeed's MiCS: ZeRO-3's gathers within shard groups, replicas synchronized once."""
    return Traffic(config.shard, zero3(config).gathers, config.accumulation, 1)


def least_memory(config: CompareConfig) -> Traffic:
    """nearlinear with the least memory: root and first block stay between micro-batches."""
    a = config.accumulation
    return Traffic(config.shard, (1, 1 + a, *([2 * a] * (config.layers - 1))), a, 1)


def least_memory_full(config: CompareConfig) -> Traffic:
    """`least_memory` with one shard group of all ranks."""
    return Traffic(config.world, least_memory(config).gathers, config.accumulation, 0)


def gather_once(config: CompareConfig) -> Traffic:
    """MiCS with kept parameters: every unit gathered once per step, reduced per micro-batch."""
    return Traffic(config.shard, (1,) * (1 + config.layers), config.accumulation, 1)


def all_once(config: CompareConfig) -> Traffic:
    """nearlinear by default: every unit gathered and reduced once per step."""
    return Traffic(config.shard, (1,) * (1 + config.layers), 1, 1)


def all_once_full(config: CompareConfig) -> Traffic:
    """`all_once` with one shard group of all ranks, or ZeRO-1."""
    return Traffic(config.world, (1,) * (1 + config.layers), 1, 0)


def zero2(config: CompareConfig) -> Traffic:
    """ZeRO-2: gradients reduced to their owners per micro-batch, parameters gathered once."""
    return Traffic(config.world, (1,) * (1 + config.layers), config.accumulation, 0)


def replicated(config: CompareConfig) -> Traffic:
    """DDP: one all-reduce of the gradients per step."""
    return Traffic(1, (0,) * (1 + config.layers), 0, 1)


def _gather_each_pass(config: CompareConfig, shard: int, second_hops: int) -> Traffic:
    a = config.accumulation
    return Traffic(shard, (a, *([2 * a] * config.layers)), a, second_hops)


def minimum_bytes(config: CompareConfig, traffic: Traffic) -> float:
    """Return the bytes that each node must send per step."""
    sizes = unit_sizes(config)
    gathered = sum(n * size for n, size in zip(traffic.gathers, sizes, strict=True))
    reduced = traffic.reductions * sum(sizes)
    nodes_of_group = max(1, traffic.shard // config.ranks_per_node)
    groups_per_node = max(1, config.ranks_per_node // traffic.shard)
    # Every node of a group holds 1/nodes of a unit and sends it to each other node.
    fraction = (nodes_of_group - 1) / nodes_of_group
    first_hop = groups_per_node * (gathered + reduced) * fraction
    # Replicas on one node are reduced there; each node then sends its share of the parameters.
    replicas = config.nodes // nodes_of_group
    share = sum(sizes) / nodes_of_group
    second_hop = traffic.second_hops * 2 * (replicas - 1) / replicas * share
    return BYTES_PER_PARAMETER * (first_hop + second_hop)
