"""Parameters tied between the first and the last stage: embedding and head with one table.

Each end has its own copy and computes a part of the gradient. Both parts are summed once per step
(`fsdp.partial_gradients`), so that the copies stay equal. If one rank holds both ends, as with
V-shaped schedules, its optimizer updates one of the copies and the other one follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import nn

from ..distributed.runtime import Runtime
from ..fsdp.model_state import (
    PartialGradients,
    local_tensor,
    optimizer_parameter,
    parameter_state,
)
from ..fsdp.partial_gradients import PartialGradientReducer
from .stage import ModelSplit

if TYPE_CHECKING:
    from .runtime import PipelineRuntime


@dataclass(frozen=True)
class TiedParameter:
    """Names of one parameter that two stages hold."""

    name: str
    """Name on the first stage."""
    copy_name: str
    """Name of its copy on the last stage."""


def find_tied_parameters(model: nn.Module, split: ModelSplit) -> list[TiedParameter]:
    """Return the parameters that the first and the last stage of ``model`` share."""
    before = split.modules_before_blocks(model)
    first = {parameter for module in before for parameter in module.parameters()}
    names: dict[nn.Parameter, str] = {}
    tied = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter in first and parameter in names:
            tied.append(TiedParameter(names[parameter], name))
        names.setdefault(parameter, name)
    return tied


def copy_tied_parameters(model: nn.Module, tied: Sequence[TiedParameter]) -> None:
    """Give the last stage copies, so that two stages of one rank are sharded separately."""
    for tie in tied:
        module, _, key = tie.copy_name.rpartition(".")
        old = model.get_parameter(tie.copy_name)
        new = nn.Parameter(old.detach().clone(), requires_grad=old.requires_grad)
        parameter_state(new).initial_values = parameter_state(old).initial_values
        model.get_submodule(module)._parameters[key] = new


class LocalTiedGradients:
    """Adds the gradients of ``copies`` to ``parameters``, which the optimizer updates.

    Implements `PartialGradients` for two copies on one rank; copies on two ranks use a
    `PartialGradientReducer`.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], copies: Sequence[nn.Parameter]):
        self.pairs = list(zip(parameters, copies, strict=True))
        self._step_is_open = False

    def begin(self) -> None:
        """Open a step: copy the current values."""
        self._step_is_open = True
        self.copy_values()

    @torch.no_grad()
    def copy_values(self) -> None:
        """Copy the values of the parameters, which an optimizer or a checkpoint has changed."""
        for parameter, duplicate in self.pairs:
            local_tensor(duplicate.data).copy_(local_tensor(parameter.data))

    @torch.no_grad()
    def reduce(self) -> None:
        """Add the gradients of the copies to those of the parameters."""
        if not self._step_is_open:
            return
        self._step_is_open = False
        for parameter, duplicate in (map(optimizer_parameter, pair) for pair in self.pairs):
            grad, duplicate.grad = duplicate.grad, None
            if grad is not None:
                parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)

    def abandon(self) -> None:
        """Forget an unfinished step."""
        self._step_is_open = False


def tied_gradient_reducers(
    model: nn.Module, pipeline: PipelineRuntime, runtime: Runtime
) -> list[PartialGradients]:
    """Return the reducers of tied parameters of ``model``, whose stages are sharded.

    A collective call of all ranks.
    """
    tied = pipeline.tied
    if not tied:
        return []
    if pipeline.holds_both_ends:
        copies = [model.get_parameter(tie.copy_name) for tie in tied]
        return [LocalTiedGradients([model.get_parameter(tie.name) for tie in tied], copies)]
    first, last = runtime.mesh.group("pipeline", runtime.rank)[0], pipeline.last_stage_rank
    is_end = runtime.rank in (first, last)
    if first == last:
        return []
    # torch derives the name of such a group from the number of groups created before. Ranks between
    # the ends therefore create one, too.
    group = dist.new_group(
        [first, last] if is_end else [runtime.rank], use_local_synchronization=True
    )
    if not is_end:
        return []
    names = [tie.name if runtime.rank == first else tie.copy_name for tie in tied]
    parameters = [model.get_parameter(name) for name in names]
    if runtime.rank == last:
        for parameter in parameters:
            parameter_state(optimizer_parameter(parameter)).is_tied_copy = True
    reducer = PartialGradientReducer(cast(dist.ProcessGroup, group), parameters, runtime.device)
    return [reducer]
