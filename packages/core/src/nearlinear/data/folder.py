"""A split of token shards in a folder of this machine's file systems, checked once per process."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import numpy as np

from .documents import DocumentIndex
from .format import Manifest, verify
from .split import Split

logger = logging.getLogger("nearlinear.data")

_FULL_CHECK_BYTES = 2 * 1024**3
_verified: set[tuple] = set()
_verify_lock = threading.Lock()


class Folder(Split):
    """Shards in `path`; `mode` as `TokenDataset` has it of `verify`. Raises `DataError`."""

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
    """Check a split's files unless this process already checked the same unchanged files."""
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
                "%s: checked sizes only, %.1f GiB is over 2 GiB; "
                "`python -m data_prep verify %s` checks every byte",
                path, size / 1024**3, path,
            )  # fmt: skip
        verify(path, full=full, splits=(split,))
        _verified.add((*key, full))
