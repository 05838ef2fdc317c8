"""Schedule of a step: when the units of a model are gathered, freed and reduced.

Blocks run forwards, then backwards, and the next micro-batch begins forwards again, so that at each
turn the unit used last is used next. The first block and the root unit stay gathered between
micro-batches at no cost: memory peaks at the loss and in the backward pass.

``memory_budget`` pays for further retention. The last block stays gathered between forward and
backward pass if it fits beside the root unit. A unit that stays gathered saves up to two
all-gathers per micro-batch. A unit whose gradients stay unreduced saves one reduce-scatter per
micro-batch. Parameters are therefore kept first, the first blocks first, and then gradients, the
largest units first. Units without room are gathered again, ``prefetch_depth`` units ahead of the
computing one, and are reduced after every micro-batch.

The plan depends only on the config and the sizes of units, so that all ranks of a group agree. Its
functions need no torch: the planner uses them too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.fsdp import FSDPModule

    from ..config.parallel import ParallelConfig


GRADIENT_BYTES = 4  # micro-batches are summed in float32


def num_resident_blocks(sizes: list[int], depth: int, live: int) -> int:
    """Return the number of first blocks that may stay gathered for a whole step.

    Args:
        sizes: Parameters of the root unit, then of each block.
        depth: Blocks that are gathered ahead.
        live: Parameters that may be gathered at once.
    """
    root, *blocks = sizes
    if sum(sizes) <= live:
        return len(blocks)
    room, resident = live - root - (1 + depth) * max(blocks), 0
    while resident < len(blocks) and sum(blocks[: resident + 1]) <= room:
        resident += 1
    return resident


@dataclass(frozen=True)
class Retention:
    """Parameters and gradients that a rank keeps between the micro-batches of a step."""

    resident_blocks: int
    """First blocks that stay gathered."""
    last_block: bool
    """True if the last block stays gathered between forward and backward pass."""
    unreduced: tuple[bool, ...]
    """For the root unit and each block: True if it is reduced once per step."""


def plan_retention(sizes: list[int], config: ParallelConfig, sharing: int) -> Retention:
    """Divide ``memory_budget`` between gathered parameters and unreduced gradients.

    Args:
        sizes: Parameters of the root unit, then of each block.
        config: Budget, prefetch depth and compute dtype.
        sharing: Ranks that share the parameters. Gradients of a single rank are not sharded, so
            that keeping them takes no memory.
    """
    root, *blocks = sizes
    depth = config.prefetch_depth
    resident = num_resident_blocks(sizes, depth, config.live_parameters)
    gathered = root + sum(blocks[:resident])
    if resident < len(blocks):
        gathered += (1 + depth) * max(blocks)
    room = config.budget_bytes - gathered * config.compute_bytes
    kept = [False] * len(sizes)
    if config.gradient_reduction == "auto":
        for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
            # The rank would hold its shard of the sums anyway.
            more = GRADIENT_BYTES * (sizes[place] - sizes[place] // sharing)
            if more <= max(room, 0):
                kept[place] = True
                room -= more
    return Retention(resident, root + sum(blocks[-1:]) <= config.live_parameters, tuple(kept))


def stage_stays_gathered(parameters: int, live: int, needs_gathered_weights: bool) -> bool:
    """Return whether a pipeline rank keeps its ``parameters`` gathered between its passes.

    It frees them if there are more than ``live``, unless the schedule computes weight gradients
    apart from the backward pass and so ``needs_gathered_weights``.
    """
    return needs_gathered_weights or parameters <= live


@dataclass(frozen=True)
class PrefetchSchedule:
    """Units of a sharded model, and those retained between the micro-batches of a step."""

    units: tuple[FSDPModule, ...] = ()
    resident: tuple[FSDPModule, ...] = ()
    """Units that stay gathered."""
    unreduced: tuple[FSDPModule, ...] = ()
    """Units that are reduced once per step."""

    def begin_micro_batch(self, last: bool, two_hop: bool) -> None:
        """Keep units gathered and unreduced after the backward pass, unless it is the ``last``.

        Without ``two_hop`` every micro-batch reduces all units.
        """
        for unit in self.resident:
            unit.set_reshard_after_backward(last, recurse=False)
        for unit in self.unreduced:
            unit.set_requires_gradient_sync(last or not two_hop, recurse=False)

    def hold_gradients(self) -> None:
        """Take unreduced gradients off the parameters, so that no optimizer sees them.

        Called at the end of each backward pass but the last.
        """
        from .. import _torch

        for unit in self.unreduced:
            _torch.hold_unreduced_gradients(unit)

    def end_step(self) -> None:
        """Free all units, also after an unfinished step."""
        for unit in self.resident:
            unit.set_reshard_after_backward(True, recurse=False)
        self.free()

    def free(self) -> None:
        """Free all units, because gathered copies become stale when the parameters change."""
        for unit in self.units:
            unit.reshard()

    def free_after_evaluation(self, *_) -> None:
        """Forward hook of the root."""
        import torch

        if not torch.is_grad_enabled():
            self.free()


def set_prefetch_schedule(
    root: nn.Module,
    blocks: list[nn.Module],
    retention: Retention,
    depth: int,
    inner_units: dict[nn.Module, list[nn.Module]],
) -> PrefetchSchedule:
    """Set up the prefetching of ``root`` and ``blocks`` and return the schedule.

    Args:
        retention: Blocks that stay gathered, and units that are reduced once per step.
        depth: Units that are gathered ahead.
        inner_units: Units inside other units (divided experts), gathered and kept with these.
    """

    def with_inner(units: list[nn.Module]) -> list:
        return [part for unit in units for part in (unit, *inner_units.get(unit, ()))]

    forwards: list[Any] = [root, *blocks]
    for i, unit in enumerate(forwards):
        unit.set_modules_to_forward_prefetch(with_inner(forwards[i + 1 : i + 1 + depth]))
    backwards: list[Any] = [root, *reversed(blocks)]
    for i, unit in enumerate(backwards):
        for part in with_inner([unit]):  # without a list, FSDP2 would choose for inner units
            part.set_modules_to_backward_prefetch(with_inner(backwards[i + 1 : i + 1 + depth]))
    resident = blocks[: retention.resident_blocks]
    unreduced = [u for u, kept in zip(forwards, retention.unreduced, strict=True) if kept]
    turned = blocks[-1:] if retention.last_block else []
    for unit in with_inner(list(dict.fromkeys([*resident, *turned]))):
        unit.set_reshard_after_forward(False, recurse=False)
    schedule = PrefetchSchedule(
        tuple(with_inner(forwards)),
        tuple(with_inner([root, *blocks[:1], *resident[1:]])),
        tuple(with_inner(unreduced)),
    )
    root.register_forward_hook(schedule.free_after_evaluation)
    return schedule
