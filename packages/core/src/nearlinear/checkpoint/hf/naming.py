"""Map the tensors of a model to the tensors of its Hugging Face folder.

transformers 5 stacks the experts of a mixture when it loads them and renames parts of some model
families, but saves in the original form. We run its conversion on meta tensors. The results are
views, and their strides and offsets identify the block of the source tensor. Tied tensors are
stored under the name that `save_pretrained` uses.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...errors import CheckpointError
from .. import state
from ..shards import TensorShard


@dataclass(frozen=True)
class HFTensor:
    """One tensor of a folder: a block of a tensor of the model, with its dims permuted."""

    name: str
    """Name in the folder."""
    source: str
    """Name of the model's tensor."""
    block: TensorShard
    """Block of the model's tensor."""
    shape: tuple[int, ...]
    """Shape in the folder."""
    dims: tuple[int | None, ...]
    """Dim of the model's tensor for each dim in the folder; None for a dim of size 1."""
    aliases: tuple[str, ...] = ()
    """Other names that the tensor may have in folders written by other programs."""

    def to_hf(self, block: torch.Tensor) -> torch.Tensor:
        """Return ``block`` of the model's tensor in the shape of the folder, as a view."""
        named = [dim for dim in self.dims if dim is not None]
        rest = [dim for dim in range(block.dim()) if dim not in named]
        return block.permute([*named, *rest]).reshape(self.shape)

    def hf_slices(self, part: TensorShard) -> tuple[slice, ...]:
        """Return the slices of the folder's tensor with ``part`` of `block`."""
        inside = part.slices_in(self.block)
        return tuple(slice(0, 1) if dim is None else inside[dim] for dim in self.dims)

    def from_hf(self, values: torch.Tensor, part: TensorShard) -> torch.Tensor:
        """Return the values of `hf_slices` in the shape of ``part``."""
        named = [dim for dim in self.dims if dim is not None]
        values = values.reshape([part.shape[dim] for dim in named])
        values = values.permute([named.index(dim) for dim in sorted(named)])
        return values.reshape(part.shape)


def whole_tensor(name: str, source: str, shape: Sequence[int]) -> HFTensor:
    """Return the model's tensor ``source`` as it is, under the name ``name``."""
    shape = tuple(shape)
    return HFTensor(name, source, TensorShard.full(shape), shape, tuple(range(len(shape))))


def hf_tensors(bare: Any) -> list[HFTensor]:
    """Return the tensors of a folder of ``bare``, a meta model, in `save_pretrained`'s order.

    Raises CheckpointError for a model whose saved tensors are not blocks of its own tensors.
    """
    # tied tensors under their first names
    shapes = {name: each.tensor.shape for name, each in state.model_tensors(bare).items()}
    saved = _saved_names(bare)
    traced, sources = {}, {}
    for name in bare.state_dict():
        if name in saved:
            values = torch.empty(shapes[saved[name]], device="meta").as_subclass(_Traced)
            traced[name] = values
            sources[values.untyped_storage()._cdata] = (saved[name], values)
    found = []
    for name, values in _convert(bare, traced).items():
        source, whole = sources.get(values.untyped_storage()._cdata, ("", None))
        located = _find_block(values, whole.shape) if whole is not None else None
        if located is None:
            raise CheckpointError(
                f"transformers computes {name} of {type(bare).__name__} when it saves, which needs "
                "the whole model: load the checkpoint on one rank, and call save_pretrained"
            )
        found.append(HFTensor(name, source, located[0], tuple(values.shape), located[1]))
    return _add_aliases(bare, found)


def _saved_names(bare: nn.Module) -> dict[str, str]:
    """Return the saved names of the state dict, each with the tensor's first name."""
    names = _names_by_tensor(bare)
    tied = _tied_patterns(bare)
    saved = {}
    for first, aliases in names.items():
        free = [name for name in aliases if not any(re.search(key, name) for key in tied)]
        saved[(free or sorted(aliases)[-1:])[0]] = first
    known = {name for aliases in names.values() for name in aliases}
    saved |= {name: name for name in bare.state_dict() if name not in known}
    for name in getattr(bare, "_keys_to_ignore_on_save", None) or ():
        saved.pop(name, None)
    return saved


def _names_by_tensor(bare: nn.Module) -> dict[str, list[str]]:
    """Return all names of each parameter, by its first name."""
    first = {id(p): name for name, p in bare.named_parameters()}
    names: dict[str, list[str]] = {}
    for name, parameter in bare.named_parameters(remove_duplicate=False):
        names.setdefault(first[id(parameter)], []).append(name)
    return names


def _tied_patterns(bare: nn.Module) -> list[str]:
    """Return patterns of names that a loader ties to others."""
    all_keys = getattr(bare, "all_tied_weights_keys", None)  # transformers 5: keys of a dict
    if all_keys is not None:
        return list(all_keys)
    return list(getattr(bare, "_tied_weights_keys", None) or ())


def _convert(bare: nn.Module, tensors: dict) -> dict:
    """Convert ``tensors`` to the form that `save_pretrained` writes."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ModuleNotFoundError:  # transformers before 5 does not convert
        return tensors
    bare_any: Any = bare
    return revert_weight_conversion(bare_any, tensors)


class _Traced(torch.Tensor):
    """A meta tensor whose `contiguous` returns the same view, so that strides are kept."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.contiguous:
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})


def _find_block(
    view: torch.Tensor, shape: Sequence[int]
) -> tuple[TensorShard, tuple[int | None, ...]] | None:
    """Return the block of a contiguous tensor of ``shape`` that a view covers, and its dim order.

    Return None if the view is not a block. The strides of dims with more than one element are
    distinct, which identifies them.
    """
    strides = [1, *itertools.accumulate(reversed(shape[1:]), lambda a, b: a * b)][::-1]
    strides = strides[: len(shape)]
    offset, rest = [], int(view.storage_offset())
    for stride in strides:
        offset.append(rest // stride)
        rest %= stride
    dim_of = {stride: dim for dim, stride in enumerate(strides) if shape[dim] > 1}
    sizes: list[int] = [1] * len(shape)
    dims: list[int | None] = []
    for size, stride in zip(view.shape, view.stride(), strict=True):
        dim = dim_of.get(stride) if size > 1 else None
        if size > 1 and (dim is None or dim in dims):
            return None
        if dim is not None:
            sizes[dim] = size
        dims.append(dim)
    if any(at + n > whole for at, n, whole in zip(offset, sizes, shape, strict=True)):
        return None
    return TensorShard(tuple(offset), tuple(sizes)), tuple(dims)


def toggle_prefix(bare: Any, name: str) -> str:
    """Remove the base model's prefix from ``name``, or add it if it is missing."""
    dot = f"{bare.base_model_prefix}." if bare.base_model_prefix else ""
    return name.removeprefix(dot) if name.startswith(dot) else dot + name


def _add_aliases(bare: nn.Module, found: list[HFTensor]) -> list[HFTensor]:
    """Add the other names that a folder may use.

    The folder of a base model lacks its prefix, a tied tensor may be stored under its other name,
    and a whole tensor under its name in memory.
    """
    names_of = _names_by_tensor(bare)
    count = Counter(each.source for each in found)
    complete = []
    for each in found:
        names = [each.name, *(names_of.get(each.source, ()) if count[each.source] == 1 else ())]
        toggled = [toggle_prefix(bare, name) for name in names]
        others = dict.fromkeys(name for name in [*names, *toggled] if name != each.name)
        complete.append(dataclasses.replace(each, aliases=tuple(others)))
    return complete
