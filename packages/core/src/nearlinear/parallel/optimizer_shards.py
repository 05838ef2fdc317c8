"""Optimizer state sharded over all ranks: ZeRO-1 across replicas, on top of MiCS's shards.

Sources: ZeRO (Rajbhandari et al., SC 2020), section 5.1; SMP v1's ``shard_optimizer_state``. The
second hop is then a reduce-scatter: every replica gets its slice of the summed gradients, the
optimizer updates that, and an all-gather brings the replicas each other's. Both together move what
the all-reduce did, which is made of the same two.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from .. import _torch
from ..c10d_names import all_gather
from ..errors import ConfigError
from ..runtime import Runtime
from . import slices
from .lane import Lane
from .layout import local
from .roots import roots_of
from .scatter import Scatter
from .slices import Slice

log = logging.getLogger(__name__)


def asked(now: Runtime) -> bool:
    """Whether replicas share the optimizer's state."""
    return now.config.shard_optimizer_state and now.mesh.replicate > 1


def shard_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """Have ``optimizer``, over parameters of the sharded ``model``, update this rank's slices only.

    ::

        optimizer = nl.shard_optimizer(torch.optim.AdamW(model.parameters()), model)

    In place, and returned: its groups hold the slices (DTensors over shards and replicas) instead
    of the parameters, and every step ends with an all-gather of what replicas have updated, a
    collective call. Any optimizer that updates elements by themselves will do; those that look at
    whole matrices (Muon, Adafactor, LARS) see slices of them. Gradients are those of the slices,
    a parameter's own is None: `nl.clip_grad_norm_` and ``model.zero_grad()`` know. Where the config
    does not ask for ``shard_optimizer_state``, or there is one replica, nothing changes. Raises
    ConfigError.
    """
    held = getattr(model, "_nearlinear_slices", None)
    if held is None:
        log.debug("shard_optimizer_state is off, or there is one replica: it stays whole")
        return optimizer
    if optimizer.state:
        raise ConfigError("the optimizer has stepped already: call nl.shard_optimizer before")
    known = {id(each.shard) for unit in held.units for each in unit.slices}
    given = [p for group in optimizer.param_groups for p in group["params"]]
    if any(id(p) not in known and p.requires_grad for p in given):
        raise ConfigError(
            "the optimizer has a parameter that is not the model's, or was frozen when nl.shard "
            "cut the model: build it from the sharded model's parameters()"
        )
    for group in optimizer.param_groups:
        group["params"] = [slices.of(parameter) for parameter in group["params"]]
    mine = {id(parameter) for parameter in given}
    updated = [(u, [s for s in u.slices if id(s.shard) in mine]) for u in held.units]
    updated = [(unit, some) for unit, some in updated if some]

    def before(*_) -> None:
        for _, some in updated:
            for each in some:
                each.refresh()

    def after(*_) -> None:
        for item in [held.lane.give(gather=lambda u=u, s=s: u.gather(s)) for u, s in updated]:
            item.wait()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return optimizer


def install(model: nn.Module, now: Runtime) -> None:
    """Cut the trainable parameters of ``model``, whose units are sharded, for replicas.

    Units that reduce on a lane do their second hop there; for others it is done here.
    """
    reduction = getattr(model, "_nearlinear_reduction", None)
    on_lane = {} if reduction is None else {each.unit: each for each in reduction.units}
    lane = Lane("slices", inline=True) if reduction is None else reduction.lane
    model._nearlinear_slices = held = Slices(lane)
    if hasattr(model, "_nearlinear_pipeline"):
        model._nearlinear_pipeline.slices = held
    dense, replicas = now.device_mesh["shard"], now.device_mesh["replicate"].get_group()
    meshes: dict[bool, DeviceMesh] = {}  # of experts, or not
    units = [unit for root in roots_of(model) for unit in root.modules()]
    for unit in dict.fromkeys(unit for unit in units if isinstance(unit, FSDPModule)):
        parameters = [p for p in _torch.sharded_parameters(unit) if p.requires_grad]
        if not parameters:
            continue
        of_experts = parameters[0].device_mesh != dense
        if of_experts not in meshes:
            whole = now.expert_mesh if of_experts else now.device_mesh
            meshes[of_experts] = slices.mesh_of_slices(whole)
        beside = on_lane.get(unit)
        group = replicas if beside is None else reduction.replicas
        cut = UnitSlices(held, parameters, meshes[of_experts], group)
        held.units.append(cut)
        if beside is None:
            cut.watch()
        else:
            beside.slices = cut


@dataclass
class Slices:
    """All slices of a model on this rank, and where replicas meet."""

    lane: Lane
    units: list[UnitSlices] = field(default_factory=list)
    last: bool = True
    """the backward pass at hand ends in the second hop"""

    def abandon(self) -> None:
        """Drop what an unfinished step has summed up."""
        for unit in self.units:
            unit.sums.clear()

    def zero_grad(self, set_to_none: bool) -> None:
        for unit in self.units:
            for each in unit.slices:
                if set_to_none:
                    each.values.grad = None
                elif each.values.grad is not None:
                    local(each.values.grad).zero_()


class UnitSlices:
    """The slices of the parameters that one FSDP2 unit reduces together."""

    def __init__(self, common: Slices, parameters: Iterable, mesh: DeviceMesh, replicas):
        self.common, self.replicas = common, replicas
        self.slices = [Slice(parameter, mesh) for parameter in parameters]
        self.sums: dict[nn.Parameter, torch.Tensor] = {}  # of this replica, in the step so far
        self._scatter = Scatter(replicas)

    @property
    def trained(self) -> list[Slice]:
        """Those that get gradients: a user may have frozen some since."""
        return [each for each in self.slices if each.shard.requires_grad]

    def watch(self) -> None:
        """Take the gradients that FSDP2 reduces to this rank, as they come."""
        for each in self.slices:
            each.shard.register_post_accumulate_grad_hook(self._take)

    @torch.no_grad()
    def _take(self, parameter: nn.Parameter) -> None:
        """Hook; on accelerators FSDP2 calls it on the stream of its reductions."""
        gradient, parameter.grad = local(parameter.grad), None
        before = self.sums.get(parameter)
        self.sums[parameter] = gradient if before is None else before.add_(gradient)
        if parameter is self.trained[-1].shard and self.common.last:
            self.hop()

    def hop(self) -> None:
        """Replicas share out their sums: the slices have their gradients."""
        shards = [
            self.sums[each.shard]
            if each.shard in self.sums
            else torch.zeros_like(local(each.shard.data))
            for each in self.trained
        ]
        self.sums.clear()
        self.appear(self.scatter(shards, dist.ReduceOp.AVG))

    def scatter(self, shards: Sequence[torch.Tensor], op: dist.ReduceOp) -> torch.Tensor:
        """Reduce the gradients ``shards`` over replicas to those of the slices: flat."""
        trained = self.trained
        ranks, mine = self.replicas.size(), sum(each.elements for each in trained)
        flat = shards[0].new_empty(ranks, mine)
        if not mine:  # this shard has no rows, on any replica
            return flat.view(-1)
        torch._foreach_copy_(*slices.pairs(flat, trained, shards))
        found = flat.new_empty(mine)
        self._scatter(found, flat.view(-1), op)
        return found

    def appear(self, flat: torch.Tensor) -> None:
        """Add ``flat``, as `scatter` has returned it, to the gradients of the slices."""
        trained = self.trained
        parts = flat.split([each.elements for each in trained])
        for each, part in zip(trained, parts, strict=True):
            each.add_gradient(part)

    def shards_in(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The gradients in what FSDP2 has reduced for this unit: padded shards, one by one."""
        trained = self.trained
        parts = flat.split([math.prod(each.padded_shape) for each in trained])
        held = [local(each.shard.data) for each in trained]
        return [p[: shard.numel()].view(shard.shape) for p, shard in zip(parts, held, strict=True)]

    @torch.no_grad()
    def gather(self, updated: Sequence[Slice]) -> None:
        """Bring the slices that all replicas have of the ``updated`` into the shards."""
        sizes = [each.elements for each in updated]
        mine = local(updated[0].values.data).new_empty(sum(sizes))
        if not len(mine):
            return
        for each, room in zip(updated, mine.split(sizes), strict=True):
            values = local(each.values.data)
            room[: values.numel()].copy_(values.view(-1))
        everyones = mine.new_empty(self.replicas.size(), mine.numel())
        all_gather(everyones.view(-1), mine, group=self.replicas)
        travelled, shards = slices.pairs(
            everyones, updated, [local(each.shard.data) for each in updated]
        )
        torch._foreach_copy_(shards, travelled)


class Sliced:
    """In front of a model's class: its gradients are those of the slices."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._nearlinear_slices.zero_grad(set_to_none)
