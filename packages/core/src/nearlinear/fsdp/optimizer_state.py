"""Optimizer state sharded over all ranks: ZeRO-1 across replicas, on top of the shards of MiCS.

Sources: ZeRO (Rajbhandari et al., SC 2020), section 5.1; SMP v1's ``shard_optimizer_state``. The
second hop becomes a reduce-scatter: every replica receives its slice of the summed gradients, the
optimizer updates the slice, and an all-gather distributes the updated slices. Both together send as
many bytes as the all-reduce that they replace.

Replicas hold equal shards, and each of them owns a slice of every parameter's shard, which is a
parameter of its own for the optimizer. Slices are the chunks of ``torch.chunk``, one per replica,
so that a DTensor over the mesh (shard, replicate) describes them. A slice shares the shard's memory
if its chunk is contiguous there, and has memory of its own otherwise. (torch's ``full_tensor``
fails where two mesh dims divide one dim unevenly; `nearlinear.save` does not use it.)
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
from torch.distributed.tensor import DTensor, Shard

from .. import _torch
from .._torch import all_gather
from ..distributed.collectives import ReduceScatter
from ..distributed.comm_thread import CommThread
from ..distributed.mesh import dim_to_slice
from ..distributed.runtime import Runtime
from ..errors import ConfigError
from .model_state import (
    fsdp_roots,
    local_tensor,
    model_state,
    optimizer_parameter,
    parameter_state,
)

log = logging.getLogger(__name__)


def shards_optimizer_state(runtime: Runtime) -> bool:
    """Return whether replicas shard the optimizer state."""
    return runtime.config.shard_optimizer_state and runtime.mesh.replicate > 1


def shard_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """Make ``optimizer``, over parameters of the sharded ``model``, update this rank's slices.

    ::

        optimizer = nl.shard_optimizer(torch.optim.AdamW(model.parameters()), model)

    In place, and returned. The parameter groups hold slices (DTensors over shards and replicas)
    instead of parameters, and every step ends with an all-gather of the updated slices, a
    collective call. Optimizers that need whole matrices (Muon, Adafactor, LARS) are not supported;
    they would see slices. Gradients are those of the slices, and a parameter's own ``grad`` is
    None; `nl.clip_grad_norm_` and ``model.zero_grad()`` take that into account. Nothing changes
    without ``shard_optimizer_state`` in the config, or with one replica. Raises ConfigError.
    """
    held = model_state(model).optimizer_slices
    if held is None:
        log.debug("shard_optimizer_state is off, or there is one replica: nothing to shard")
        return optimizer
    if optimizer.state:
        raise ConfigError(
            "the optimizer has stepped already: call nl.shard_optimizer before the first step"
        )
    known = {id(each.shard) for unit in held.units for each in unit.slices}
    given = [p for group in optimizer.param_groups for p in group["params"]]
    if any(id(p) not in known and p.requires_grad for p in given):
        raise ConfigError(
            "the optimizer has a parameter that is not the model's, or that was frozen when "
            "nl.shard sharded the model: build it from the sharded model's parameters()"
        )
    for group in optimizer.param_groups:
        group["params"] = [optimizer_parameter(parameter) for parameter in group["params"]]
    updated_ids = {id(parameter) for parameter in given}
    chosen = [(unit, [s for s in unit.slices if id(s.shard) in updated_ids]) for unit in held.units]
    updated = [(unit, slices) for unit, slices in chosen if slices]

    def before_step(*_) -> None:
        for _, slices in updated:
            for each in slices:
                each.refresh()

    def after_step(*_) -> None:
        works = [
            held.thread.submit(gather=lambda unit=unit, slices=slices: unit.all_gather(slices))
            for unit, slices in updated
        ]
        for work in works:
            work.wait()

    optimizer.register_step_pre_hook(before_step)
    optimizer.register_step_post_hook(after_step)
    return optimizer


def install_optimizer_slices(model: nn.Module, runtime: Runtime) -> None:
    """Slice the trainable parameters of ``model``, whose units are sharded, across replicas.

    Units that reduce on a communication thread run their second hop there. Others run it when
    FSDP2 has reduced their gradients.
    """
    state = model_state(model)
    reduction = state.reduction
    on_thread = {} if reduction is None else {each.unit: each for each in reduction.units}
    thread = CommThread("slices", inline=True) if reduction is None else reduction.thread
    state.optimizer_slices = held = OptimizerSlices(thread)
    zero_grad = model.zero_grad

    def zero_grad_of_slices(set_to_none: bool = True) -> None:
        zero_grad(set_to_none)
        held.zero_grad(set_to_none)

    model.zero_grad = zero_grad_of_slices
    dense, replicas = runtime.device_mesh["shard"], runtime.device_mesh["replicate"].get_group()
    meshes: dict[bool, DeviceMesh] = {}  # by whether the unit holds experts
    units = [unit for root in fsdp_roots(model) for unit in root.modules()]
    for unit in dict.fromkeys(unit for unit in units if isinstance(unit, FSDPModule)):
        parameters = [p for p in _torch.sharded_parameters(unit) if p.requires_grad]
        if not parameters:
            continue
        first = parameters[0]
        assert isinstance(first, DTensor)
        holds_experts = first.device_mesh != dense
        if holds_experts not in meshes:
            whole = runtime.expert_mesh if holds_experts else runtime.device_mesh
            meshes[holds_experts] = _slice_mesh(whole)
        overlapped = on_thread.get(unit)
        group = replicas if overlapped is None or reduction is None else reduction.replicas
        assert group is not None
        slices = UnitSlices(held, parameters, meshes[holds_experts], group)
        held.units.append(slices)
        if overlapped is None:
            slices.watch_reductions()
        else:
            overlapped.slices = slices


@dataclass
class OptimizerSlices:
    """Slices of a model's parameters on this rank."""

    thread: CommThread
    units: list[UnitSlices] = field(default_factory=list)
    last: bool = True
    """True if the current backward pass ends with the second hop."""

    def abandon(self) -> None:
        """Drop the sums of an unfinished step."""
        for unit in self.units:
            unit.sums.clear()

    def zero_grad(self, set_to_none: bool) -> None:
        """Reset the gradients of the slices."""
        for unit in self.units:
            for each in unit.slices:
                if set_to_none:
                    each.values.grad = None
                elif each.values.grad is not None:
                    local_tensor(each.values.grad).zero_()


@dataclass
class ReplicaSlice:
    """This replica's slice of ``shard``, a sharded parameter, over ``mesh`` (shard, replicate)."""

    shard: nn.Parameter
    mesh: DeviceMesh
    values: nn.Parameter = field(init=False)
    """Parameter that the optimizer updates; a DTensor."""
    dim: int = field(init=False)
    """Tensor dim that is divided among replicas."""
    elements: int = field(init=False)
    """Elements of the largest slice of the shard; each replica sends as many."""

    def __post_init__(self) -> None:
        self.ranks, self.rank = self.mesh.size(1), self.mesh.get_local_rank(1)
        self.dim = dim_to_slice(self.padded_shape, self.ranks)
        self.elements = max(part.numel() for part in self.parts(local_tensor(self.shard.data)))
        self.values = nn.Parameter(self.wrap(self._in_shard().contiguous()))
        own, state = parameter_state(self.values), parameter_state(self.shard)
        own.splits, own.model = state.splits, state.model
        state.optimizer_slice = self.values

    @property
    def padded_shape(self) -> list[int]:
        """Shape of the largest shard of the parameter on any rank, to which FSDP2 pads."""
        shard = self._dtensor
        (placement,), ranks = shard.placements, self.mesh.size(0)
        assert isinstance(placement, Shard)
        shape = list(shard.shape)
        shape[placement.dim] = -(-shape[placement.dim] // ranks)
        return shape

    @property
    def _dtensor(self) -> DTensor:
        assert isinstance(self.shard, DTensor)
        return self.shard

    def parts(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Return views of all replicas' slices of ``shard``, a parameter's or its gradient's."""
        size = shard.size(self.dim)
        each = -(-size // self.ranks)
        starts = [min(rank * each, size) for rank in range(self.ranks)]
        return [shard.narrow(self.dim, start, min(each, size - start)) for start in starts]

    def wrap(self, values: torch.Tensor) -> DTensor:
        """Return the local ``values`` of the slice as a DTensor."""
        shard = self._dtensor
        placements = (shard.placements[0], Shard(self.dim))
        return DTensor.from_local(
            values,
            self.mesh,
            placements,
            run_check=False,
            shape=shard.shape,
            stride=shard.stride(),
        )

    def refresh(self) -> None:
        """Copy the shard's values to a slice with memory of its own."""
        in_shard, own = self._in_shard(), local_tensor(self.values.data)
        if in_shard.data_ptr() != own.data_ptr():
            own.copy_(in_shard)

    def add_gradient(self, values: torch.Tensor) -> None:
        """Add ``values`` (flat, `elements`) to the slice's gradient."""
        own = local_tensor(self.values.data)
        values = values[: own.numel()].view(own.shape)
        if self.values.grad is None:
            self.values.grad = self.wrap(values)
        else:
            local_tensor(self.values.grad).add_(values)

    def _in_shard(self) -> torch.Tensor:
        """Return a view of the slice inside the shard."""
        return self.parts(local_tensor(self.shard.data))[self.rank]


class UnitSlices:
    """Slices of the parameters that one FSDP2 unit reduces together."""

    def __init__(
        self,
        common: OptimizerSlices,
        parameters: Iterable[nn.Parameter],
        mesh: DeviceMesh,
        replicas: dist.ProcessGroup,
    ):
        self.common, self.replicas = common, replicas
        self.slices = [ReplicaSlice(parameter, mesh) for parameter in parameters]
        self.sums: dict[nn.Parameter, torch.Tensor] = {}
        """Shard gradients of this replica, summed over the step's micro-batches."""
        self._reduce_scatter = ReduceScatter(replicas)

    @property
    def trained(self) -> list[ReplicaSlice]:
        """Slices that receive gradients; parameters may have been frozen since."""
        return [each for each in self.slices if each.shard.requires_grad]

    def watch_reductions(self) -> None:
        """Take the gradients that FSDP2 reduces to this rank, as they arrive."""
        for each in self.slices:
            each.shard.register_post_accumulate_grad_hook(self._take)

    @torch.no_grad()
    def _take(self, parameter: nn.Parameter) -> None:
        """Gradient hook; on accelerators FSDP2 calls it on the stream of its reductions."""
        assert parameter.grad is not None
        gradient, parameter.grad = local_tensor(parameter.grad), None
        before = self.sums.get(parameter)
        self.sums[parameter] = gradient if before is None else before.add_(gradient)
        if parameter is self.trained[-1].shard and self.common.last:
            self.reduce_sums()

    def reduce_sums(self) -> None:
        """Run the second hop on the sums: the slices receive their gradients."""
        shards = [
            self.sums[each.shard]
            if each.shard in self.sums
            else torch.zeros_like(local_tensor(each.shard.data))
            for each in self.trained
        ]
        self.sums.clear()
        self.expose_grads(self.reduce_scatter(shards, dist.ReduceOp.AVG))

    def reduce_scatter(
        self, shards: Sequence[torch.Tensor], op: dist.ReduceOp.RedOpType
    ) -> torch.Tensor:
        """Reduce the gradients ``shards`` over replicas and return those of the slices, flat."""
        trained = self.trained
        ranks, own_elements = self.replicas.size(), sum(each.elements for each in trained)
        flat = shards[0].new_empty(ranks, own_elements)
        if not own_elements:  # the shard has no rows, on any replica
            return flat.view(-1)
        torch._foreach_copy_(*_pair_views(flat, trained, shards))
        output = flat.new_empty(own_elements)
        self._reduce_scatter(output, flat.view(-1), op)
        return output

    def expose_grads(self, flat: torch.Tensor) -> None:
        """Add ``flat``, a result of `reduce_scatter`, to the gradients of the slices."""
        trained = self.trained
        parts = flat.split([each.elements for each in trained])
        for each, part in zip(trained, parts, strict=True):
            each.add_gradient(part)

    def shards_in(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return views of the shard gradients in FSDP2's flat result, without its padding."""
        trained = self.trained
        parts = flat.split([math.prod(each.padded_shape) for each in trained])
        shards = [local_tensor(each.shard.data) for each in trained]
        return [
            p[: shard.numel()].view(shard.shape) for p, shard in zip(parts, shards, strict=True)
        ]

    @torch.no_grad()
    def all_gather(self, updated: Sequence[ReplicaSlice]) -> None:
        """All-gather the ``updated`` slices of all replicas into the shards."""
        sizes = [each.elements for each in updated]
        own = local_tensor(updated[0].values.data).new_empty(sum(sizes))
        if not len(own):
            return
        for each, target in zip(updated, own.split(sizes), strict=True):
            values = local_tensor(each.values.data)
            target[: values.numel()].copy_(values.view(-1))
        gathered = own.new_empty(self.replicas.size(), own.numel())
        all_gather(gathered.view(-1), own, group=self.replicas)
        received, shards = _pair_views(
            gathered, updated, [local_tensor(each.shard.data) for each in updated]
        )
        torch._foreach_copy_(shards, received)


def _slice_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return (shard, replicate) of ``mesh`` (replicate, shard), with the same process groups.

    A DTensor divides in the order of its mesh, and replicas divide the shards.
    """
    two = mesh["replicate", "shard"]
    return DeviceMesh.from_group(
        [two.get_group("shard"), two.get_group("replicate")],
        mesh.device_type,
        mesh=two.mesh.T.contiguous(),
        mesh_dim_names=("shard", "replicate"),
    )


def _pair_views(
    flat: torch.Tensor, slices: Sequence[ReplicaSlice], shards: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return matching views of ``flat`` (replicas, elements of each slice) and of ``shards``."""
    in_flat, in_shards = [], []
    columns = flat.split([each.elements for each in slices], dim=1)
    for each, shard, column in zip(slices, shards, columns, strict=True):
        for row, part in zip(column, each.parts(shard), strict=True):
            if part.numel():
                in_flat.append(row[: part.numel()].view(part.shape))
                in_shards.append(part)
    return in_flat, in_shards
