"""What `transform` and `pipeline` made of a model: which part of which parameter is on this rank.

FSDP2 shards what a rank has; this says what that is of the whole model. Parameters are plain
tensors here, cut to what the rank computes with, not DTensors: a fused projection is cut in several
pieces, a vocabulary need not divide, and the modules' own code runs on them unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Cut:
    """How one dim of a parameter is divided among the ranks of an axis."""

    axis: str
    """of the mesh: ``tensor`` or ``expert``"""
    dim: int
    size: int
    """elements of the whole parameter on that dim"""
    mine: tuple[tuple[int, int], ...]
    """this rank's pieces of it: (first, how many), in the order in which they lie in memory"""

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of ``whole``: a copy, contiguous."""
        pieces = [whole.narrow(self.dim, first, count) for first, count in self.mine]
        return torch.cat(pieces, self.dim).contiguous()


def even(axis: str, dim: int, size: int, rank: int, ranks: int, parts: int = 1) -> Cut:
    """A `Cut` into ``ranks`` equal pieces, or nearly so; the first ones take what is left over.

    ``parts``: the dim is so many tensors behind one another (fused projections), each cut by
    itself.
    """
    each = size // parts
    small, more = divmod(each, ranks)
    first = rank * small + min(rank, more)
    count = small + (rank < more)
    return Cut(axis, dim, size, tuple((part * each + first, count) for part in range(parts)))


@dataclass
class Layout:
    """The parameters of a model that are cut, by their names, and the axes it was transformed for.

    A parameter may be cut on several dims; one that is not named here is whole on every rank.
    """

    cuts: dict[str, tuple[Cut, ...]] = field(default_factory=dict)
    axes: set[str] = field(default_factory=set)

    def take(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of parameter ``name``."""
        for cut in self.cuts.get(name, ()):
            whole = cut.take(whole)
        return whole

    def cut(self, model: nn.Module, name: str, cut: Cut) -> None:
        """Cut parameter ``name`` of ``model`` now, wherever the model uses it (tied ones are one).

        On the meta device only its shape changes; `delayed_init.materialise` takes the values.
        """
        whole = model.get_parameter(name)
        part = nn.Parameter(cut.take(whole.detach()), requires_grad=whole.requires_grad)
        if hasattr(whole, "_nearlinear_history"):
            part._nearlinear_history = whole._nearlinear_history
        for module_name, module in model.named_modules():
            for key, parameter in module._parameters.items():
                if parameter is whole:
                    module._parameters[key] = part
                    full = f"{module_name}.{key}" if module_name else key
                    self.cuts[full] = (*self.cuts.get(full, ()), cut)


def whole_shape(tensor: torch.Tensor, cuts: Sequence[Cut] = ()) -> tuple[int, ...]:
    """The shape in the model of what is ``tensor`` here, cut so before it was sharded."""
    shape = list(tensor.shape)
    for cut in cuts:
        shape[cut.dim] = cut.size
    return tuple(shape)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What of a tensor that may be sharded is in this rank's memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def of(model: nn.Module) -> Layout:
    """The layout of ``model``; an empty one where nothing was cut."""
    if not hasattr(model, "_nearlinear_layout"):
        model._nearlinear_layout = Layout()
    return model._nearlinear_layout


def cuts_of(parameter: torch.Tensor) -> tuple[Cut, ...]:
    """How a parameter of a sharded model is cut, beside what FSDP2 did."""
    return getattr(parameter, "_nearlinear_cuts", ())


def mark(model: nn.Module) -> None:
    """Have every parameter of ``model`` know how it is cut, once no other takes its place."""
    cuts = of(model).cuts
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parameter._nearlinear_cuts = cuts.get(name, ())
