"""One split of some token files, wherever they are and whoever wrote them."""

from __future__ import annotations

import abc
from pathlib import Path

import numpy as np

from ..errors import DataError
from .documents import DocumentIndex, DocumentsByToken
from .format import Manifest


class NoSplit(DataError):
    """Some data has no such split, or nothing in it."""


class Split(abc.ABC):
    """The shards of `split` of `manifest`, which lie at `path`. Raises `NoSplit`."""

    files: list[Path | str]
    """the shards' token files, in stream order: paths, or addresses"""

    def __init__(self, path: Path | str, split: str, manifest: Manifest):
        self.path, self.split, self.manifest = path, split, manifest
        if split not in manifest.splits:
            raise NoSplit(
                f"{path} has no split {split!r}: it has {', '.join(sorted(manifest.splits))}"
            )
        self.shards = manifest.splits[split]
        if not manifest.total("tokens", split):
            raise NoSplit(
                f"split {split!r} of {path} is empty: prepare the data again with more text or a "
                "larger --val-fraction"
            )

    @property
    def dtype(self) -> np.dtype:
        """Of the tokens in the files."""
        return self.manifest.dtype

    @abc.abstractmethod
    def tokens(self, shard: int) -> np.ndarray:
        """The tokens [n] of a shard, or what is sliced as they are."""

    @abc.abstractmethod
    def documents(self, shard: int) -> DocumentIndex | DocumentsByToken:
        """Where documents begin in a shard."""

    @abc.abstractmethod
    def tokenizer(self) -> Path:
        """The tokenizer's file, on this machine. Raises `DataError` where it is not known."""

    def bring(self, extents: np.ndarray) -> np.ndarray:
        """Fetch parts of the files, int64 [n, 3] of shard, first byte and end, to this machine.

        Returns those that lie in files of this machine, which whoever likes can read ahead.
        """
        return extents
