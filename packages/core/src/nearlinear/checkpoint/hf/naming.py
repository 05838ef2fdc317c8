"""What a model's tensors are called in a Hugging Face folder, and what of them lies where.

transformers 5 stacks a mixture's experts when it loads them, and renames parts of some families;
what it saves is as before. Its own conversion is asked here, with tensors that have a shape and no
values: what comes out of it are views, and their strides say which block of which tensor each is.
Ties are kept under the name that `save_pretrained` keeps.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ...errors import CheckpointError
from .. import state
from ..pieces import Piece


@dataclass(frozen=True)
class Stored:
    """One tensor of a folder: a block of one of the model's."""

    name: str
    of: str
    """the model's tensor"""
    block: Piece
    """of that tensor"""
    shape: tuple[int, ...]
    """in the folder"""
    order: tuple[int | None, ...]
    """for every dim there the dim of the model's tensor; None: it has one element"""
    spellings: tuple[str, ...] = ()
    """what else it may be called in a folder that others wrote"""

    def arranged(self, block: torch.Tensor) -> torch.Tensor:
        """``block`` of the model's tensor as it is in the folder: a view."""
        named = [dim for dim in self.order if dim is not None]
        rest = [dim for dim in range(block.dim()) if dim not in named]
        return block.permute([*named, *rest]).reshape(self.shape)

    def inside(self, part: Piece) -> tuple[slice, ...]:
        """Where ``part`` of the model's tensor, which lies in `block`, is in the folder's."""
        lies = part.inside(self.block)
        return tuple(slice(0, 1) if dim is None else lies[dim] for dim in self.order)

    def back(self, values: torch.Tensor, part: Piece) -> torch.Tensor:
        """What `inside` found, in the shape of ``part``."""
        named = [dim for dim in self.order if dim is not None]
        values = values.reshape([part.shape[dim] for dim in named])
        values = values.permute([named.index(dim) for dim in sorted(named)])
        return values.reshape(part.shape)


def stored(bare: nn.Module) -> list[Stored]:
    """What a folder of ``bare``, a skeleton, holds, in `save_pretrained`'s order.

    Raises CheckpointError for a model that is saved otherwise than in blocks of its tensors.
    """
    # under their first names
    shapes = {name: part.tensor.shape for name, part in state.parts_of(bare).items()}
    kept = _names_kept(bare)
    traced, sources = {}, {}
    for name in bare.state_dict():
        if name in kept:
            values = torch.empty(shapes[kept[name]], device="meta").as_subclass(_Traced)
            traced[name] = values
            sources[values.untyped_storage()._cdata] = (kept[name], values)
    found = []
    for name, values in _converted(bare, traced).items():
        of, whole = sources.get(values.untyped_storage()._cdata, ("", None))
        at = whole is not None and _block(values, whole.shape)
        if not at:
            raise CheckpointError(
                f"transformers computes {name} of {type(bare).__name__} when it saves, which is "
                "done on whole models only: load the checkpoint on one rank, and save_pretrained"
            )
        found.append(Stored(name, of, at[0], tuple(values.shape), at[1]))
    return _spelled(bare, found)


def _names_kept(bare: nn.Module) -> dict[str, str]:
    """The names in a state dict that are saved, each with the tensor's first name."""
    first = {id(p): name for name, p in bare.named_parameters()}
    names: dict[str, list[str]] = {}
    for name, parameter in bare.named_parameters(remove_duplicate=False):
        names.setdefault(first[id(parameter)], []).append(name)
    tied = _tied(bare)
    kept = {}
    for one, aliases in names.items():
        free = [name for name in aliases if not any(re.search(key, name) for key in tied)]
        kept[(free or sorted(aliases)[-1:])[0]] = one
    known = {name for aliases in names.values() for name in aliases}
    kept |= {name: name for name in bare.state_dict() if name not in known}
    for name in getattr(bare, "_keys_to_ignore_on_save", None) or ():
        kept.pop(name, None)
    return kept


def _tied(bare: nn.Module) -> list[str]:
    """Patterns of names that a loader ties to others: a dict's keys in transformers 5."""
    full = getattr(bare, "all_tied_weights_keys", None)
    return list(getattr(bare, "_tied_weights_keys", None) or () if full is None else full)


def _converted(bare: nn.Module, tensors: dict) -> dict:
    """``tensors`` as `save_pretrained` has them."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ModuleNotFoundError:  # before 5, they are saved as they are
        return tensors
    return revert_weight_conversion(bare, tensors)


class _Traced(torch.Tensor):
    """A tensor on the meta device whose views stay views: they are contiguous enough."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.contiguous:
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})


def _block(view: torch.Tensor, shape: Sequence[int]):
    """Which block of a contiguous tensor of ``shape`` a view is, and its dims' order; None: none.

    Dims of more than one element have strides of their own.
    """
    strides = [1, *itertools.accumulate(reversed(shape[1:]), lambda a, b: a * b)][::-1]
    strides = strides[: len(shape)]
    offset, rest = [], view.storage_offset()
    for stride in strides:
        offset.append(rest // stride)
        rest %= stride
    dim_of = {stride: dim for dim, stride in enumerate(strides) if shape[dim] > 1}
    sizes, order = [1] * len(shape), []
    for size, stride in zip(view.shape, view.stride(), strict=True):
        dim = dim_of.get(stride) if size > 1 else None
        if size > 1 and (dim is None or dim in order):
            return None
        if dim is not None:
            sizes[dim] = size
        order.append(dim)
    if any(at + n > whole for at, n, whole in zip(offset, sizes, shape, strict=True)):
        return None
    return Piece(tuple(offset), tuple(sizes)), tuple(order)


def with_or_without_prefix(bare: nn.Module, name: str) -> str:
    """What a tensor of ``bare`` is called in its base model, or one of the base model in it."""
    dot = f"{bare.base_model_prefix}." if bare.base_model_prefix else ""
    return name.removeprefix(dot) if name.startswith(dot) else dot + name


def _spelled(bare: nn.Module, found: list[Stored]) -> list[Stored]:
    """``found`` with the other names under which a folder may have them.

    A base model's folder lacks its prefix; a tied tensor may be there under its other name, and a
    whole one as it is in memory.
    """
    first = {id(p): name for name, p in bare.named_parameters()}
    aliases: dict[str, list[str]] = {}
    for name, parameter in bare.named_parameters(remove_duplicate=False):
        aliases.setdefault(first[id(parameter)], []).append(name)
    count: dict[str, int] = {}
    for each in found:
        count[each.of] = count.get(each.of, 0) + 1
    spelled = []
    for each in found:
        names = [each.name, *(aliases.get(each.of, ()) if count[each.of] == 1 else ())]
        more = [with_or_without_prefix(bare, name) for name in names]
        others = tuple(dict.fromkeys(name for name in [*names, *more] if name != each.name))
        spelled.append(Stored(each.name, each.of, each.block, each.shape, each.order, others))
    return spelled
