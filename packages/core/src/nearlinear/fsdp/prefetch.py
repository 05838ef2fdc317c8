"""Prefetch schedule: when the units of a model are gathered and freed within a step.

Blocks run forwards, then backwards, and the next micro-batch begins forwards again, so that at each
turn the unit used last is used next. These units stay gathered at no cost: the last block between
forward and backward pass, the first block and the root unit between micro-batches. As far as
``sdp_max_live_parameters`` allows more gathered parameters, more blocks stay gathered, the first
blocks first. Of the others, ``prefetch_depth`` units are gathered while earlier units compute.

The functions that count resident blocks need no torch: the planner uses them too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.fsdp import FSDPModule


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


def stage_stays_gathered(parameters: int, live: int, needs_gathered_weights: bool) -> bool:
    """Return whether a pipeline rank keeps its ``parameters`` gathered between its passes.

    It frees them if there are more than ``live``, unless the schedule computes weight gradients
    apart from the backward pass and so ``needs_gathered_weights``.
    """
    return needs_gathered_weights or parameters <= live


@dataclass(frozen=True)
class PrefetchSchedule:
    """Units of a sharded model that stay gathered between the micro-batches of a step."""

    units: tuple[FSDPModule, ...] = ()
    resident: tuple[FSDPModule, ...] = ()

    def begin_micro_batch(self, last: bool) -> None:
        """Keep the resident units gathered after the backward pass, unless it is the ``last``."""
        for unit in self.resident:
            unit.set_reshard_after_backward(last, recurse=False)

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
    sizes: list[int],
    depth: int,
    live: int,
    inner_units: dict[nn.Module, list[nn.Module]],
) -> PrefetchSchedule:
    """Set up the prefetching of ``root`` and ``blocks`` and return the schedule.

    Args:
        sizes: Parameters of the root unit, then of each block.
        depth: Units that are gathered ahead.
        live: Parameters that may be gathered at once. More are if the schedule needs them.
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
    resident = blocks[: num_resident_blocks(sizes, depth, live)]
    for unit in with_inner(list(dict.fromkeys([*resident, *blocks[-1:]]))):
        unit.set_reshard_after_forward(False, recurse=False)
    schedule = PrefetchSchedule(
        tuple(with_inner(forwards)), tuple(with_inner([root, *blocks[:1], *resident[1:]]))
    )
    root.register_forward_hook(schedule.free_after_evaluation)
    return schedule
