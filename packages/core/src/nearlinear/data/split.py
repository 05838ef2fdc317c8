"""Sources of token shards: the files of one split, local or remote.

`ShardSource` is the interface. `LocalShards` reads token shards from a local folder and checks them
once per process.
"""

from __future__ import annotations

import abc
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError
from .documents import DocumentIndex, DocumentsByToken
from .format import Manifest, Shard, verify


class NoSplit(DataError):
    """The data does not contain the requested split, or the split is empty."""


class ShardSource(abc.ABC):
    """Shards of one split of a dataset at `path`. Raises `NoSplit` if the split is absent."""

    files: Sequence[Path | str]
    """Token files of the shards in stream order: local paths or URLs."""

    def __init__(
        self, path: Path | str, split: str, manifest: Manifest, dtype: np.dtype | None = None
    ):
        self.path: Path | str = path
        self.split: str = split
        self.manifest: Manifest = manifest
        self.dtype: np.dtype[Any] = dtype or manifest.dtype
        """Dtype of the tokens in the files."""
        if split not in manifest.splits:
            raise NoSplit(
                f"{path} has no split {split!r}: it has {', '.join(sorted(manifest.splits))}"
            )
        self.shards: tuple[Shard, ...] = manifest.splits[split]
        if not manifest.total("tokens", split):
            raise NoSplit(
                f"split {split!r} of {path} is empty: prepare the data again with more text or a "
                "larger --val-fraction"
            )

    @abc.abstractmethod
    def tokens(self, shard: int) -> np.ndarray:
        """Return the tokens [n] of a shard: an array, or an object with the same slicing."""

    @abc.abstractmethod
    def documents(self, shard: int) -> DocumentIndex | DocumentsByToken:
        """Return the document index of a shard."""

    @abc.abstractmethod
    def tokenizer(self) -> Path:
        """Return the local path of the tokenizer file. Raises `DataError` if it is unknown."""

    def prefetch(self, extents: np.ndarray) -> np.ndarray:
        """Download byte ranges of the files to this node.

        Args:
            extents: int64 [n, 3] of shard, first byte and end.

        Returns:
            The extents in local files, which the caller may read ahead.
        """
        return extents


logger = logging.getLogger("nearlinear.data")

_FULL_CHECK_BYTES = 2 * 1024**3
_verified: set[tuple] = set()
_verify_lock = threading.Lock()


class LocalShards(ShardSource):
    """Token shards in a local folder. `mode` is the `verify` argument of `TokenDataset`."""

    files: list[Path]

    def __init__(self, path: Path, split: str, mode: str):
        super().__init__(path, split, Manifest.read(path))
        self.files = [path / shard.file for shard in self.shards]
        _verify_once(path, self.manifest, split, mode)

    def tokens(self, shard: int) -> np.ndarray:
        return np.asarray(np.memmap(self.files[shard], dtype=self.dtype, mode="r"))

    def documents(self, shard: int) -> DocumentIndex:
        return DocumentIndex(self.files[shard].with_suffix(".idx"), self.shards[shard].bytes)

    def tokenizer(self) -> Path:
        return self.path / self.manifest.tokenizer["file"]


def _verify_once(path: Path, manifest: Manifest, split: str, mode: str) -> None:
    """Check the files of a split unless this process has already checked them unchanged."""
    size = manifest.total("bytes", split)
    full = mode == "full" or (mode == "auto" and size <= _FULL_CHECK_BYTES)
    with _verify_lock:
        files = [name for p in manifest.splits[split] for name in (p.file, p.idx_file)]
        stats = [(path / name).stat() for name in files if (path / name).is_file()]
        changed = tuple((s.st_size, s.st_mtime_ns) for s in stats)
        key = (path.resolve(), manifest.fingerprint, split, changed)
        if (*key, True) in _verified or (*key, full) in _verified:
            return
        if mode == "auto" and not full:
            logger.info(
                "%s: checked file sizes only, because the split has %.1f GiB (limit 2 GiB); "
                "run `python -m data_prep verify %s` to check every byte",
                path, size / 1024**3, path,
            )  # fmt: skip
        verify(path, full=full, splits=(split,))
        _verified.add((*key, full))
