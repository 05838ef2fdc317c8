"""The least bytes a node must send per optimizer step, for what a contestant has chosen to do.

Counted from the model and the cluster alone: units and their parameters in float32, how often each
is gathered and reduced, and how little of that can do across nodes when every node sends for all
its ranks. Overheads (headers, acknowledgements, losses, barriers) are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from .plan import Plan

BYTES = 4  # of a parameter


@dataclass(frozen=True)
class Traffic:
    """What a contestant does in a step of ``plan.accumulation`` micro-batches."""

    shard: int  # ranks that share a copy
    gathers: tuple[int, ...]  # of each unit per step: the root, then the blocks
    reductions: int  # of every unit per step
    second_hops: int  # of every unit per step


def units(plan: Plan) -> tuple[int, ...]:
    """Parameters of the root unit (embeddings and last norm), then of each block."""
    width = plan.width
    block = 12 * width**2 + 13 * width
    return ((plan.vocabulary + plan.sequence + 2) * width, *([block] * plan.layers))


def full_shard(plan: Plan) -> Traffic:
    """FSDP: blocks gathered for each pass, the root kept from forward to backward."""
    return _each_pass(plan, plan.world, 0)


def zero(plan: Plan) -> Traffic:
    """ZeRO-3 with thresholds of two blocks: everything gathered for each pass."""
    a = plan.accumulation
    return Traffic(plan.world, (2 * a,) * (1 + plan.layers), a, 0)


def zero_default(plan: Plan) -> Traffic:
    """ZeRO-3 with its own thresholds: everything kept from forward to backward."""
    a = plan.accumulation
    return Traffic(plan.world, (a,) * (1 + plan.layers), a, 0)


def hybrid(plan: Plan) -> Traffic:
    """The same within shard groups, replicas synchronised after every micro-batch."""
    return _each_pass(plan, plan.shard, plan.accumulation)


def two_hop(plan: Plan) -> Traffic:
    """MiCS on FSDP2: replicas synchronised once."""
    return _each_pass(plan, plan.shard, 1)


def mics(plan: Plan) -> Traffic:
    """DeepSpeed's MiCS: ZeRO-3's gathers within shard groups, replicas synchronised once."""
    return Traffic(plan.shard, zero(plan).gathers, plan.accumulation, 1)


def lean(plan: Plan) -> Traffic:
    """Ours with as little gathered as possible: what is used next at a turn stays."""
    a, inner = plan.accumulation, plan.layers - 2
    return Traffic(plan.shard, (1, 1 + a, *([2 * a] * inner), a), a, 1)


def kept(plan: Plan) -> Traffic:
    """Ours by default: everything gathered once."""
    return Traffic(plan.shard, (1,) * (1 + plan.layers), plan.accumulation, 1)


def _each_pass(plan: Plan, shard: int, second_hops: int) -> Traffic:
    a = plan.accumulation
    return Traffic(shard, (a, *([2 * a] * plan.layers)), a, second_hops)


def least_bytes(plan: Plan, traffic: Traffic) -> float:
    """Bytes that each node must send per step."""
    sizes = units(plan)
    gathered = sum(n * size for n, size in zip(traffic.gathers, sizes, strict=True))
    reduced = traffic.reductions * sum(sizes)
    nodes_of_group = max(1, traffic.shard // plan.ranks_per_node)
    groups_here = max(1, plan.ranks_per_node // traffic.shard)
    # Every node of a group has 1/nodes of a unit, and sends that to each of the others.
    once = (nodes_of_group - 1) / nodes_of_group
    first = groups_here * (gathered + reduced) * once
    # Replicas on one node meet there; a node then speaks for its share of the parameters.
    replicas = plan.nodes // nodes_of_group
    share = sum(sizes) / nodes_of_group
    second = traffic.second_hops * 2 * (replicas - 1) / replicas * share
    return BYTES * (first + second)
