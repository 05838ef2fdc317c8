"""Which block goes to which stage: so that the heaviest stage is as light as it can be.

A block weighs its share of the model's time and of its memory, ``memory_weight`` of the latter.
Estimates: time is the multiplications with its matrices (2 per element and token, experts as many
as a token meets; attention's own products, equal in all blocks, are left out), memory its
parameters. `measure` finds both on this machine instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...config import Config
from ...errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from .parts import Parts

WEIGHTS = {"memory": 0.8, "speed": 0.2}
"""SMP's weight of memory, by what a split optimises."""


@dataclass(frozen=True)
class Cost:
    """What a part of the model takes, in any unit that is the same for all parts."""

    parameters: int
    time: float
    memory: float


@dataclass(frozen=True)
class Costs:
    """Of every block, and of what comes before and after them."""

    first: Cost
    blocks: tuple[Cost, ...]
    last: Cost

    def of_stage(self, blocks: range) -> tuple[Cost, ...]:
        """What the stage with ``blocks`` consists of."""
        mine = [self.blocks[i] for i in blocks]
        if blocks.start == 0:
            mine.insert(0, self.first)
        if blocks.stop == len(self.blocks):
            mine.append(self.last)
        return tuple(mine)


def estimate(model: nn.Module, parts: Parts) -> Costs:
    """Costs from the parameters' shapes alone; they may be on the meta device."""
    experts = getattr(model.config, "num_local_experts", None) or 1
    met = (getattr(model.config, "num_experts_per_tok", None) or 1) / experts

    def cost(modules, looked_up: bool = False) -> Cost:
        parameters, time = {}, 0.0
        for module in modules:
            for name, parameter in module.named_parameters():
                parameters[parameter] = name
        for parameter, name in parameters.items():
            if parameter.dim() > 1 and not looked_up:
                time += 2 * parameter.numel() * (met if ".experts." in f".{name}." else 1.0)
        count = sum(parameter.numel() for parameter in parameters)
        return Cost(count, time, float(count))

    return Costs(
        cost(parts.before(model), looked_up=True),
        tuple(cost([block]) for block in parts.list_of(model)),
        cost(parts.after(model)),
    )


def split(costs: Costs, stages: int, memory_weight: float) -> list[range]:
    """The blocks of every stage, at least one each: the heaviest stage as light as can be."""
    blocks = len(costs.blocks)
    if stages > blocks:
        raise ConfigError(
            f"a pipeline of {stages} stages needs as many blocks, and the model has {blocks}: "
            "lower pipeline_parallel_degree or virtual_pipeline_degree"
        )
    weights = [_weight(cost, costs, memory_weight) for cost in costs.blocks]
    weights[0] += _weight(costs.first, costs, memory_weight)
    weights[-1] += _weight(costs.last, costs, memory_weight)
    ahead = [0.0]
    for weight in weights:
        ahead.append(ahead[-1] + weight)
    # best[n]: the first n blocks on the stages so far, as (heaviest, sum of squares, where to cut);
    # the squares decide among splits with the same heaviest stage: even ones win
    best = [(0.0, 0.0, ())] + [(math.inf, math.inf, ())] * blocks
    for stage in range(stages):
        longer = [(math.inf, math.inf, ())] * (blocks + 1)
        for end in range(stage + 1, blocks - (stages - stage - 1) + 1):
            for begin in range(stage, end):
                heaviest, squares, cuts = best[begin]
                mine = ahead[end] - ahead[begin]
                found = (round(max(heaviest, mine), 9), squares + mine**2, (*cuts, end))
                longer[end] = min(longer[end], found)
        best = longer
    ends = best[blocks][2]
    return [range(begin, end) for begin, end in zip((0, *ends), ends, strict=False)]


def by_hand(asked: Sequence[int] | Mapping[int, int], blocks: int, stages: int, default):
    """The blocks of every stage as the user wants them.

    ``asked``: the first block of every stage but the first, or a stage for each block; blocks that
    are not named go to stage ``default``. Raises ConfigError.
    """
    if not isinstance(asked, Mapping):
        starts = [0, *asked]
        rising = all(0 <= a < b < blocks for a, b in zip(starts, starts[1:], strict=False))
        if len(starts) != stages or not rising:
            raise ConfigError(
                f"nl.pipeline(split={list(asked)}): a list names the first block of each of the "
                f"{stages - 1} later stages, rising, in 1 .. {blocks - 1}"
            )
        asked = {i: sum(i >= start for start in starts[1:]) for i in range(blocks)}
    where = [asked.get(block, default) for block in range(blocks)]
    if None in where:
        raise ConfigError(
            f"nl.pipeline(split=...) says nothing of block {where.index(None)}: name it, or set "
            "default_partition to the stage of blocks that are not named"
        )
    found = [[block for block in range(blocks) if where[block] == s] for s in range(stages)]
    in_order = where == sorted(where) and set(where) == set(range(stages))
    if not in_order or set(asked) - set(range(blocks)):
        raise ConfigError(
            f"nl.pipeline(split=...) puts blocks 0 .. {blocks - 1} on stages {where}: every stage "
            f"of 0 .. {stages - 1} needs blocks, neighbours together and in order"
        )
    return [range(mine[0], mine[-1] + 1) for mine in found]


def memory_weight(config: Config) -> float:
    """How much memory counts in a split, in 0 .. 1."""
    asked = config.memory_weight
    return WEIGHTS[config.optimize] if asked is None else asked


def table(costs: Costs, split: list[range], ranks: list[int]) -> str:
    """What landed where, a line for each stage: ``ranks[stage]`` is its pipeline coordinate."""
    whole = [costs.first, *costs.blocks, costs.last]
    time = sum(cost.time for cost in whole) or 1.0
    memory = sum(cost.memory for cost in whole) or 1.0
    lines = ["stage  rank  parameters  memory    time  blocks"]
    for stage, blocks in enumerate(split):
        mine = costs.of_stage(blocks)
        held = f"{blocks.start}" if len(blocks) == 1 else f"{blocks.start} .. {blocks.stop - 1}"
        held = "embedding, " * (stage == 0) + held + ", norm, head" * (stage == len(split) - 1)
        lines.append(
            f"{stage:>5}  {ranks[stage]:>4}  {_count(sum(c.parameters for c in mine)):>10}  "
            f"{sum(c.memory for c in mine) / memory:>6.1%}  "
            f"{sum(c.time for c in mine) / time:>6.1%}  {held}"
        )
    return "\n".join(lines)


def _weight(cost: Cost, costs: Costs, memory_weight: float) -> float:
    whole = [costs.first, *costs.blocks, costs.last]
    time = sum(each.time for each in whole) or 1.0
    memory = sum(each.memory for each in whole) or 1.0
    return memory_weight * cost.memory / memory + (1 - memory_weight) * cost.time / time


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)
