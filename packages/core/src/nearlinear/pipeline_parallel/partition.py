"""Assignment of blocks to stages that minimizes the weight of the heaviest stage.

The weight of a block is its share of the model's memory times ``memory_weight``, plus its share of
the time times the rest. `estimate_costs` derives time from matrix multiplications (2 operations per
element and token; a token meets some of the experts) and memory from parameters. Attention's own
products are equal in all blocks and left out. `block_costs` measures both instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ..config.architecture import number_of_experts
from ..config.parallel import ParallelConfig
from ..errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from .stage import ModelSplit

SMP_MEMORY_WEIGHTS = {"memory": 0.8, "speed": 0.2}
"""SMP's ``memory_weight`` for each value of ``optimize``."""


@dataclass(frozen=True)
class PartitionCost:
    """Cost of a part of the model, in any units that are equal for all parts."""

    parameters: int
    time: float
    memory: float


@dataclass(frozen=True)
class ModelCosts:
    """Costs of every block, and of the modules before and after the blocks."""

    embedding: PartitionCost
    blocks: tuple[PartitionCost, ...]
    head: PartitionCost

    def of_stage(self, blocks: range) -> tuple[PartitionCost, ...]:
        """Return the costs of the stage with ``blocks``."""
        costs = [self.blocks[i] for i in blocks]
        if blocks.start == 0:
            costs.insert(0, self.embedding)
        if blocks.stop == len(self.blocks):
            costs.append(self.head)
        return tuple(costs)

    def totals(self) -> tuple[float, float]:
        """Return time and memory of the whole model; 1 in place of 0."""
        costs = [self.embedding, *self.blocks, self.head]
        time, memory = sum(cost.time for cost in costs), sum(cost.memory for cost in costs)
        return time or 1.0, memory or 1.0

    def weight(self, cost: PartitionCost, memory_weight: float) -> float:
        """Return the weight of ``cost``; the weights of all parts add up to 1."""
        time, memory = self.totals()
        return memory_weight * cost.memory / memory + (1 - memory_weight) * cost.time / time


def estimate_costs(model: nn.Module, split: ModelSplit) -> ModelCosts:
    """Estimate costs from the shapes of the parameters, which may be on the meta device."""
    config: Any = model.config
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    active_share = chosen / number_of_experts(config)

    def cost(modules: Iterable[nn.Module], is_lookup: bool = False) -> PartitionCost:
        parameters, time = {}, 0.0
        for module in modules:
            for name, parameter in module.named_parameters():
                parameters[parameter] = name
        for parameter, name in parameters.items():
            if parameter.dim() > 1 and not is_lookup:
                share = active_share if ".experts." in f".{name}." else 1.0
                time += 2 * parameter.numel() * share
        count = sum(parameter.numel() for parameter in parameters)
        return PartitionCost(count, time, float(count))

    return ModelCosts(
        cost(split.modules_before_blocks(model), is_lookup=True),
        tuple(cost([block]) for block in split.block_list(model)),
        cost(split.modules_after_blocks(model)),
    )


class _Candidate(NamedTuple):
    """A partition of the first blocks. The least one is best; squares favor even partitions."""

    heaviest: float
    """Weight of the heaviest stage."""
    squares: float
    """Sum of the squared weights of all stages."""
    ends: tuple[int, ...]
    """End of every stage."""


def partition_blocks(costs: ModelCosts, stages: int, memory_weight: float) -> list[range]:
    """Return the blocks of every stage, at least one each, with the lightest heaviest stage.

    Raises ConfigError if there are more stages than blocks.
    """
    blocks = len(costs.blocks)
    if stages > blocks:
        raise ConfigError(
            f"a pipeline of {stages} stages needs as many blocks, and the model has {blocks}. "
            "Lower pipeline_parallel_degree or virtual_pipeline_degree."
        )
    weights = [costs.weight(cost, memory_weight) for cost in costs.blocks]
    weights[0] += costs.weight(costs.embedding, memory_weight)
    weights[-1] += costs.weight(costs.head, memory_weight)
    cumulative = [0.0]
    for weight in weights:
        cumulative.append(cumulative[-1] + weight)
    # Dynamic programming. best[n] is the best partition of the first n blocks into the stages so
    # far: (weight of the heaviest stage, sum of squared weights, ends of the stages). The squares
    # break ties in favor of even partitions.
    none = _Candidate(math.inf, math.inf, ())
    best = [_Candidate(0.0, 0.0, ()), *[none] * blocks]
    for stage in range(stages):
        longer = [none] * (blocks + 1)
        for end in range(stage + 1, blocks - (stages - stage - 1) + 1):
            for begin in range(stage, end):
                heaviest, squares, ends = best[begin]
                weight = cumulative[end] - cumulative[begin]
                candidate = _Candidate(
                    round(max(heaviest, weight), 9), squares + weight**2, (*ends, end)
                )
                longer[end] = min(longer[end], candidate)
        best = longer
    ends = best[blocks][2]
    return [range(begin, end) for begin, end in zip((0, *ends), ends, strict=False)]


def explicit_partition(
    split: Sequence[int] | Mapping[int, int],
    blocks: int,
    stages: int,
    default_partition: int | None,
) -> list[range]:
    """Return the blocks of every stage as given by the user.

    Args:
        split: The first block of every stage but the first, or a dict from blocks to stages.
        blocks: Number of blocks of the model.
        stages: Number of stages of the pipeline.
        default_partition: Stage of the blocks that a dict does not name.

    Raises:
        ConfigError: A stage is empty, or its blocks are not contiguous and in order.
    """
    if not isinstance(split, Mapping):
        starts = [0, *split]
        ascending = all(0 <= a < b < blocks for a, b in zip(starts, starts[1:], strict=False))
        if len(starts) != stages or not ascending:
            raise ConfigError(
                f"nl.pipeline(split={list(split)}): a list names the first block of each of the "
                f"{stages - 1} later stages, in ascending order, within 1 .. {blocks - 1}"
            )
        split = {i: sum(i >= start for start in starts[1:]) for i in range(blocks)}
    assigned: list[int] = []
    for block in range(blocks):
        stage = split.get(block, default_partition)
        if stage is None:
            raise ConfigError(
                f"nl.pipeline(split=...) assigns no stage to block {block}. Add the block to "
                "split, or set default_partition to the stage of unlisted blocks."
            )
        assigned.append(stage)
    contiguous = assigned == sorted(assigned) and set(assigned) == set(range(stages))
    if not contiguous or set(split) - set(range(blocks)):
        raise ConfigError(
            f"nl.pipeline(split=...) assigns blocks 0 .. {blocks - 1} to stages {assigned}: every "
            f"stage of 0 .. {stages - 1} needs at least one block, and the stages of consecutive "
            "blocks must ascend. Correct split or default_partition."
        )
    starts = [assigned.index(stage) for stage in range(stages)]
    return [range(start, end) for start, end in zip(starts, [*starts[1:], blocks], strict=True)]


def memory_weight(config: ParallelConfig) -> float:
    """Return the weight of memory in a partition, in 0 .. 1."""
    weight = config.memory_weight
    return SMP_MEMORY_WEIGHTS[config.optimize] if weight is None else weight


def format_partition(costs: ModelCosts, partition: list[range], ranks: list[int]) -> str:
    """Return a table with one line per stage; ``ranks[stage]`` is its pipeline coordinate."""
    time, memory = costs.totals()
    lines = ["stage  rank  parameters  memory    time  blocks"]
    for stage, blocks in enumerate(partition):
        parts = costs.of_stage(blocks)
        held = f"{blocks.start}" if len(blocks) == 1 else f"{blocks.start} .. {blocks.stop - 1}"
        held = "embedding, " * (stage == 0) + held + ", norm, head" * (stage == len(partition) - 1)
        lines.append(
            f"{stage:>5}  {ranks[stage]:>4}  {_format_count(sum(c.parameters for c in parts)):>10}"
            f"  {sum(c.memory for c in parts) / memory:>6.1%}  "
            f"{sum(c.time for c in parts) / time:>6.1%}  {held}"
        )
    return "\n".join(lines)


def _format_count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)
