"""What a config comes to in memory, before anything runs: model states, and activations of blocks.

States: the float32 value of a parameter, which mixed precision keeps too, its float32 gradient and
AdamW's two averages. Source of 8-bit averages: Dettmers et al. 2022, in blocks of 256 as torchao
has them.
"""

import math
from dataclasses import dataclass

from ..config import Config
from ..parallel.activations.strategy import Strategy

VALUE = GRADIENT = 4  # bytes, in float32
AVERAGES = {"adamw": 8.0, "adamw_8bit": 2 * (1 + 4 / 256)}  # a byte each, and a scale per block


@dataclass(frozen=True)
class StateBytes:
    """Bytes of model states per parameter, by who shares them."""

    sharded: float = VALUE + GRADIENT + AVERAGES["adamw"]
    """shared by the ranks of a shard group"""
    everywhere: float = 0.0
    """shared by all ranks"""
    world: int = 1
    """ranks"""

    def on_rank(self, parameters: int, degree: int) -> int:
        """Bytes on one rank, where ``degree`` ranks are a shard group."""
        return math.ceil(parameters * (self.sharded / degree + self.everywhere / self.world))


def state_bytes(
    config: Config, optimizer: str, world: int, device: str, accumulation: int = 1
) -> StateBytes:
    """What ``config`` and ``optimizer`` (adamw, adamw_8bit) take of a ``device``'s memory.

    With ``offload_optimizer`` an accelerator holds none. Where replicas share the optimizer's
    state, they share gradients with it; while several micro-batches are added up they cannot.
    """
    if config.offload_optimizer and device != "cpu":
        return StateBytes(0.0, 0.0, world)
    averages = AVERAGES[optimizer]
    if not config.shard_optimizer_state:
        return StateBytes(VALUE + GRADIENT + averages, 0.0, world)
    if accumulation > 1:
        return StateBytes(VALUE + GRADIENT, averages, world)
    return StateBytes(VALUE, GRADIENT + averages, world)


@dataclass(frozen=True)
class BlockBytes:
    """What a block has of activations for one micro-batch."""

    all: int
    """what it saves"""
    input: int
    """hidden states that enter it"""
    products: int
    """what its matrices and its attention put out"""


def activations(
    block: BlockBytes, blocks: int, strategy: Strategy | None, horizon: int | None
) -> int:
    """Bytes at their peak of ``blocks`` blocks, checkpointed by ``strategy``.

    ``horizon``: of their offload. What is computed again is there as a whole.
    """
    if strategy is None:
        parts, kept, again = blocks, block.all, 0
    elif strategy.budget is not None:
        parts, again = blocks, 0
        kept = min(block.all, strategy.budget // blocks + block.all // blocks)
    else:
        together = min(strategy.together or blocks, blocks)
        parts = math.ceil(blocks / together)
        kept = block.input + (block.products if strategy.selective else 0)
        again = together * block.all - kept
    resident = parts if horizon is None else min(parts, horizon + 1)
    return resident * kept + again
