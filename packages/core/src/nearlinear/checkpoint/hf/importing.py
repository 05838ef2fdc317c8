"""`nl.import_hf`: a Hugging Face folder into a model of any layout, each rank its own blocks."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ...errors import CheckpointError
from .. import state
from ..agree import some, together
from ..pieces import Piece, blocks
from . import skeleton
from .listing import weight_files
from .naming import Stored, stored, with_or_without_prefix

COMPUTED = r"rotary_emb\.inv_freq$"
"""What older releases saved of every model with rotary positions; others are the model's to say."""


class Folder:
    """The tensors of a folder: names, shapes, and any part of their values."""

    def __init__(self, path: Path):
        self.path = path
        self.files: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in weight_files(path):
            with self._open(file) as values:
                for name in values.keys():  # noqa: SIM118 - not a dict
                    self.files[name] = file
                    self.shapes[name] = tuple(values.get_slice(name).get_shape())

    def read(self, file: Path, wanted: Iterable[tuple[str, tuple[slice, ...]]]):
        """Parts of tensors that lie in ``file``, one at a time."""
        with self._open(file) as values:
            for name, inside in wanted:
                try:
                    yield values.get_slice(name)[inside] if inside else values.get_tensor(name)
                except (OSError, SafetensorError) as error:
                    raise CheckpointError(f"{file} cannot be read: {error}") from None

    def _open(self, file: Path):
        try:
            return safe_open(file, "pt")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{file} is no safetensors file, or not all of it ({error}): download it again"
            ) from None


def import_hf(path, model: nn.Module) -> None:
    """Give ``model`` the values of the Hugging Face folder ``path``: safetensors, one file or many.

    ``model`` may be of any layout, also one built under `delayed_init`; it is sharded already. Each
    rank reads the parts it holds of each tensor, one after another, and converts them to the
    model's dtype. Raises CheckpointError on all ranks: before the first value has been changed,
    unless a file cannot be read. A collective call.
    """
    with together():
        wanted = state.parts_of(model)
        folder = Folder(Path(path))
        copies = _copies(folder, skeleton.of_model(model), wanted)
    with together():
        _fill(folder, copies)


def _copies(folder: Folder, bare: nn.Module, wanted: dict[str, state.Part]) -> dict[Path, list]:
    """What to read of each file, and where to put it. Raises CheckpointError."""
    for name, part in wanted.items():
        if part.tensor.is_meta:
            raise CheckpointError(
                f"{name} has no memory yet: call nl.shard(model) before nl.import_hf"
            )
    found = _matched(folder, bare)
    copies: dict[Path, list] = {}
    for each, name in found:
        part = wanted.get(each.of)
        for piece, values in blocks(part.tensor, part.cuts).items() if part else ():
            common = piece.overlap(each.block)
            if common is not None:
                copy = (name, each, common, values[common.inside(piece)])
                copies.setdefault(folder.files[name], []).append(copy)
    return copies


def _matched(folder: Folder, bare: nn.Module) -> list[tuple[Stored, str]]:
    """The tensors of the model, each with its name in ``folder``. Raises CheckpointError."""
    kind, names, found, faults = type(bare).__name__, set(folder.shapes), [], []
    known = {name for name, _ in bare.named_buffers()}  # those that are not saved are computed
    known |= {with_or_without_prefix(bare, name) for name in known}
    for each in _of_folder(stored(bare), bare, names):
        known |= {each.name, *each.spellings}
        name = next((name for name in (each.name, *each.spellings) if name in names), None)
        if name is None:
            faults.append(f"has no {each.name}")
        elif folder.shapes[name] != each.shape:
            shape = list(folder.shapes[name])
            faults.append(f"has {name} of {shape} instead of {list(each.shape)}")
        else:
            found.append((each, name))
    ignored = [COMPUTED]
    for model in (bare, bare.base_model):
        ignored += getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    for name in names - known:
        if not any(re.search(pattern, name) for pattern in ignored):
            faults.append(f"has {name}, which {kind} has not")
    if faults:
        raise CheckpointError(
            f"{folder.path} is of another model: it {some(faults)}; build the model from "
            "its config.json"
        )
    return found


def _of_folder(usual: list[Stored], bare: nn.Module, names: set[str]) -> list[Stored]:
    """``usual``, or, in a folder that was saved as the model is in memory, that."""
    inside = {name: tuple(part.tensor.shape) for name, part in state.parts_of(bare).items()}
    in_blocks = {each.of for each in usual if each.shape != inside[each.of]}
    as_it_is = {name for name in in_blocks if name in names}
    return [each for each in usual if each.of not in as_it_is] + [
        Stored(name, name, Piece.whole(inside[name]), inside[name],
               tuple(range(len(inside[name]))))
        for name in sorted(as_it_is)
    ]  # fmt: skip


@torch.no_grad()
def _fill(folder: Folder, copies: dict[Path, list]) -> None:
    for file in sorted(copies):
        parts = [(name, each.inside(common)) for name, each, common, _ in copies[file]]
        read = folder.read(file, parts)
        for (_, each, common, values), part in zip(copies[file], read, strict=True):
            values.copy_(each.back(part, common))
