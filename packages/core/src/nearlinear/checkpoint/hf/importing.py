"""`nl.import_hf`: load a Hugging Face folder into a model of any layout, each rank its shards."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ...config.architecture import weight_files
from ...distributed.consensus import raise_on_all_ranks
from ...errors import CheckpointError, join_faults
from .. import state
from ..shards import TensorShard, local_tensor_shards
from . import meta_model
from .naming import HFTensor, hf_tensors, toggle_prefix

COMPUTED = r"rotary_emb\.inv_freq$"
"""Buffers saved by older releases of transformers for every model with rotary positions."""

Copy = tuple[str, HFTensor, TensorShard, torch.Tensor]
"""Name in the folder, its tensor, the block to read, and the memory for it."""


class HFFolder:
    """Tensors of a Hugging Face folder: names, shapes, and slices of their values."""

    def __init__(self, path: Path):
        self.path = path
        self.files: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in weight_files(path):
            with self._open(file) as values:
                for name in values.keys():  # noqa: SIM118 - not a dict
                    self.files[name] = file
                    self.shapes[name] = tuple(values.get_slice(name).get_shape())

    def read(
        self, file: Path, wanted: Iterable[tuple[str, tuple[slice, ...]]]
    ) -> Iterator[torch.Tensor]:
        """Yield slices of tensors in ``file``, one at a time."""
        with self._open(file) as values:
            for name, inside in wanted:
                try:
                    yield values.get_slice(name)[inside] if inside else values.get_tensor(name)
                except (OSError, SafetensorError) as error:
                    raise CheckpointError(
                        f"{file} cannot be read ({error}): download it again"
                    ) from None

    def _open(self, file: Path) -> Any:
        try:
            return safe_open(file, "pt")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{file} is not a complete safetensors file ({error}): download it again"
            ) from None


def import_hf(path: str | Path, model: nn.Module) -> None:
    """Load the values of a Hugging Face folder of safetensors files into ``model``.

    Example::

        with nl.deferred_init(values=False):
            model = AutoModelForCausalLM.from_config(config)
        model = nl.shard(model)
        nl.import_hf("exported", model)

    Each rank reads only its own shards, one tensor after another, and converts them to the model's
    dtype. Raises CheckpointError on all ranks, before any value is changed unless a file cannot be
    read.

    A collective call.

    Args:
        path: The folder.
        model: A sharded model of any layout, also one built under `deferred_init`.
    """
    copies: dict[Path, list[Copy]] = {}
    folder = None
    with raise_on_all_ranks():
        wanted = state.model_tensors(model)
        folder = HFFolder(Path(path))
        copies = _plan_copies(folder, meta_model.build_like(model), wanted)
    with raise_on_all_ranks():
        if folder is not None:
            _copy_all(folder, copies)


def _plan_copies(
    folder: HFFolder, bare: Any, wanted: dict[str, state.StateTensor]
) -> dict[Path, list[Copy]]:
    """Return the slices to read from each file, and their destinations. Raises CheckpointError."""
    for name, each in wanted.items():
        if each.tensor.is_meta:
            raise CheckpointError(
                f"{name} has no memory yet: call nl.shard(model) before nl.import_hf"
            )
    copies: dict[Path, list[Copy]] = {}
    for tensor, name in _match_names(folder, bare):
        target = wanted.get(tensor.source)
        local = local_tensor_shards(target.tensor, target.splits) if target else {}
        for shard, values in local.items():
            common = shard.intersect(tensor.block)
            if common is not None:
                copy = (name, tensor, common, values[common.slices_in(shard)])
                copies.setdefault(folder.files[name], []).append(copy)
    return copies


def _match_names(folder: HFFolder, bare: Any) -> list[tuple[HFTensor, str]]:
    """Return the tensors of the model, each with its name in ``folder``. Raises CheckpointError."""
    kind, names = type(bare).__name__, set(folder.shapes)
    found: list[tuple[HFTensor, str]] = []
    faults: list[str] = []
    known = {name for name, _ in bare.named_buffers()}  # buffers that are not saved are computed
    known |= {toggle_prefix(bare, name) for name in known}
    for tensor in _expected_tensors(bare, names):
        known |= {tensor.name, *tensor.aliases}
        name = next((name for name in (tensor.name, *tensor.aliases) if name in names), None)
        if name is None:
            faults.append(f"has no {tensor.name}")
        elif folder.shapes[name] != tensor.shape:
            shape = list(folder.shapes[name])
            faults.append(f"has {name} of {shape} instead of {list(tensor.shape)}")
        else:
            found.append((tensor, name))
    ignored = [COMPUTED]
    for model in (bare, bare.base_model):
        ignored += getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    for name in names - known:
        if not any(re.search(pattern, name) for pattern in ignored):
            faults.append(f"has {name}, which {kind} does not have")
    if faults:
        raise CheckpointError(
            f"{folder.path} is of another model: it {join_faults(faults)}; build the model from "
            "its config.json"
        )
    return found


def _expected_tensors(bare: Any, names: set[str]) -> list[HFTensor]:
    """Return the tensors of a folder of ``bare``.

    A folder may contain a tensor whole, as it is in memory, that `save_pretrained` splits.
    """
    usual = hf_tensors(bare)
    shapes = {name: tuple(each.tensor.shape) for name, each in state.model_tensors(bare).items()}
    split = {tensor.source for tensor in usual if tensor.shape != shapes[tensor.source]}
    whole = sorted(split & names)
    return [tensor for tensor in usual if tensor.source not in whole] + [
        HFTensor(name, name, TensorShard.full(shapes[name]), shapes[name],
                 tuple(range(len(shapes[name]))))
        for name in whole
    ]  # fmt: skip


@torch.no_grad()
def _copy_all(folder: HFFolder, copies: dict[Path, list[Copy]]) -> None:
    for file in sorted(copies):
        parts = [(name, tensor.hf_slices(common)) for name, tensor, common, _ in copies[file]]
        read = folder.read(file, parts)
        for (_, tensor, common, target), part in zip(copies[file], read, strict=True):
            target.copy_(tensor.from_hf(part, common))
