"""When units are gathered and freed within a step: ahead of use, and not twice where once will do.

Blocks run forwards, then backwards, then the next micro-batch begins forwards again, so at every
turn the unit that was used last is used next. Those stay gathered at no cost: the last block from
forward to backward, the first block and the root unit from one micro-batch to the next. More stay
where the config allows more parameters to live (``sdp_max_live_parameters``), the first blocks
first; between them, ``prefetch_depth`` units are gathered while others compute.
"""

from dataclasses import dataclass

import torch
from torch import nn

from .kept import kept_blocks


@dataclass(frozen=True)
class Schedule:
    """Which units of a sharded model stay gathered between the micro-batches of one step."""

    units: tuple[nn.Module, ...] = ()
    staying: tuple[nn.Module, ...] = ()

    def begin_micro_batch(self, last: bool) -> None:
        for unit in self.staying:
            unit.set_reshard_after_backward(last, recurse=False)

    def end_step(self) -> None:
        """Free everything, also after a step that was not finished."""
        for unit in self.staying:
            unit.set_reshard_after_backward(True, recurse=False)
        self.free()

    def free(self) -> None:
        """Gathered copies are of parameters as they were: none outlives a step or evaluation."""
        for unit in self.units:
            unit.reshard()

    def free_after_evaluation(self, *_) -> None:
        """Forward hook of the root."""
        if not torch.is_grad_enabled():
            self.free()


def arrange(
    root: nn.Module,
    blocks: list[nn.Module],
    sizes: list[int],
    depth: int,
    live: int,
    inside: dict[nn.Module, list[nn.Module]],
) -> Schedule:
    """Set the prefetching of ``root`` and ``blocks``, keep what is allowed; returns what stays.

    ``sizes`` (root, then blocks) and ``live``, parameters: at most that many are gathered at once,
    or as few as the schedule needs. ``depth``: how many units are gathered ahead. ``inside``: units
    within one of them (divided experts), which are gathered and kept with it.
    """

    def whole(units: list[nn.Module]) -> list[nn.Module]:
        return [part for unit in units for part in (unit, *inside.get(unit, ()))]

    order = [root, *blocks]
    for i, unit in enumerate(order):
        unit.set_modules_to_forward_prefetch(whole(order[i + 1 : i + 1 + depth]))
    backwards = [root, *reversed(blocks)]
    for i, unit in enumerate(backwards):
        for part in whole([unit]):  # without a list, FSDP2 would choose for the inner ones
            part.set_modules_to_backward_prefetch(whole(backwards[i + 1 : i + 1 + depth]))
    kept = blocks[: kept_blocks(sizes, depth, live)]
    for unit in whole(list(dict.fromkeys([*kept, blocks[-1]]))):
        unit.set_reshard_after_forward(False, recurse=False)
    schedule = Schedule(tuple(whole(order)), tuple(whole([root, blocks[0], *kept[1:]])))
    root.register_forward_hook(schedule.free_after_evaluation)
    return schedule
