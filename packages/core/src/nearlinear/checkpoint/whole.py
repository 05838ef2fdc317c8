"""The tensors of a checkpoint without the ranks that wrote it: whole, one at a time."""

from __future__ import annotations

import torch
from safetensors import SafetensorError

from .. import storage
from ..errors import CheckpointError
from . import index
from .pieces import Piece
from .reading import opened


class Whole:
    """The checkpoint in ``folder``, to be read; each file's content is checked before its first
    use, unless ``checked``. Raises CheckpointError."""

    def __init__(self, folder, checked: bool = False):
        self.folder, self.index = storage.at(folder), index.read(folder)
        if why := index.missing(self.folder, self.index):
            raise CheckpointError(f"{folder} is not whole: {why}")
        self._checked = set(self.index.files) if checked else set()

    def tensor(self, name: str) -> torch.Tensor:
        """All of a tensor."""
        return self.block(name, Piece.whole(self.index.tensors[name].shape))

    def block(self, name: str, block: Piece) -> torch.Tensor:
        """A block of a tensor."""
        entry = self.index.tensors[name]
        values = torch.empty(block.shape, dtype=getattr(torch, entry.dtype))
        for file, pieces in entry.pieces.items():
            for number, piece in enumerate(pieces):
                common = piece.overlap(block)
                if common is not None:
                    part = self._read(file, index.key(name, number), common.inside(piece))
                    values[common.inside(block)] = part
        return values

    def _read(self, file: str, key: str, inside: tuple[slice, ...]) -> torch.Tensor:
        if file not in self._checked:
            index.check_content(self.folder / file, self.index.files[file])
            self._checked.add(file)
        try:
            with opened(self.folder / file) as values:
                return values.get_slice(key)[inside] if inside else values.get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.folder / file} cannot be read: {error}") from None
